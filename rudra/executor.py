"""The hands of a role: buffers, and the arithmetic that its actions ask for. Both drivers use it."""

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rudra import data, models
from rudra.config import Job
from rudra.errors import ConfigError
from rudra.events import Accumulate, Compute, Computed, Copy, Evaluate, Evaluated, Update
from rudra.flat import Entry, FlatModel, sha256
from rudra.learning import GradientSource, evaluate
from rudra.messages import Message, tail_bytes
from rudra.optim import UpdateRule
from topologies import Plan
from topologies.plan import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER

CACHE_LINE = 64


class Buffer:
    """A vector and, behind it, room for a message's header and rows: one piece of memory, one transfer.

    Attributes:
        wire: (size * 4 + tail,) uint8, what travels.
        vector: (size,) float32, the tensor.
    """

    def __init__(self, size: int, tail: int) -> None:
        # NumPy asks for huge pages, which make transfers between processes a third faster than torch's memory does.
        # Zeros that are written, not promised: transfers into untouched memory are many times slower.
        memory = np.full(size * 4 + tail + CACHE_LINE, 0, np.uint8)
        first = -memory.ctypes.data % CACHE_LINE
        self.wire = memory[first : first + size * 4 + tail]
        self.array: npt.NDArray[np.float32] = self.wire[: size * 4].view(np.float32)
        self.vector = torch.from_numpy(self.array)
        self._tail = self.wire[size * 4 :].data

    def write(self, message: Message) -> None:
        data_ = message.encode()
        self._tail[: len(data_)] = data_

    def read(self) -> Message:
        return Message.decode(self._tail)


class Executor:
    """Buffers and arithmetic of one role.

    Args:
        layout: what the flat vector holds.
        parameters: how many of its floats are parameters; the others are model buffers.
        gradients: that one message may stand for.
    """

    def __init__(self, layout: tuple[Entry, ...], size: int, parameters: int, gradients: int) -> None:
        self.layout = layout
        self.size = size
        self.parameters = parameters
        self._tail = tail_bytes(gradients)
        self._buffers: dict[str, Buffer] = {}

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name, made at its first use."""
        if name not in self._buffers:
            self._buffers[name] = Buffer(self.size, self._tail)
        return self._buffers[name]

    def release(self, name: str) -> None:
        """Frees a buffer that exists only for a while."""
        self._buffers.pop(name, None)

    def hash(self, name: str) -> int:
        """Digest of a buffer's floats, in 63 bits."""
        return int(sha256(self.buffer(name).array)[:16], 16) >> 1

    def copy(self, action: Copy) -> None:
        self.buffer(action.target).vector.copy_(self.buffer(action.source).vector)

    def prepare(self) -> None:
        """Allocates what training needs, once the model that it was made from is gone."""

    def close(self) -> None:
        """Ends threads."""


class ServerExecutor(Executor):
    """Adds gradients and lets the optimiser step the weights."""

    def __init__(self, job: Job, flat: FlatModel, gradients: int) -> None:
        super().__init__(flat.layout, flat.size, flat.parameter_count, gradients)
        weights = self.buffer("weights").vector
        flat.read_into(weights)
        flat.bind(weights)  # frees the model's own: a server has no room for both
        if job.training.warm_start is not None:
            _warm_start(job, flat.layout, weights)
        self._rule = UpdateRule(job.optimizer, weights[: self.parameters])

    def prepare(self) -> None:
        self._rule.prepare()

    def accumulate(self, action: Accumulate) -> None:
        into, gradient = self.buffer(action.into).vector, self.buffer(action.gradient).vector
        head, rest = slice(0, self.parameters), slice(self.parameters, self.size)
        if action.into == action.gradient:
            into[head].mul_(action.scale)
        elif action.scale == 1.0:
            into.lerp_(gradient, action.fraction)
        else:
            into[head].mul_(1 - action.fraction).add_(gradient[head], alpha=action.fraction * action.scale)
            into[rest].lerp_(gradient[rest], action.fraction)

    def update(self, action: Update) -> None:
        gradient = self.buffer(action.gradient).vector
        if self.size > self.parameters:
            self.buffer(action.weights).vector[self.parameters :] = gradient[self.parameters :]
        self._rule.step(gradient[: self.parameters], action.learning_rate)


class LearnerExecutor(Executor):
    """Computes gradients."""

    def __init__(
        self, job: Job, learner: int, flat: FlatModel, split: data.Samples, gradients: int, *, prefetch: bool
    ) -> None:
        super().__init__(flat.layout, flat.size, flat.parameter_count, gradients)
        self._source = GradientSource(job, learner, flat, split, prefetch=prefetch)

    def compute(self, action: Compute) -> Computed:
        weights, gradient = self.buffer(action.weights).vector, self.buffer(action.gradient).vector
        outcome = self._source.compute(action.step, weights, gradient)
        return Computed(action.step, outcome.loss, outcome.errors, outcome.samples)

    def close(self) -> None:
        self._source.close()


class StatisticsExecutor(Executor):
    """Tests weights, one batch at a time."""

    def __init__(self, job: Job, flat: FlatModel, split: data.Samples, gradients: int) -> None:
        super().__init__(flat.layout, flat.size, flat.parameter_count, gradients)
        self._flat, self._split, self._batch_size = flat, split, job.training.evaluation_batch_size

    def evaluate(self, buffer: str) -> Iterator[Evaluated | None]:
        """Yields None after each batch but the last, then the result."""
        began = time.perf_counter()
        for result in evaluate(self._flat, self.buffer(buffer).vector, self._split, self._batch_size):
            if result is None:
                yield None
            else:
                seconds = time.perf_counter() - began
                yield Evaluated(buffer, result.loss, result.error, result.error_top5, seconds)


class TensorHands:
    """Real tensors for the simulator, on the executors of all roles.

    Args:
        executors: by role id.
        poison: overwrite with NaN what a role has no right to read; tests use it.
    """

    def __init__(self, executors: dict[int, Executor], *, poison: bool = False) -> None:
        self._executors, self._poison = executors, poison

    def lent(self, role: int, buffer: str) -> None:
        """A transfer from the buffer begins."""

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        self._executors[to].buffer(to_buffer).vector.copy_(self._executors[source].buffer(source_buffer).vector)

    def sent(self, role: int, buffer: str) -> None:
        if buffer == "snapshot":
            self._executors[role].release(buffer)
        elif buffer == "gradient":
            self.posted(role, buffer)

    def posted(self, role: int, buffer: str) -> None:
        if self._poison:
            self._executors[role].buffer(buffer).vector.fill_(float("nan"))

    def hash(self, role: int, buffer: str) -> int:
        return self._executors[role].hash(buffer)

    def compute(self, role: int, action: Compute) -> Computed:
        executor = self._executors[role]
        assert isinstance(executor, LearnerExecutor)
        return executor.compute(action)

    def accumulate(self, role: int, action: Accumulate) -> None:
        self._server(role).accumulate(action)

    def update(self, role: int, action: Update) -> None:
        self._server(role).update(action)

    def copy(self, role: int, action: Copy) -> None:
        self._executors[role].copy(action)

    def evaluate(self, role: int, action: Evaluate) -> Evaluated:
        executor = self._executors[role]
        assert isinstance(executor, StatisticsExecutor)
        return next(result for result in executor.evaluate(action.buffer) if result is not None)

    def _server(self, role: int) -> ServerExecutor:
        executor = self._executors[role]
        assert isinstance(executor, ServerExecutor)
        return executor


def make_executors(
    job: Job,
    plan: Plan,
    roles: tuple[int, ...],
    splits: tuple[data.Samples | None, data.Samples | None],
    info: data.DataInfo,
    *,
    prefetch: bool,
) -> dict[int, Executor]:
    """Executors of some roles of one process, which share one model.

    Args:
        job: resolved.
        plan: who is who.
        roles: ids of the roles.
        splits: training and test set; None where no role here needs it.
        info: what the data is like.
        prefetch: whether each learner gets an input thread.

    Raises:
        ConfigError: the model does not fit the data, or the optimiser's options are wrong.
    """
    flat = FlatModel(models.build(job.model, info, job.training.seed))
    if any(plan.roles[role].kind != PARAMETER_SERVER for role in roles):
        models.check_output(flat.module, info)
    made: dict[int, Executor] = {}
    for role in roles:
        kind = plan.roles[role].kind
        if kind == PARAMETER_SERVER:
            made[role] = ServerExecutor(job, flat, plan.records)
        elif kind == LEARNER:
            assert splits[0] is not None
            index = plan.roles[role].index
            made[role] = LearnerExecutor(job, index, flat, splits[0], plan.records, prefetch=prefetch)
        elif kind == STATISTICS_SERVER:
            assert splits[1] is not None
            made[role] = StatisticsExecutor(job, flat, splits[1], plan.records)
    return made


def _warm_start(job: Job, layout: tuple[Entry, ...], weights: torch.Tensor) -> None:
    from rudra.results import open_results  # h5py is needed only here

    path = job.training.warm_start
    assert path is not None
    with open_results(path) as results:
        theirs, ours = [(e.name, tuple(e.shape)) for e in results.layout], [(e.name, tuple(e.shape)) for e in layout]
        if results.weights is None:
            raise ConfigError(f"[training] warm_start: {path} holds no final weights (its run is {results.status})")
        if theirs != ours:
            differing = next((f"{a} against {b}" for a, b in zip(theirs, ours, strict=False) if a != b), "their number")
            raise ConfigError(f"[training] warm_start: {path} holds another model: {differing}")
        weights.copy_(torch.from_numpy(results.weights))
