"""The simulator's tensors: those of all roles in one process, few copies, gradients one by one or in batches.

A transfer copies nothing: the receiver's buffer names the sender's vector from then on, and whoever is to write into a
vector that others hold gives those a copy first. So all learners that pulled the same weights hold one vector, a
version of the weights is copied once at most, and is gone as soon as nobody holds it. A vector that is let go serves
again, which bounds memory by what is held at one moment.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from rudra.compute import models
from rudra.compute.averaging import average
from rudra.compute.devices import CPU
from rudra.compute.executor import Executor
from rudra.compute.first_gradient import settled
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import BatchResult, check_batching, joint_gradient, mapped_gradients
from rudra.compute.half import from_half, to_half
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.owners import AveragingExecutor, OwnerExecutor
from rudra.compute.stages import FirstStageExecutor, PieceExecutor, cut_model
from rudra.compute.statedict import StateEntry
from rudra.compute.vectors import Buffer
from rudra.core.events import (
    ACTIVATIONS,
    GRADIENT,
    RETURNED,
    SNAPSHOT,
    WEIGHTS,
    Accumulate,
    Backward,
    Compute,
    Computed,
    Conclude,
    Copy,
    Event,
    Forward,
    Hash,
    Hashed,
    Local,
    Reduce,
)
from rudra.core.layout import Entry, Placed
from rudra.data.fingerprint import Fingerprint, fingerprints
from rudra.data.load import DataInfo, load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.results.warm_start import final_weights
from rudra.simulation.timing_only import Tensors, TimingOnly
from topologies import Plan

RoleBuffer = tuple[int, str]
"""A role and the name of one of its buffers."""

_MAPPED_SAMPLES = 1024
"""Samples for which vmap computes gradients at a time: more are no faster, and need much memory."""


class RealTensors:
    """Real tensors for the simulator, on the executors of all roles.

    Args:
        executors: by role id.
        poison: overwrite with NaN what a role has no right to read; tests use it.
        halves: gradients travel as float16.

    Attributes:
        vectors: that were made so far, beside those that executors made themselves: the most that were held at once.
    """

    idle: Collection[type[Local]] = ()

    def __init__(self, executors: dict[int, Executor], *, poison: bool = False, halves: bool = False) -> None:
        self.executors: Mapping[int, Executor] = executors
        self._executors, self._poison, self._halves = executors, poison, halves
        self._servers = {role for role, executor in executors.items() if isinstance(executor, AveragingExecutor)}
        self._holders: dict[Buffer, set[RoleBuffer]] = {}
        self._free: dict[int, list[Buffer]] = {}  # by their size
        self._parted = len({executor.size for executor in executors.values()}) > 1
        self._going: Counter[RoleBuffer] = Counter()  # parts of a tensor that are on their way
        self._hashes: dict[Buffer, str] = {}  # of vectors that have not changed since
        self._unsent: RoleBuffer | None = None  # the last gradient, until its learner sends it
        self.vectors = 0

    def lent(self, role: int, buffer: str) -> None:
        """A transfer from the buffer begins."""
        if (role, buffer) == self._unsent:
            self._unsent = None
        if self._parted:
            self._going[role, buffer] += 1

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        sender, receiver = self._executors[source], self._executors[to]
        if sender.size_of(source_buffer) != receiver.size_of(to_buffer):
            self._make_own((to, to_buffer))
            receiver.part(to_buffer, source).copy_(sender.part(source_buffer, to))
            return
        self._share((source, source_buffer), (to, to_buffer))
        if self._halves and source_buffer.startswith(GRADIENT):
            self._make_own((to, to_buffer))
            vector = self._held((to, to_buffer)).vector
            rounded = torch.empty_like(vector, dtype=torch.float16)
            from_half(rounded, to_half(vector, rounded), vector)

    def sent(self, role: int, buffer: str) -> None:
        if self._parted:
            self._going[role, buffer] -= 1
            if self._going[role, buffer]:
                return
        if buffer == SNAPSHOT or buffer.startswith((GRADIENT, ACTIVATIONS, RETURNED)):
            self.posted(role, buffer)

    def posted(self, role: int, buffer: str) -> None:
        self._let_go((role, buffer))
        if self._poison:
            self._hold((role, buffer), self._new(role, buffer))

    def sha256(self, role: int, buffer: str) -> str:
        """Of a buffer's floats, in hexadecimal; of an owner of some layers, that of all weights at the beginning."""
        if isinstance(self._executors[role], PieceExecutor):
            return self._executors[role].sha256(buffer)
        held = self._held((role, buffer))
        if held not in self._hashes:
            self._hashes[held] = self._executors[role].sha256(buffer)
        return self._hashes[held]

    def planned(self, role: int, action: Local) -> None:
        """From now until it is done, what a long action reads does not change."""

    def perform(self, role: int, action: Local, seconds: float) -> Event | None:
        match action:
            case Copy():
                self._share((role, action.source), (role, action.target))
                return None
            case Hash() if not isinstance(self._executors[role], PieceExecutor):
                return Hashed(self.sha256(role, action.buffer))
            case Compute():
                return self.compute(role, action)
            case Forward() | Backward() | Conclude():
                for field_ in action.changes:
                    name = getattr(action, field_)
                    self._hold((role, name), self._new(role, name))
                (found,) = self._executors[role].perform(action)
                if isinstance(action, Conclude):
                    self.posted(role, action.activations)
                elif isinstance(action, Backward):
                    self.posted(role, action.returned)
                return found
        names = (*(getattr(action, field_) for field_ in action.changes), *getattr(action, "gradients", ()))
        for name in filter(None, names):
            self._make_own((role, name))
        event = next((e for e in self._executors[role].perform(action) if e is not None), None)
        return structs.replace(event, seconds=seconds) if event is not None and hasattr(event, "seconds") else event

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        self._hold((role, action.gradient), self._new(role, action.gradient))
        (computed,) = self._learner(role).compute(action)
        self._forget_stale((role, action.weights))
        return computed

    def reduce(self, reductions: Mapping[int, Reduce], sums: Sequence[Sequence[int]]) -> None:
        """Members of one group average their gradients; the result is one vector for all.

        Args:
            reductions: of the members, in group_rank order.
            sums: the order of addition (`Plan.partial_sums`).
        """
        places = [(role, action.buffer) for role, action in reductions.items()]
        for place in places:
            self._make_own(place)
        vectors = [self._held(place).vector for place in places]
        average(vectors[0], vectors, [action.gradient.samples for action in reductions.values()], sums=sums)
        for place, action in zip(places[1:], list(reductions.values())[1:], strict=True):
            if action.to_all:
                self._share(places[0], place)
            else:
                self.posted(*place)

    def lost(self, role: int) -> None:
        """A role is no more: what it alone held is free, and nobody is left to call its hooks."""
        self._executors[role].hooks = None
        if self._unsent is not None and self._unsent[0] == role:
            self._unsent = None
        for name in self._executors[role].names:
            self._let_go((role, name))

    def regroup(self, role: int, owner: int) -> None:
        """A role drops what it was about; one that updates weights itself takes over those of their owner."""
        if self._unsent is not None and self._unsent[0] == role:
            self._unsent = None
        executor, owns = self._executors[role], self._executors[owner]
        if isinstance(executor, OwnerExecutor):
            assert isinstance(owns, OwnerExecutor)
            self._make_own((role, WEIGHTS))
            executor.restore(owns.state(alone=True))

    def _learner(self, role: int) -> LearnerExecutor:
        executor = self._executors[role]
        assert isinstance(executor, LearnerExecutor)
        return executor

    def _computes(self, gradient: RoleBuffer) -> None:
        """A plain learner sends its gradient at once; one that has not is leaving, and nobody will read it."""
        if not self._learner(gradient[0]).pushes_at_once:
            return
        if self._unsent is not None:
            self._let_go(self._unsent)
        self._unsent = gradient

    def _forget_stale(self, weights: RoleBuffer) -> None:
        """A plain learner asks for newer weights after each gradient, and gets them if there are any by then."""
        if self._learner(weights[0]).pushes_at_once and not any(
            role in self._servers for role, _ in self._holders[self._held(weights)]
        ):
            self.posted(*weights)

    # Who holds which vector.

    def _new(self, role: int, name: str = WEIGHTS) -> Buffer:
        """A vector that nobody holds yet, of the size of a role's of that name; its content is void."""
        executor = self._executors[role]
        if free := self._free.get(executor.size_of(name)):
            return free.pop()
        self.vectors += 1
        made = executor.new_buffer(name)
        if self._poison:
            made.vector.fill_(float("nan"))
        return made

    def _release(self, buffer: Buffer) -> None:
        self._free.setdefault(len(buffer.vector), []).append(buffer)

    def _held(self, place: RoleBuffer) -> Buffer:
        held = self._executors[place[0]].buffer(place[1])
        self._holders.setdefault(held, set()).add(place)
        return held

    def _hold(self, place: RoleBuffer, buffer: Buffer) -> None:
        self._let_go(place)
        self._holders.setdefault(buffer, set()).add(place)
        self._executors[place[0]].put(place[1], buffer)

    def _let_go(self, place: RoleBuffer) -> None:
        buffer = self._executors[place[0]].release(place[1])
        if buffer is None:
            return
        holders = self._holders.get(buffer, set())
        holders.discard(place)
        if not holders:
            self._holders.pop(buffer, None)
            self._hashes.pop(buffer, None)
            self._release(buffer)
            if self._poison:
                buffer.vector.fill_(float("nan"))

    def _share(self, source: RoleBuffer, target: RoleBuffer) -> None:
        self._hold(target, self._held(source))

    def _make_own(self, place: RoleBuffer) -> None:
        """Before a vector is written to: its other holders get a copy, all of them the same one."""
        buffer = self._held(place)
        self._hashes.pop(buffer, None)
        others = self._holders[buffer] - {place}
        if others:
            copy = self._new(*place)
            copy.vector.copy_(buffer.vector)
            for other in others:
                self._hold(other, copy)


class BigBatchTensors(RealTensors):
    """One gradient for all learners: that of the mean over all their samples, which is what an update takes.

    Only where an update takes one gradient of every learner, all of them at the same weights.
    """

    def __init__(self, executors: dict[int, Executor], *, halves: bool = False) -> None:
        super().__init__(executors, halves=halves)
        self._learners = [role for role, executor in executors.items() if isinstance(executor, LearnerExecutor)]
        self._step = -1
        self._weights: Buffer | None = None
        self._gradient: Buffer | None = None
        self._outcomes: dict[int, BatchResult] = {}

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        weights = self._held((role, action.weights))
        if action.step > self._step:
            self._step, self._weights, self._gradient = action.step, weights, self._new(role)
            sources = [self._learner(learner).source for learner in self._learners]
            works = [source.work.after(action.step) for source in sources]
            outcomes = joint_gradient(sources, action.step, works, weights.vector, self._gradient.vector)
            self._outcomes = dict(zip(self._learners, outcomes, strict=True))
        if action.step < self._step or weights is not self._weights or self._gradient is None:
            raise ConfigError(
                f"[simulation] batching = 'big-batch': with this protocol learners compute step {action.step} at "
                "different weights; valid here: none, vmap"
            )
        self._hold((role, action.gradient), self._gradient)
        return self._learner(role).computed(action, self._outcomes[role])

    def perform(self, role: int, action: Local, seconds: float) -> Event | None:
        if isinstance(action, Accumulate) and action.into != action.gradient:
            into, gradient = (self._held((role, name)) for name in (action.into, action.gradient))
            if into is gradient:  # the mean of equals, which changes no bit
                return None
        return super().perform(role, action, seconds)


class VmapTensors(RealTensors):
    """When one gradient is due, those of all learners that are computing are computed with it, by `torch.func.vmap`."""

    def __init__(self, executors: dict[int, Executor], *, halves: bool = False) -> None:
        super().__init__(executors, halves=halves)
        self._planned: dict[int, Compute] = {}
        self._ready: dict[int, tuple[Buffer, BatchResult]] = {}

    def planned(self, role: int, action: Local) -> None:
        if isinstance(action, Compute):
            self._planned[role] = action

    def lost(self, role: int) -> None:
        super().lost(role)
        self._forget(role)

    def regroup(self, role: int, owner: int) -> None:
        super().regroup(role, owner)
        self._forget(role)

    def _forget(self, role: int) -> None:
        self._planned.pop(role, None)
        if role in self._ready:
            self._release(self._ready.pop(role)[0])

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        if role not in self._ready:
            roles = list(self._planned)
            at_a_time = max(1, _MAPPED_SAMPLES // action.work.count)
            for first in range(0, len(roles), at_a_time):
                self._compute_together(roles[first : first + at_a_time])
        buffer, outcome = self._ready.pop(role)
        self._hold((role, action.gradient), buffer)
        computed = self._learner(role).computed(action, outcome)
        self._forget_stale((role, action.weights))
        return computed

    def _compute_together(self, roles: list[int]) -> None:
        actions = [self._planned.pop(role) for role in roles]
        sources = [self._learner(role).source for role in roles]
        held = [self._held((role, action.weights)) for role, action in zip(roles, actions, strict=True)]
        weights = [buffer.vector for buffer in (held[:1] if len(set(held)) == 1 else held)]
        gradients = [self._new(role) for role in roles]
        minibatches = [(action.step, action.work) for action in actions]
        outcomes = mapped_gradients(sources, minibatches, weights, [gradient.vector for gradient in gradients])
        self._ready.update(zip(roles, zip(gradients, outcomes, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """What a simulation needs of a job beside its roles.

    Attributes:
        job: as resolved, with what the first gradient has settled.
        tensors: do what roles want done with tensors.
        info: what the data is like.
        layout: of the flat vector.
        size: of that vector, in elements.
        initial_sha256: of the weights at the start; empty where there are none.
        state_dict: what that of the model lists; empty where there are no weights.
        weights: gives the floats of a buffer of a role; None where there are none.
        executors: by role; without tensors there are none.
        placed: the pieces of a model of which a stage server has the last layers.
        step_bytes: of tensors that a step of all learners sends then.
    """

    job: Job
    tensors: Tensors
    info: DataInfo
    layout: tuple[Entry, ...]
    size: int
    initial_sha256: str
    state_dict: tuple[StateEntry, ...]
    weights: Callable[[int, str], npt.NDArray[np.float32] | None]
    executors: Mapping[int, Executor] = field(default_factory=dict)
    placed: Placed | None = None
    step_bytes: int = 0
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)


def make_cluster(job: Job, plan: Plan) -> SimulatedCluster:
    """Loads the data, builds the model, and makes real tensors or none, as the job says.

    Args:
        job: resolved.
        plan: who is who.

    Raises:
        RudraError: data or model are not there or do not fit, the job asks for a GPU that is not there, or for
            batches that its protocol or model do not allow.
    """
    if not job.simulation.tensors:
        return _without_tensors(job)
    device = find_device(job)
    loaded = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
    info, roles = loaded.info, tuple(range(len(plan.roles)))
    alone = job.simulation.batching == "none"
    job = settled(job, plan, loaded, device)
    executors = make_executors(
        job, plan, roles, loaded, prefetch=False, device=device, rows=alone, first_weights=final_weights
    )
    tensors = _KINDS[job.simulation.batching](executors, halves=job.cluster.gradient_format == "float16")
    if job.simulation.batching != "none":
        _check_batching(job, executors, torch.cat([executors[i].buffer(WEIGHTS).vector for i in plan.owners]), info)
    for executor in executors.values():
        executor.prepare()

    def weights(role: int, buffer: str) -> npt.NDArray[np.float32]:
        return executors[role].buffer(buffer).array

    digest, statistics = tensors.sha256(plan.server, WEIGHTS), executors[plan.statistics]
    about = (statistics.layout, statistics.size, digest, statistics.state_dict)
    fronts = (executor.cut for executor in executors.values() if isinstance(executor, FirstStageExecutor))
    placed = next((cut.placed(statistics.size, job.training.minibatch_size, info) for cut in fronts), None)
    prints = fingerprints(loaded)
    return SimulatedCluster(job, tensors, info, *about, weights, executors, placed, statistics.step_bytes, prints)


def _without_tensors(job: Job) -> SimulatedCluster:
    info = load(job.data, train=False, test=False, seed=job.training.seed, ignored=job.task.ignored).info
    try:
        with torch.device("meta"):  # shapes alone
            flat = FlatModel(models.build(job.model, info, job.training.seed))
    except Exception:  # a factory that needs real tensors
        flat = FlatModel(models.build(job.model, info, job.training.seed))
    placed, step_bytes = None, 0
    if job.placement.given:
        cut = cut_model(job, models.build(job.model, info, job.training.seed), info)
        placed = cut.placed(flat.size, job.training.minibatch_size, info)
        step_bytes = cut.sent(job.training.minibatch_size) * job.learners
    tensors = TimingOnly()
    about = (job, tensors, info, flat.layout, flat.size, "", (), lambda role, buffer: None)
    return SimulatedCluster(*about, placed=placed, step_bytes=step_bytes)


def _check_batching(job: Job, executors: dict[int, Executor], weights: torch.Tensor, info: DataInfo) -> None:
    batching, protocol = job.simulation.batching, job.make_protocol()
    if batching == "big-batch" and not (protocol.ordered and protocol.gradients_per_update == job.learners):
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs a protocol whose updates take one gradient of every learner at "
            "the same weights, as hardsync's do; valid here: none, vmap"
        )
    if batching == "big-batch" and any(fault.deadly for fault in job.simulation.faults):
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs all learners all the time, but faults has some die; valid here: "
            "none, vmap"
        )
    source = next(e.source for e in executors.values() if isinstance(e, LearnerExecutor))
    check_batching(batching, source.model, weights, info.sample)


_KINDS = {"none": RealTensors, "big-batch": BigBatchTensors, "vmap": VmapTensors}


def find_device(job: Job) -> torch.device:
    """Where a simulation computes.

    Raises:
        ConfigError: the job asks for a GPU, and there is none, or none is used.
    """
    wanted, there = job.cluster.device, torch.cuda.is_available()
    if job.weights.at == "window":
        if wanted == "cuda":
            raise ConfigError("[cluster] device = 'cuda': windows of virtual time are in main memory; valid: cpu, auto")
        return CPU
    if wanted == "cuda" and not there:
        raise ConfigError("[cluster] device = 'cuda': torch sees no GPU here; valid: cpu, auto")
    return torch.device("cuda", 0) if wanted != "cpu" and there else CPU
