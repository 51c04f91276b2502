"""Where ranks compute, and that copies on another device change no bit."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES, here
from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.placement import agreed, of_rank, virtual_kind
from rudra.compute.device.streams import Pending, Stream, finished, until_done
from rudra.compute.learners import LearnerExecutor, StatisticsExecutor
from rudra.compute.making import make_executors
from rudra.compute.staging import Staging
from rudra.compute.vectors import Buffer
from rudra.core.actions import Compute, Evaluate, StepReplica, Update
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, SNAPSHOT, WEIGHTS
from rudra.core.events import Computed, Evaluated, Event, Hashed
from rudra.core.messages import Weights
from rudra.core.wire import tail_bytes
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import ClusterTable
from rudra.mpi.long_work import LongWork
from rudra.simulation import checked_run
from topologies import Plan
from topologies import load as load_topology

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))
from clusters import Apart, job, train

TREE = {"fan_out": 2}


def fitted(places: list[int], name: str = "base", options: dict[str, Any] | None = None) -> Plan:
    return load_topology(name, options or {}).fit(places)


@pytest.mark.parametrize(
    ("wanted", "gpus", "found"),
    [
        ("cpu", [4, 4, 4, 4], "cpu"),
        ("auto", [1, 1, 1, 1], "cuda"),
        ("auto", [0, 0, 1, 8], "cuda"),  # no learner is on the ranks without
        ("auto", [1, 1, 1, 0], "cpu"),
        ("auto", [0, 0, 0, 0], "cpu"),
        ("cuda", [0, 0, 1, 1], "cuda"),
    ],
)
def test_all_learners_compute_on_gpus_or_none(wanted: str, gpus: list[int], found: str) -> None:
    assert agreed(wanted, fitted([0, 0, 0, 0]), gpus, ["here"] * 4) == found


def test_every_kind_of_device_has_a_name_in_jobs() -> None:
    named = get_args(ClusterTable.model_fields["device"].annotation)
    assert {*named} == {*DEVICES, "auto"}


class Fpga(DeviceKind):
    """A kind of device that only its entry in `DEVICES` makes known."""

    noun = "FPGA"

    def count(self) -> int:
        return 2


def test_a_kind_of_device_needs_only_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, places = fitted([0, 0, 0, 0]), [0, 0, 0, 0]
    monkeypatch.setitem(DEVICES, "fpga", Fpga())
    assert [here(wanted) for wanted in ("fpga", "cpu")] == [2, 0]
    assert agreed("fpga", plan, [2] * 4, ["a"] * 4) == virtual_kind("fpga", window=False) == "fpga"
    assert of_rank("fpga", 2, plan, places, 2) == CPU, "the device that it gives out"
    with pytest.raises(ConfigError, match=r"device = 'fpga': torch sees no FPGA for learner 0 \(rank 2\) on a; "):
        agreed("fpga", plan, [0] * 4, ["a"] * 4)
    monkeypatch.setattr(Fpga, "count", lambda kind: 0)
    with pytest.raises(ConfigError, match=r"device = 'fpga': torch sees no FPGA here; valid: cpu, auto"):
        virtual_kind("fpga", window=False)


def test_a_learner_without_a_gpu_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        agreed("cuda", fitted([0, 0, 1, 1]), [2, 2, 2, 0], ["a", "a", "b", "c"])
    told = "torch sees no GPU for learner 1 (rank 3) on c; valid there: cpu"
    assert str(caught.value) == f"[cluster] device = 'cuda': {told}"


def test_workers_that_stay_on_the_cpu_need_no_gpu_and_take_none() -> None:
    plan, places = fitted([0, 0, 0, 0, 0]), [0, 0, 0, 0, 1]
    workers = [{"learners": [0, 2], "kind": "small", "device": "cpu"}, {"kind": "large"}]
    job = Job(protocol={"name": "hogbatch"}, hogbatch={"workers": workers}, cluster={"learners": 3, "device": "cuda"})
    on_cpu = job.learners_on_cpu(plan)
    assert on_cpu == {plan.learners[0], plan.learners[2]}
    assert agreed("cuda", plan, [0, 0, 0, 1, 0], ["a"] * 5, on_cpu) == "cuda"
    with pytest.raises(ConfigError, match="torch sees no GPU for learner 1 "):
        agreed("cuda", plan, [1, 1, 1, 0, 1], ["a"] * 5, on_cpu)
    found = [of_rank("cuda", rank, plan, places, 2, on_cpu).type for rank in range(5)]
    assert found == ["cpu", "cuda", "cpu", "cuda", "cpu"]  # the statistics server tests on one
    plain = Job(cluster={"learners": 2})
    assert not plain.learners_on_cpu(plain.plan())


@pytest.mark.parametrize(
    ("wanted", "numbers"), [(0, []), (1, [1, 4]), (2, [0, 1, 3, 4]), (3, [0, 1, 2, 3, 4]), ([0, 2], [0, 2]), ([], [])]
)
def test_the_last_learners_of_each_node_or_the_named_ones_compute_on_the_cpu(
    wanted: int | list[int], numbers: list[int]
) -> None:
    """Dormant ones too, whose ranks have their devices from the start."""
    job = Job(cluster={"cpu_learners": wanted, "device": "cuda"})
    for plan in (fitted([0, 0, 0, 0, 1, 1, 1]), fitted([0, 0, 0, 0, 1, 1, 1]).with_active(1)):
        assert [plan.roles[learner].index for learner in sorted(job.learners_on_cpu(plan))] == numbers


def test_learners_on_the_cpu_take_no_gpu_of_others() -> None:
    places, cluster = [0, 0, 0, 0, 0], {"cpu_learners": 1, "device": "cuda", "active_learners": 1}
    plan = fitted(places, "groups").with_active(1)
    on_cpu = Job(cluster=cluster).learners_on_cpu(plan)
    assert agreed("cuda", plan, [0, 1, 1, 1, 0], ["a"] * 5, on_cpu) == "cuda"
    found = [of_rank("cuda", rank, plan, places, 4, on_cpu) for rank in range(5)]
    assert [device.index for device in found] == [3, 0, 1, 2, None], "dormant learners have a GPU, too"


@pytest.mark.parametrize(
    ("topology", "places", "gpus", "devices"),
    [  # of each rank: None is the CPU
        ("base", [0, 0, 0, 0, 0], [2] * 5, [None, 1, 0, 1, 0]),
        ("base", [0, 0, 0, 0, 0], [4] * 5, [None, 3, 0, 1, 2]),
        ("base", [0, 0, 0, 0, 0], [1] * 5, [None, 0, 0, 0, 0]),  # as where SLURM gives every task one of its own
        ("base", [7, 7, 5, 5, 9], [2] * 5, [None, 0, 0, 1, 0]),
        ("base", [7, 7, 5, 5, 9], [0, 0, 2, 2, 1], [None, None, 0, 1, 0]),  # servers on a node without
        ("base", [0, 1, 0, 1, 0, 1], [2] * 6, [None, 0, 1, 1, 0, 0]),
        ("adv", [0] * 7, [3] * 7, [None, 0, None, None, 0, 1, 2]),
        ("groups", [0, 0, 0], [1, 1, 1], [0, 0, 0]),
    ],
)
def test_learners_of_a_node_take_its_gpus_in_turn(
    topology: str, places: list[int], gpus: list[int], devices: list[int | None]
) -> None:
    plan = fitted(places, topology, TREE if topology == "adv" else None)
    kinds = [",".join(plan.roles[role].kind for role in plan.on_rank(rank)) for rank in range(len(places))]
    found = [of_rank("cuda", rank, plan, places, gpus[rank]) for rank in range(len(places))]
    assert [device.index if device.type == "cuda" else None for device in found] == devices, kinds


# What is copied, and when.


def test_weights_are_copied_when_they_have_changed_and_only_then() -> None:
    stage, tail = Staging(3, CPU), tail_bytes(1)
    one, other = Buffer(3, tail), Buffer(3, tail)
    one.write(Weights(0, 5))
    one.vector.fill_(1.0)
    assert stage.weights(one).tolist() == [1.0] * 3
    one.vector.fill_(2.0)
    assert stage.weights(one).tolist() == [1.0] * 3, "nothing has come since"
    assert one.read().timestamp == 5
    assert stage.weights(one).tolist() == [2.0] * 3
    assert stage.weights(other).tolist() == [0.0] * 3
    assert stage.weights(one).tolist() == [2.0] * 3
    one.write_half(Weights(0, 6))
    one.half[:6] = np.full(3, 4.0, np.float16).view(np.uint8)
    one.read_half()
    assert stage.weights(one).tolist() == [4.0] * 3
    assert stage.weights(one).data_ptr() != one.vector.data_ptr()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 10)
    )


@pytest.mark.parametrize(
    ("protocol", "learners", "topology", "wire"),
    [
        ("hardsync", 3, {"name": "base"}, "float32"),
        ("softsync", 4, {"name": "adv", "options": TREE}, "float16"),
        ("async", 3, {"name": "adv*"}, "float32"),
        ("async", 4, {"name": "groups", "options": {"groups": 2}}, "float32"),
        ("hardsync", 3, {"name": "groups"}, "float32"),  # learners that update weights of their own
    ],
)
def test_copies_change_no_bit(
    protocol: str, learners: int, topology: dict[str, Any], wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"model": {"name": network}, "topology": topology, "data": {"train_limit": 240, "test_limit": 60}}
    run = job(protocol, learners, epochs=2, **tables).with_(cluster={"gradient_format": wire})
    plain = train(run, Apart)
    monkeypatch.setattr(checked_run, "make_executors", partial(make_executors, placing="staged"))
    staged = train(run, Apart)
    assert torch.equal(plain.weights, staged.weights)
    for table in ("gradients", "updates", "epochs"):
        assert plain.rows[table].tobytes() == staged.rows[table].tobytes()
    copies = [staged.executors[role]._stage for role in (*staged.plan.learners, staged.plan.statistics)]
    assert all(stage is not None and stage._held is not None for stage in copies), "all of them have used theirs"


@pytest.mark.parametrize(("placing", "free"), [("staged", None), ("device", 0)])  # with the training set, or without
def test_gradients_that_are_late_change_no_bit(placing: str, free: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"data": {"train_limit": 240, "test_limit": 60}, "augment": {"crop": 1, "flip": True}}
    run = job("softsync", 4, n=2, model={"name": network}, **tables)
    monkeypatch.setattr(checked_run, "make_executors", partial(make_executors, placing=placing))
    plain = train(run, Apart)
    for seed in range(5):
        monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(seed, free))
        late = train(run, Apart)
        assert torch.equal(plain.weights, late.weights)
        assert plain.rows["gradients"].tobytes() == late.rows["gradients"].tobytes()


def test_a_late_device_keeps_the_order_of_a_stream_and_no_other() -> None:
    orders = set()
    for seed in range(50):
        device, seen = AdverseDevice(seed), list[str]()
        one, other = device.stream(), device.stream()
        works = [stream.submit(partial(_noted, seen, name)) for stream, name in ((one, "a"), (other, "b"), (one, "c"))]
        assert not seen, "it begins nothing before it is asked"
        assert works[2].numbers() == [1.0]
        assert seen.index("a") < seen.index("c")
        orders.add(tuple(seen))
    assert orders == {("a", "c"), ("a", "b", "c"), ("b", "a", "c")}


def _noted(seen: list[str], name: str) -> list[float]:
    seen.append(name)
    return [1.0]


def test_a_rank_does_other_work_while_a_device_computes() -> None:
    device, rung = AdverseDevice(0), []
    stream, work = device.stream(), LongWork(lambda: rung.append(True))

    def action() -> Iterator[Event | Pending | None]:
        pending = stream.submit(lambda: [2.5])
        yield from until_done(pending)
        yield Computed(0, pending.numbers()[0], 0.0, 4)

    def pieces() -> Iterator[Event | Pending | None]:
        yield None
        yield Hashed("a")

    device.go_on = lambda: None  # type: ignore[method-assign]
    work.begin(0, action(), lambda event: None)
    work.begin(1, pieces(), lambda event: None)
    assert [work.advance(), work.advance(), work.advance()] == [(1, None), (1, Hashed("a")), None]
    assert work.under_way
    device.do_one()
    assert work.advance() == (0, Computed(0, 2.5, 0.0, 4))
    assert work.advance() is None
    assert not work.under_way
    assert not rung, "the same thread asks again"


def test_short_actions_of_a_role_end_in_order_though_the_first_waits() -> None:
    device = AdverseDevice(0)
    stream, work = device.stream(), LongWork(lambda: None)

    def action() -> Iterator[Event | Pending | None]:
        pending = stream.submit(lambda: [2.5])
        yield from until_done(pending)
        yield Hashed("first")

    device.go_on = lambda: None  # type: ignore[method-assign]
    assert work.do_now(0, action()) == []
    assert work.do_now(0, iter([Hashed("second")])) == []
    assert work.do_now(1, iter([Hashed("of another role")])) == [Hashed("of another role")]
    assert work.advance() is None
    device.do_one()
    assert [work.advance(), work.advance(), work.advance()] == [(0, Hashed("first")), (0, Hashed("second")), None]
    assert work.do_now(0, iter([Hashed("third")])) == [Hashed("third")]


def test_an_update_on_a_device_does_not_wait_for_the_sample_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are those of their own timestamps, though the weights change before they come."""
    found = {}
    for device in (DeviceKind(), AdverseDevice(2)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        run = Job(model={"name": "mlp"}, data={"name": "digits"}, cluster={"learners": 1}).resolved()
        plan = run.plan()
        (owner,) = make_executors(run, plan, (plan.server,), load(run.data, test=False), prefetch=False).values()
        owner.prepare()
        updates = []
        for timestamp in (1, 2, 3):
            owner.buffer(GRADIENT).vector.copy_(torch.arange(owner.size) * 1e-3)
            updates.append(owner.perform(Update(GRADIENT, WEIGHTS, 0.1, timestamp)))
        assert isinstance(next(updates[0]), Pending) == device.apart
        found[device.apart] = [event.digest for work in updates[1:] for event in finished(work)]  # type: ignore[union-attr]
    assert found[True] == found[False]
    assert len({*found[True]}) == 2


@pytest.mark.parametrize("factor", [1.0, 30.0, 100.0])
def test_a_gradient_that_overflows_float16_is_computed_again_though_nobody_waits(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device finds out later that the scale of the loss was too large."""
    found, tries = {}, list[int]()
    for device in (DeviceKind(), AdverseDevice(5)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        run = job("async", 1, model={"name": network}, training={"precision": "float16"}).resolved()
        plan = run.plan()
        (learner,) = make_executors(run, plan, plan.learners, load(run.data, test=False), prefetch=False).values()
        assert isinstance(learner, LearnerExecutor)
        model = learner.source.model
        torch.manual_seed(0)
        model.read_into(learner.buffer(WEIGHTS).vector)
        learner.buffer(WEIGHTS).vector[: model.parameter_count] *= factor
        checked, seen = model.overflows, list[float]()
        monkeypatch.setattr(
            model, "overflows", lambda out, seen=seen, checked=checked: seen.append(checked(out)) or seen[-1]
        )
        works = [finished(learner.perform(Compute(s, learner.source.work.after(s), WEIGHTS, GRADIENT))) for s in (0, 1)]
        assert learner.buffer(GRADIENT).vector.isfinite().all()
        found[device.apart] = [str(works), learner.sha256(GRADIENT)]
        tries.append(len(seen))
    assert found[True] == found[False]
    assert tries[0] == tries[1]
    assert (tries[0] > 2) == (factor > 1)


def test_the_norms_of_an_update_come_with_the_sample_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for device in (DeviceKind(), AdverseDevice(4)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        clipped = {"learning_rate": 0.1, "momentum": 0.0, "clip_norm": 0.5}
        run = job("async", 1, optimizer=clipped, results={"gradient_norms": "every 1"}).resolved()
        plan = run.plan()
        (owner,) = make_executors(run, plan, (plan.server,), load(run.data, test=False), prefetch=False).values()
        owner.prepare()
        works = []
        for timestamp in (1, 2, 3):
            owner.buffer(GRADIENT).vector.copy_(torch.linspace(0, 0.01 * timestamp, owner.size))
            works.append(owner.perform(Update(GRADIENT, WEIGHTS, 0.1, timestamp)))
        ends = [event for work in works for event in finished(work)]
        found[device.apart] = [(each.norm, each.clipped_norm, each.product) for each in ends]  # type: ignore[union-attr]
    assert str(found[True]) == str(found[False])  # with NaN
    assert all(norm > clipped > 0 for norm, clipped, _ in found[True])
    assert [product > 0 for *_, product in found[True]] == [False, True, True]


def test_the_step_of_a_replica_does_not_wait_for_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for device in (DeviceKind(), AdverseDevice(4)):
        monkeypatch.setitem(DEVICES, "cpu", device)
        run = job("sma", 2, model={"name": "mlp"}).resolved()
        plan = run.plan()
        (role,) = plan.learners[:1]
        (learner,) = make_executors(run, plan, (role,), load(run.data, test=False), prefetch=False).values()
        learner.prepare()
        works = []
        for _ in range(3):
            learner.buffer(GRADIENT).vector.copy_(torch.linspace(-1, 1, learner.size))
            works.append(learner.perform(StepReplica(GRADIENT, REPLICA, 0.1, difference=DIFFERENCE)))
        assert isinstance(next(works[0]), Pending) == device.apart
        found[device.apart] = [event.distance for work in works[1:] for event in finished(work)]  # type: ignore[union-attr]
        found[device.apart].append(learner.sha256(REPLICA))
    assert found[True] == found[False]
    assert found[True][0] < found[True][1]


@pytest.mark.parametrize("waits", [True, False])
def test_weights_are_evaluated_beside_gradients_after_they_have_come(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner computes with the same module meanwhile. Without the wait for the weights, others are tested."""
    run = job("async", 1, model={"name": network}).resolved()
    plan, found = run.plan(), []
    for seed in range(20):
        monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(seed) if seed else DeviceKind())
        roles = (plan.learners[0], plan.statistics)
        learner, statistics = make_executors(run, plan, roles, load(run.data), prefetch=False).values()
        assert isinstance(statistics, StatisticsExecutor)
        assert isinstance(learner, LearnerExecutor)
        learner.buffer(WEIGHTS).vector.copy_(torch.linspace(0.01, 0.1, learner.size))
        tested = statistics.buffer(SNAPSHOT).vector.zero_()
        training = statistics._training

        def come(weights: torch.Tensor = tested) -> tuple[()]:
            weights.copy_(torch.linspace(0.1, 0.01, len(weights)))
            return ()

        training.submit(come)
        if not waits:
            statistics._training = Stream()
        work = LongWork(lambda: None)
        computes = Compute(0, learner.source.work, WEIGHTS, GRADIENT)
        work.begin(0, learner.perform(computes), lambda event: None)
        work.begin(1, statistics.perform(Evaluate(SNAPSHOT)), lambda event: None)
        events = []
        while work.under_way:
            if (ended := work.advance()) is not None and ended[1] is not None:
                events.append(ended[1])
        (scores,) = (event.scores for event in events if isinstance(event, Evaluated))
        found.append((scores, learner.sha256(GRADIENT)))
    right = sum(each == found[0] for each in found[1:])
    assert (right == 19) == waits


def test_work_that_is_dropped_writes_nothing_later() -> None:
    device, written = AdverseDevice(0), list[str]()
    stream, work = device.stream(), LongWork(lambda: None)

    def action() -> Iterator[Event | Pending | None]:
        pending = stream.submit(partial(_noted, written, "gradient"))
        yield from until_done(pending)
        yield Hashed("never")

    device.go_on = lambda: None  # type: ignore[method-assign]
    work.begin(0, action(), lambda event: None)
    assert work.advance() is None
    assert written == []
    work.drop({0})
    assert written == ["gradient"], "the host has waited"
    assert work.advance() is None
    assert not work.under_way


def test_a_thread_that_has_nothing_else_to_do_waits_for_the_device() -> None:
    stream, work, done = AdverseDevice(3).stream(), LongWork(lambda: None), []

    def action() -> Iterator[Event | Pending | None]:
        pending = stream.submit(lambda: [2.5])
        yield from until_done(pending)
        yield Computed(0, pending.numbers()[0], 0.0, 4)

    work.compute_beside()
    work.begin(0, action(), done.append)
    ends = time.monotonic() + 30
    while not done and time.monotonic() < ends:
        work.take_results()
        time.sleep(1e-3)
    work.close()
    assert done == [Computed(0, 2.5, 0.0, 4)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("model", ["lenet", "resnet32"])
def test_a_gradient_waits_for_no_device(model: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu = torch.device("cuda", 0)
    run = Job(model={"name": model}, cluster={"learners": 1}).resolved()
    plan = run.plan()
    about = {"prefetch": False, "device": gpu, "placing": "staged"}
    (executor,) = make_executors(run, plan, plan.learners[:1], load(run.data, test=False), **about).values()
    assert isinstance(executor, LearnerExecutor)
    actions = [Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT) for step in range(6)]
    for action in actions[:4]:  # the fourth compares the weights with their sum, which the host needs
        finished(executor.perform(action))
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = executor.perform(actions[4])
        pending = next(first)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(pending, Pending)
    assert len(finished(first)) == 1


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch is older than 2.9")
def test_products_are_exact_unless_the_job_asks_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before = [product.fp32_precision for product in products()]
    try:
        for rounded in (True, False):
            DEVICES["cuda"].set_products(gpu, rounded=rounded)
            found = {product.fp32_precision for product in products()}
            assert found == {"tf32" if rounded else "ieee"}, "convolutions as well"
    finally:
        for product, its in zip(products(), before, strict=True):
            product.fp32_precision = its
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Turing")
    DEVICES["cuda"].set_products(gpu, rounded=False)
    with pytest.raises(ConfigError) as caught:
        DEVICES["cuda"].set_products(gpu, rounded=True)
    assert str(caught.value) == "[training] precision = 'tf32': Turing does not have it; valid there: float32, float16"


def products() -> list[Any]:
    cudnn: Any = torch.backends.cudnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_tf32_needs_gpus(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(training={"precision": "tf32"}, cluster={"device": device})
    text = "[training] precision = 'tf32' needs [cluster] device = 'cuda'; use it, or precision = 'float32'"
    assert str(caught.value) == text
