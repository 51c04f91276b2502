"""Mini-batches on a device: bitwise the same as in main memory, in every order that the waits allow."""

import hashlib
import time
from collections import Counter
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES, kind_of
from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.streams import Done, Number, Pending, finished
from rudra.compute.feed import Drawn, Feed, Given
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.memory_plan import planned, resident_sets
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.work import Work
from rudra.data.load import load
from rudra.data.resident import Resident, ResidentSplit, stored_in_memory
from rudra.data.samples import Split, Subset, indices_of_whole
from rudra.data.sampling import Sampler
from rudra.data.sources import Dense, Sparse, TokenWindows
from rudra.data.users import UserSplit
from rudra.errors import ConfigError
from rudra.job.job import Job
from tests.selection import CAMPAIGN

STEPS, WORK = 12, Work(0, 0, 3, 3)


@cache
def drawn(step: int, work: Work) -> Drawn:
    """Returns inputs of several kinds. One mini-batch is larger than those before."""
    generator = torch.Generator().manual_seed(step)
    inputs = {
        "image": torch.rand(3, 5 + (step == 5), 7, generator=generator),
        "mask": torch.rand(3, generator=generator) < 0.5,
        "signal": torch.randn(3, 2, generator=generator, dtype=torch.complex64),
    }
    return Drawn((inputs, torch.randint(9, (3,), generator=generator)), {(step, work): slice(None)})


def fed(seed: int, broken: str = "") -> str:
    """Returns the digest of what a device reads, without one of the waits. No step waits for the end of another."""
    device, read = AdverseDevice(seed), hashlib.sha256()
    feed, stream = Feed(drawn, lambda batch, rows: batch, device, CPU), device.stream()

    def compute(batch: Any) -> list[Number]:
        inputs, target = batch
        for tensor in (*inputs.values(), target):
            read.update(tensor.numpy().tobytes())
        return []

    pending: Pending = Done([])
    for step in range(STEPS):
        given = feed.take(step, WORK)
        after = () if broken == "computation for copy" else (given.copied,)
        pending = stream.submit(partial(compute, feed.finish(given)), after=after)
        if broken != "copy for computation":
            given.half.used = pending
        if broken == "host for copy":
            given.half.copied = Done([])
        if seed % 2:
            feed.send_ahead(step + 1, WORK)
        device.go_on()
    pending.numbers()
    return read.hexdigest()


@pytest.mark.parametrize("orders", [200, pytest.param(1000, marks=CAMPAIGN)])
def test_a_device_reads_the_same_bits_in_any_order(orders: int) -> None:
    wanted = hashlib.sha256()
    for step in range(STEPS):
        inputs, target = drawn(step, WORK).content
        for tensor in (*inputs.values(), target):
            wanted.update(tensor.numpy().tobytes())
    assert Counter(map(fed, range(orders))) == {wanted.hexdigest(): orders}


@pytest.mark.parametrize("broken", ["computation for copy", "copy for computation", "host for copy"])
def test_a_missing_wait_is_noticed(broken: str) -> None:
    right = fed(0)
    assert sum(fed(seed, broken) != right for seed in range(200)) > 0.95 * 200


def bytes_like(kind: str, *shape: int) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(3).integers(-120 if kind != "uint8" else 0, 120, shape)
    return (numbers / 7 if kind.startswith("float") else numbers).astype(kind)


KINDS = ["uint8", "int16", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [None, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 1 / 255, "each"])
def test_stored_samples_are_converted_on_a_device_as_in_main_memory(kind: str, mean: Any, scale: Any) -> None:
    inputs, rng = bytes_like(kind, 20, 3, 4, 5), np.random.default_rng(1)
    scale = rng.random((3, 4, 5)).astype(np.float32) if scale == "each" else scale
    split = Split(
        Dense(inputs),
        Dense(rng.integers(0, 9, 20)),
        None if mean is None else rng.random((3, 4, 5)).astype(mean),
        scale,
    )
    same(split)
    same(Subset(Subset(split, np.arange(19, 3, -1)), np.array([4, 1, 9, 3, 0])))


@pytest.mark.parametrize(
    "targets",
    [
        np.arange(20),
        np.arange(20, dtype=np.uint8),
        np.arange(40).reshape(20, 2) % 3 == 0,
        np.linspace(0, 1, 20),
        np.arange(20, dtype=np.float32),
    ],
)
def test_targets_are_converted_on_a_device_as_in_main_memory(targets: np.ndarray[Any, Any]) -> None:
    targets.flags.writeable = False  # as in memory that ranks share
    same(Split(Dense(bytes_like("uint8", 20, 6)), Dense(targets)))


@pytest.mark.parametrize("kind", ["uint8", "int32"])
def test_windows_of_a_text_are_gathered_on_a_device(kind: str) -> None:
    text = bytes_like("uint8", 103).astype(kind)
    same(Split(TokenWindows(text, 10, 0, 10), TokenWindows(text, 10, 1, 10)))


@pytest.mark.parametrize("inputs", [torch.rand(20, 3), torch.arange(60).view(20, 3), torch.ones(20, 3) > 0])
@pytest.mark.parametrize("labels", [torch.arange(20), torch.arange(20)[:, None], torch.rand(20), torch.ones(20, 2) > 0])
def test_the_users_tensors_are_gathered_on_a_device(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    same(UserSplit(TensorDataset(inputs, labels), None))


def same(samples: Any) -> None:
    """Checks that a device gathers what main memory gives, types included."""
    resident = Resident(samples, CPU)
    indices = np.random.default_rng(0).integers(0, len(samples), 9)
    whole = torch.from_numpy(indices_of_whole(samples, indices))
    for found, wanted in zip(resident.batch(whole), samples.batch(indices), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        assert found.is_contiguous()


def test_what_a_device_cannot_gather_stays_in_main_memory() -> None:
    labels = Dense(np.zeros(2, np.int64))
    rows = Sparse(np.ones(2, np.float32), np.zeros(2, np.int32), np.arange(3), 4)
    assert stored_in_memory(Split(rows, labels)) is None
    assert stored_in_memory(Split(Dense(np.ones((2, 3), np.uint16)), labels)) is None
    assert stored_in_memory(UserSplit([(torch.zeros(2), 0)], 2)) is None
    assert stored_in_memory(Split(Dense(np.ones((2, 3), np.uint8)), labels)) is not None


JOB = Job(
    model={"name": "mlp"},
    data={"name": "digits", "train_limit": 200, "test_limit": 40},
    augment={"crop": 2, "flip": True},
    training={"minibatch_size": 7},
    cluster={"learners": 3},
).resolved()


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize("share", [0.49, 0.51, None])
def test_a_set_lies_on_the_device_if_half_of_the_free_memory_holds_it(
    learners: int, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, plan = load(JOB.data, test=False), JOB.plan()
    assert data.training is not None
    stored = stored_in_memory(data.training)
    assert stored is not None
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))
    found = planned(JOB, plan, data, CPU)
    assert found is not None
    free = None if share is None else found.total(7) + int(sum(array.nbytes for array in stored) / share)
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0, free))
    made, init = [], Resident.__init__

    def counted(self: Resident, *arguments: Any) -> None:
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(Resident, "__init__", counted)
    executors = make_executors(JOB, plan, plan.learners[:learners], data, prefetch=False)
    assert len(made) == (share != 0.51), "learners share it"
    assert len(executors) == learners


def test_samples_that_the_users_code_changes_stay_in_main_memory() -> None:
    job = JOB.with_(augment={"name": "torch:neg"})
    assert resident_sets(job, job.plan(), load(job.data), CPU, trains=True).training is None
    assert resident_sets(JOB, JOB.plan(), load(JOB.data), CPU, trains=True).training is not None


def test_splits_for_evaluation_lie_on_the_device_too_and_share_the_copy_of_their_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = JOB.with_(data={"validation_split": 0.2})
    data = load(job.data)
    there = resident_sets(job, job.plan(), data, CPU, trains=True)
    assert {*there.tests} == {*data.tests} == {"test", "validation"}
    for name, split in data.tests.items():
        found = there.tests[name]
        assert isinstance(found, ResidentSplit)
        assert len(found) == len(split)
        for indices in (np.arange(len(split)), np.arange(3, 9)):
            for mine, wanted in zip(found.batch(indices), split.batch(indices), strict=True):
                assert torch.equal(mine, wanted)
    assert isinstance(there.tests["validation"], ResidentSplit)
    assert there.tests["validation"]._resident is there.training
    nothing = AdverseDevice(0, free=0)
    monkeypatch.setitem(DEVICES, "cpu", nothing)
    assert resident_sets(job, job.plan(), data, CPU, trains=True) == (None, data.tests)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("gathers", [False, True])
def test_a_device_gets_the_minibatches_of_main_memory_whatever_the_order_of_steps(
    size: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))
    data = load(JOB.data).training
    assert data is not None
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    work = Work(1, 2 * size, size, 3 * size)
    plain, sent = (GradientSource(JOB, 1, work, model, data, prefetch=False) for _ in range(2))
    sent.feed_device(Resident(data, CPU) if gathers else None)
    for step in [0, 1, 2, 5, 5, 4, 1000, 1001, 3]:
        given = sent.take(step, work.after(step))
        assert given is not None
        given.copied.numbers()
        sent.given = given
        sent.send_ahead(step, work.after(step))
        found, wanted = (source.minibatch(step, work.after(step)) for source in (sent, plain))
        assert torch.equal(found[0], wanted[0]), step
        assert torch.equal(found[1], wanted[1]), step


@pytest.mark.parametrize("free", [None, 0])
def test_samples_stay_on_the_device_until_their_gradient_is_computed(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mini-batches that are sent in the meantime do not replace them."""
    data, plan = load(JOB.data), JOB.plan()

    def gradient(device: DeviceKind) -> list[float]:
        monkeypatch.setitem(DEVICES, "cpu", device)
        (executor,) = make_executors(JOB, plan, plan.learners[:1], data, prefetch=False).values()
        assert isinstance(executor, LearnerExecutor)
        source = executor.source
        executor.source.model.read_into(executor.buffer(WEIGHTS).vector)
        events = executor.perform(Compute(0, source.work, WEIGHTS, GRADIENT))
        begun = [next(events)]
        for step in (5000, 10000, 15000) if device.apart else ():
            source.take(step, source.work.after(step))
        finished([*begun, *events])
        found: list[float] = executor.buffer(GRADIENT).vector.tolist()
        return found

    wanted = gradient(DEVICES["cpu"])
    assert any(wanted)
    for seed in range(10):
        assert gradient(AdverseDevice(seed, free)) == wanted


class Fragile:
    """Samples of unknown origin, which an input thread draws. One of them cannot be drawn."""

    random = False

    def __len__(self) -> int:
        return 10

    def batch(self, indices: Any) -> Any:
        if 3 in indices:
            raise KeyError("sample 3")
        return torch.from_numpy(indices).float(), torch.from_numpy(indices)


def test_a_sample_that_cannot_be_drawn_stops_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))
    model, indices = FlatModel(nn.Linear(4, 10)), Sampler(JOB.training.seed, 0, 10).indices(0, 10).tolist()
    job = JOB.with_(augment={"crop": 0, "flip": False})
    source = GradientSource(job, 0, Work(0, 0, 1, 1), model, Fragile(), prefetch=True)
    source.feed_device(None)
    sent = []
    assert source._feed is not None
    monkeypatch.setattr(source._feed, "send_ahead", lambda *wanted: sent.append(wanted[0]))
    thread = source._prefetched
    for step in range(indices.index(3)):
        assert source.take(step, source.work.after(step)) is not None
        while thread is not None and not thread.is_ready:
            time.sleep(1e-3)
        for _ in range(3):
            source.send_ahead(step, source.work.after(step))
    assert sent == list(range(1, indices.index(3) + 1)), "each once"
    monkeypatch.undo()
    source._feed.send_ahead(indices.index(3) + 1, source.work.after(indices.index(3) + 1))
    with pytest.raises(KeyError, match="sample 3"):
        source.take(indices.index(3), source.work.after(indices.index(3)))
    source.close()


def test_only_images_are_moved_on_a_device() -> None:
    source = GradientSource(
        JOB,
        0,
        Work(0, 0, 2, 2),
        FlatModel(nn.Linear(4, 3)),
        Split(Dense(np.zeros((9, 4), np.float32)), Dense(np.zeros(9))),
        prefetch=False,
    )
    resident = Resident(Split(Dense(np.zeros((9, 4), np.float32)), Dense(np.zeros(9))), CPU)
    indices = source._inputs.draw_indices(0, source.work).content
    with pytest.raises(ConfigError, match="for images"):
        source._inputs.gathered(resident, indices, slice(2))


def check_minibatches(device: torch.device, *, gathers: bool) -> None:
    """Compares mini-batches on a device with those in main memory. No step waits for the end of another."""
    data = load(JOB.data).training
    assert data is not None
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(device))
    plain, sent = (GradientSource(JOB, 1, Work(1, 0, 7, 7), model, data, prefetch=False) for _ in range(2))
    sent.feed_device(Resident(data, device) if gathers else None)
    stream, found = kind_of(device).stream(device), []

    def keep(step: int, work: Work, given: Given) -> list[Number]:
        sent.given = given
        found.append([tensor.clone() for tensor in sent.minibatch(step, work)])
        return []

    pending: Pending = Done([])
    for step in range(30):
        work = sent.work.after(step)
        given = sent.take(step, work)
        assert given is not None
        pending = stream.submit(partial(keep, step, work, given), after=(given.copied,))
        given.half.used = pending
        sent.send_ahead(step, work)
    pending.numbers()
    for step, batch in enumerate(found):
        wanted = plain.minibatch(step, plain.work.after(step))
        assert all(torch.equal(one.cpu(), other) for one, other in zip(batch, wanted, strict=True)), step
    assert len(found) == 30


@pytest.mark.parametrize("gathers", [False, True])
def test_a_late_device_gets_the_minibatches_of_main_memory(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(seed))
        check_minibatches(CPU, gathers=gathers)


@pytest.mark.gpu
@pytest.mark.parametrize("gathers", [False, True])
def test_a_gpu_gets_the_minibatches_of_main_memory(gathers: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check_minibatches(torch.device("cuda", 0), gathers=gathers)
