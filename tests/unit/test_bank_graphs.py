"""Learners of a bank that compute at the same time, on threads or on streams of a device: the bits of each alone."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import nn

import rudra
from rudra.compute import feed
from rudra.compute.bank import graphs
from rudra.compute.bank.gathering import bank_of
from rudra.compute.bank.graphs import Drawing, check_graphs, compute_at_once, streams_of
from rudra.compute.bank.trial import BankLearners
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.faults import set_deterministic
from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.streams import Done, Number, Pending, Stream
from rudra.compute.device.threads import Threads, ThreadStream
from rudra.compute.executor import torch_as_in
from rudra.compute.graphs import KEPT, SEEN, WARM, GraphedSteps
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.actions import Compute, StepReplica
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import Computed, ReplicaStepped
from rudra.data.load import Data, load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.mpi.long_work import LongWork

LEARNERS, STEPS, PERIOD = 3, 8, 2
"""The learners of the tests make some steps, and are averaged every other step. Their device records some of these."""


def network(*_: Any) -> nn.Module:
    """A network with statistics, a counter and random numbers."""
    layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 10)
    return nn.Sequential(*layers, nn.Dropout(0.1, inplace=True))


def job_of(model: Callable[..., Any] | str = network, device: str = "cpu", **cluster: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "digits", "train_limit": 64, "test_limit": 10},
        training={"minibatch_size": 4, "gradients": "autograd"},
        optimizer={"momentum": 0.9},
        protocol={"name": "sma"},
        cluster={
            "learners": LEARNERS,
            "learners_per_device": LEARNERS,
            "bank": "graphs",
            "threads_per_rank": 1,
            "device": device,
            **cluster,
        },
    ).resolved()


@cache
def data() -> Data:
    return load(job_of().data, test=False)


NUMBERS = {"LearnerExecutor._attempt": 4, "ElasticExecutor.step": 1}
"""Count of numbers that come back with the work of a function."""


class Impatient(Stream):
    """Stream of a learner whose host does not wait for some of its work."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream, self._name = stream, name

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        pending = self._stream.submit(work, after)
        named = getattr(work, "func", work).__qualname__
        return Done([0.0] * NUMBERS[self._name]) if self._name in named else pending


class Bank:
    """Learners of a rank, whose roles are a loop: gradient, step with a correction, and now and then an average."""

    def __init__(self, job: Job, device: torch.device = CPU) -> None:
        plan, self.woken = job.plan(), threading.Event()
        about = {"prefetch": False, "at_once": job.cluster.graphed, "device": device}
        made: dict[int, Any] = {}
        made |= make_executors(job, plan, plan.learners, data(), **about)  # type: ignore[arg-type]
        self.learners = made
        if job.cluster.graphed:
            training = data().training
            assert training is not None
            compute_at_once(job, [*self.learners.values()], training, say=True)
        for learner in self.learners.values():
            learner.prepare()

    def train(self) -> str:
        """Makes all steps. Returns a digest of the weights and the losses."""
        work, stepped = LongWork(self.woken.set), dict.fromkeys(self.learners, 0)
        losses: dict[tuple[int, int], tuple[float, ...]] = {}

        def compute(role: int) -> None:
            source, step = self.learners[role].source, stepped[role]
            action = Compute(step, source.work.after(step), REPLICA, GRADIENT)
            self.learners[role].make_room(action)
            work.begin(role, self.learners[role].perform(action), lambda event: None)

        def heed(role: int, event: Any) -> None:
            if isinstance(event, Computed):
                losses[role, event.step] = event.loss, event.errors
                step = StepReplica(GRADIENT, REPLICA, 0.05, WEIGHTS, DIFFERENCE, 0.1)
                for after in work.do_now(role, self.learners[role].perform(step)):
                    heed(role, after)
                return
            assert isinstance(event, ReplicaStepped)
            losses[role, ~stepped[role]] = (event.distance,)
            stepped[role] += 1
            ready = [role]
            if stepped[role] % PERIOD == 0:
                ready = list(stepped) if min(stepped.values()) == stepped[role] else []
                if ready:
                    self.average()
            for each in ready if stepped[role] < STEPS else []:
                compute(each)

        for role in self.learners:
            compute(role)
        while min(stepped.values()) < STEPS:
            if (found := work.advance()) is not None and found[1] is not None:
                heed(*found)
            elif found is None and work.threaded:
                assert self.woken.wait(60), "a thread did not say that it has done its work"
                self.woken.clear()
        vectors = [self.learners[role].buffer(name).array for role in self.learners for name in (WEIGHTS, REPLICA)]
        return sha256(b"".join(map(bytes, vectors)) + repr(sorted(losses.items())).encode()).hexdigest()

    def average(self) -> None:
        differences = [each.buffer(DIFFERENCE).vector for each in self.learners.values()]
        for learner in self.learners.values():
            learner.buffer(WEIGHTS).vector.sub_(torch.stack(differences).mean(0))

    def close(self) -> None:
        for learner in self.learners.values():
            learner.close()


def trained(job: Job, spoil: Callable[[LearnerExecutor], None] = lambda learner: None) -> str:
    bank = Bank(job)
    for learner in bank.learners.values():
        spoil(learner)
    try:
        return bank.train()
    finally:
        bank.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with torch_as_in(job_of().cluster):
        yield


@pytest.fixture(scope="module")
def alone(one_thread: None) -> str:
    """Digest of the learners when they compute one after another."""
    return trained(job_of(bank="loop"))


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_the_numbers_do_not_depend_on_the_threads(streams: int, alone: str) -> None:
    bank = Bank(job_of(streams=streams))
    assert all(each.own_stream for each in bank.learners.values())
    names = {thread for thread in threading.enumerate() if thread.name == "rudra-learner"}
    assert len(names) == streams
    assert bank.train() == alone
    bank.close()
    assert not any(thread.is_alive() for thread in names)


class Meeting(nn.Module):
    """A network whose learners wait for each other, after they have seeded generators and before they draw."""

    meet = threading.Barrier(LEARNERS, timeout=60)

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "rudra-learner":
            assert torch.get_num_threads() == 1
            self.meet.wait()
        output: torch.Tensor = self.network(inputs)
        return output


@pytest.mark.parametrize("apart", [True, False])
def test_learners_that_compute_at_the_same_time_draw_their_own_numbers(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(job_of(Meeting, bank="loop"))
    if not apart:
        monkeypatch.setattr(graphs, "drawing_of", lambda *args: Drawing(masks=False))
    assert (trained(job_of(Meeting, streams=LEARNERS)) == wanted) == apart


@pytest.mark.parametrize("orders", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.campaign)])
@pytest.mark.timeout(900)
def test_any_order_of_a_device_has_the_same_bits(
    orders: Sequence[int], monkeypatch: pytest.MonkeyPatch, alone: str
) -> None:
    for seed in orders:
        monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(seed))
        streams = 1 + seed % LEARNERS
        assert trained(job_of(streams=streams)) == alone, seed


def without_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    take = feed.Feed.take
    monkeypatch.setattr(feed.Feed, "take", lambda *args: take(*args)._replace(copied=Done([])))


WAITS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "copies of mini-batches": (without_wait_for_copies, ""),
    "gradients": (lambda monkeypatch: None, "LearnerExecutor._attempt"),
    "steps": (lambda monkeypatch: None, "ElasticExecutor.step"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str, monkeypatch: pytest.MonkeyPatch, alone: str) -> None:
    spoil, name = WAITS[wait]
    spoil(monkeypatch)

    def impatient(learner: LearnerExecutor) -> None:
        learner._stream = Impatient(learner._stream, name) if name else learner._stream

    found = set()
    for seed in range(30):
        monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(seed))
        with suppress(IndexError):  # of samples: what has not been copied is any number
            found.add(trained(job_of(), impatient))
            if found - {alone}:
                return
    assert len(found) == 0


def test_a_device_repeats_a_graph_for_each_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1))
    bank = Bank(job_of())
    bank.train()
    models = [each.source.model for each in bank.learners.values()]
    assert len({*map(id, models)}) == LEARNERS
    assert all(model.graphs.tried and not model.graphs.refusal for model in models)
    assert [each._graphed.count for each in bank.learners.values()] == [1] * LEARNERS, "a record of the step as well"


def test_steps_are_recorded_again_with_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1))
    steps = GraphedSteps(CPU)
    read, written = torch.ones(3), torch.zeros(3)

    def work(rate: float) -> tuple[Number, ...]:
        written.add_(read, alpha=rate)
        return (written.sum().double(),)

    rates = [1.0] * 6 + [2.0] * 6
    found = [float(steps.do(partial(work, rate), rate, [read], [written])[0]) for rate in rates]
    assert found == [3.0 * total for total in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18)]
    assert steps.count == 2
    for number in range(10, 1000):
        steps.do(partial(work, 0.0), number, [read], [written])
    assert steps.count == 2
    assert len(steps._seen) <= SEEN + 1
    steps.forget()
    assert steps.count == 0
    steps.do(partial(work, 1.0), 1.0, [read], [written])
    assert steps.count == 0
    for number in range(3 * KEPT):
        for _ in range(WARM + 2):
            steps.do(partial(work, 0.0), -number, [read], [written])
    assert steps.count == KEPT
    assert written.tolist() == [19.0] * 3


@pytest.mark.parametrize(("protocol", "topology"), [("async", "base"), ("hardsync", "groups")])
def test_learners_of_a_bank_begin_no_forward_pass_early(protocol: str, topology: str) -> None:
    """The pass of a learner would not wait for its bank, or would be computed in the thread of the roles."""
    cluster = {"learners": LEARNERS, "learners_per_device": LEARNERS, "bank": "loop"}
    tables: Any = {"topology": {"name": topology}, "model": {"name": "mlp"}, "cluster": cluster}
    job = Job(protocol={"name": protocol}, data={"name": "digits", "train_limit": 64}, **tables).resolved()
    plan = job.plan()
    learners: list[Any] = [*make_executors(job, plan, plan.learners, data(), prefetch=False).values()]
    assert all(each.can_pass_early for each in learners)
    learners[0].bank = bank_of(job, plan, learners)
    learners[1].use_stream(Stream())
    assert [each.can_pass_early for each in learners] == [False, False, True]


# Models and data.


class Waits(nn.Module):
    """A network whose code depends on a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs.flatten(1))
        return out * 2 if out.sum() > 0 else out


class Chooses(Waits):
    """A network whose tensors have as many elements as there are positive numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs.flatten(1))
        return out + out[out > 0].mean()


@pytest.mark.parametrize("model", [Waits, Chooses])
def test_a_model_that_a_device_cannot_record_is_refused_with_the_place(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1))
    with pytest.raises(ConfigError) as caught:
        rudra.simulate(job_of(model), progress="quiet")
    text = str(caught.value)
    assert text.startswith("[cluster] bank = 'graphs': the step of this model cannot be recorded: the host waits for a")
    assert "(at test_bank_graphs.py:" in text
    assert text.endswith("; use bank = 'loop'")
    assert "\n" not in text


def test_mini_batches_that_change_their_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1))
    source = next(iter(Bank(job_of()).learners.values())).source
    check_graphs(source)
    monkeypatch.setattr(source, "minibatch", lambda step, work: (torch.ones(4, 64 + step), torch.ones(4)))
    text = (
        r"^\[cluster\] bank = 'graphs': mini-batches change their shape, from \(4, 64\), \(4,\) to \(4, 65\), \(4,\); "
    )
    with pytest.raises(ConfigError, match=text + "use bank = 'loop'$"):
        check_graphs(source)


def test_threads_compute_a_model_that_waits() -> None:
    assert trained(job_of(Waits, streams=3)) == trained(job_of(Waits, bank="loop"))


class Noisy(Waits):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + torch.randn(8, 8))


def test_learners_that_draw_other_numbers_compute_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = trained(job_of(Noisy, streams=3))
    assert found == trained(job_of(Noisy, bank="loop"))
    assert "the learners of a bank compute one after another (the model draws random numbers, not only" in caplog.text
    with caplog.at_level("INFO"):
        trained(job_of(streams=3).with_(training={"precision": "bfloat16"}))
    assert "one after another (torch keeps weights in 16 bits for all threads together)" in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_the_trial_of_a_model_does_not_depend_on_the_place_of_its_vectors(seed: int) -> None:
    # With two threads, torch adds up some gradients in another order if a vector begins between two multiples of 16
    # bytes, as the second of several vectors of 9,610 numbers does.
    job = job_of("mlp", bank="auto", threads_per_rank=2).with_(training={"minibatch_size": 16, "seed": seed})
    with torch_as_in(job.cluster):
        learners = BankLearners(job, job.plan(), data(), CPU, "direct")
        assert learners.models[0].size * 4 % 16
        assert learners.drawing == Drawing(masks=False)


ONE = network()


def test_a_model_that_learners_would_share_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Bank(job_of(lambda: ONE))
    assert str(caught.value) == (
        "[cluster] bank = 'graphs' needs a model for each learner, and [model] name gives the same one each time; let "
        "it give a new model, or use bank = 'loop'"
    )


@pytest.mark.parametrize(
    ("cluster", "records", "streams"),
    [
        ({"threads_per_rank": 2}, False, 2),
        ({"threads_per_rank": 16}, False, 3),
        ({"threads_per_rank": 1, "streams": 2}, False, 2),
        ({}, True, 3),
        ({"learners": 20, "learners_per_device": 20}, True, 8),
        ({"learners": 20, "learners_per_device": 20, "streams": 12}, True, 12),
    ],
)
def test_streams_of_a_bank(
    cluster: dict[str, Any], records: bool, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(1) if records else DeviceKind())
    assert streams_of(job_of(**cluster), CPU) == streams


# Streams of a CPU.


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads(2, lambda: None)
    yield found
    found.close()
    found.close()


def test_a_stream_of_threads_keeps_its_order(threads: Threads) -> None:
    seen: list[int] = []
    free = threading.Event()

    def note(number: int) -> list[float]:
        if number == 0:
            free.wait(60)
        seen.append(number)
        return [float(number), torch.tensor(2.5)]  # type: ignore[list-item]

    one, other = ThreadStream(threads), ThreadStream(threads)
    works = [one.submit(partial(note, number)) for number in range(3)]
    assert not works[0].done()
    assert not works[2].done()
    free.set()
    assert other.submit(partial(note, 7), after=(works[2],)).numbers() == [7.0, 2.5]
    assert works[1].numbers() == [1.0, 2.5]
    assert seen == [0, 1, 2, 7]


def test_an_exception_of_a_thread_is_raised_where_somebody_waits(threads: Threads) -> None:
    def fail() -> list[float]:
        raise ValueError("no such sample")

    stream, called = ThreadStream(threads), threading.Event()
    pending, behind = stream.submit(fail), stream.submit(lambda: [1.0])
    behind.when_done(called.set)
    assert called.wait(60)
    for wait in (pending.done, pending.numbers, behind.numbers):
        with pytest.raises(ValueError, match="no such sample"):
            wait()
    assert stream.submit(lambda: [2.0]).numbers() == [2.0]  # another try
    late = threading.Event()
    pending.when_done(late.set)
    assert late.is_set()


# On a GPU.


@pytest.mark.gpu
def test_graphs_of_a_gpu_have_the_bits_of_a_loop() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu, found = torch.device("cuda", 0), {}
    restore = set_deterministic(True)
    try:
        for form in ("loop", "graphs"):
            bank = Bank(job_of(bank=form, device="cuda", graphs="auto", deterministic=True), gpu)
            found[form] = bank.train()
            models = [each.source.model for each in bank.learners.values()]
            assert all(model.graphs.tried and not model.graphs.refusal for model in models)
            bank.close()
    finally:
        restore()
    assert found["loop"] == found["graphs"]


@pytest.mark.gpu
def test_streams_of_a_gpu_share_nothing_that_recorded_work_uses() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu = torch.device("cuda", 0)
    kind, restore = DEVICES["cuda"], set_deterministic(True)
    inputs = torch.randn(2, 256, 256, device=gpu)
    try:
        streams: Any = kind.streams(gpu, 4, 2)
        assert streams[0] is streams[2]
        made = []

        def record(number: int) -> list[Number]:
            made.append(kind.record(gpu, lambda: torch.dropout(inputs[number] @ inputs[number], 0.5, True)))
            return []

        def repeat(number: int) -> list[Number]:
            kind.generator(gpu).manual_seed(number)
            graph, result = made[number]
            graph.replay()
            return [result.double().sum()]

        for number in range(2):
            streams[number].submit(partial(record, number)).numbers()
        wanted = [streams[number].submit(partial(repeat, number)).numbers() for number in range(2)]
        for _ in range(200):
            pending = [streams[number].submit(partial(repeat, number)) for number in range(2)]
            assert [each.numbers() for each in pending] == wanted
    finally:
        restore()
    owns = [stream._own for stream in streams[:2]]
    assert owns[0].last.pool() != owns[1].last.pool()
    assert owns[0].stream != owns[1].stream
