"""Tensors of all roles in one process. Copies are rare, and gradients are computed one by one or in batches.

A transfer copies nothing: from then on the receiver's buffer refers to the sender's vector. A role that writes to a
vector with other holders first gives these holders a copy. So all learners that pulled the same weights hold one
vector. A version of the weights is copied at most once, and is freed when its last holder releases it. Free vectors are
reused, so memory is bounded by the vectors held at the same time.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from msgspec import structs

from rudra.compute.averaging import average
from rudra.compute.averaging_executor import AveragingExecutor
from rudra.compute.device.streams import finished
from rudra.compute.executor import Executor
from rudra.compute.half import from_half, to_half
from rudra.compute.learners import LearnerExecutor
from rudra.compute.owners import OwnerExecutor
from rudra.compute.parts import joined
from rudra.compute.stages import PieceExecutor
from rudra.compute.vectors import Buffer
from rudra.core.actions import (
    BackpropFirstStage,
    Compute,
    Copy,
    ExecutorAction,
    Hash,
    Reduce,
    RunFirstStage,
    RunLastStage,
)
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS, GRADIENT, SNAPSHOT, WEIGHTS
from rudra.core.events import Computed, Event, Hashed
from rudra.simulation.timing_only import NextMinibatch

RoleBuffer = tuple[int, str]
"""Role, and the name of one of its buffers."""


class RealTensors:
    """Real tensors for the simulator, on the executors of all roles.

    Args:
        executors: Executors by role id.
        poison: Whether to overwrite with NaN data that a role must not read. Tests use it.
        halves: Whether gradients are sent as float16.

    Attributes:
        vectors: Number of vectors made, without those of executors. It equals the maximum number held at the same time.
    """

    idle: Collection[type[ExecutorAction]] = ()

    def __init__(self, executors: dict[int, Executor], *, poison: bool = False, halves: bool = False) -> None:
        self.executors: Mapping[int, Executor] = executors
        self._executors, self._poison, self._halves = executors, poison, halves
        self._servers = {role for role, executor in executors.items() if isinstance(executor, AveragingExecutor)}
        self._holders: dict[Buffer, set[RoleBuffer]] = {}
        self._free: dict[int, list[Buffer]] = {}  # by size
        self._parted = len({executor.size for executor in executors.values()}) > 1
        self._going: Counter[RoleBuffer] = Counter()  # number of parts of a tensor in transfer
        self._hashes: dict[Buffer, str] = {}  # of vectors that have not changed since they were hashed
        self._unsent: RoleBuffer | None = None  # the latest gradient until its learner sends it
        self.vectors = 0

    def lent(self, role: int, buffer: str) -> None:
        """Marks the start of a transfer from the buffer."""
        if (role, buffer) == self._unsent:
            self._unsent = None
        if self._parted:
            self._going[role, buffer] += 1

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        sender, receiver = self._executors[source], self._executors[to]
        if sender.size_of(source_buffer) != receiver.size_of(to_buffer):
            self._make_own((to, to_buffer))
            receiver.slice_for(to_buffer, source).copy_(sender.slice_for(source_buffer, to))
            self._held((to, to_buffer)).version += 1
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
        if buffer == SNAPSHOT or buffer.startswith((GRADIENT, ACTIVATIONS, ACTIVATION_GRADIENT)):
            self.posted(role, buffer)

    def posted(self, role: int, buffer: str) -> None:
        self._let_go((role, buffer))
        if self._poison:
            self._hold((role, buffer), self._new(role, buffer))

    def sha256(self, role: int, buffer: str) -> str:
        """Returns the hexadecimal SHA-256 of a buffer, or for an owner of some layers, of all initial weights."""
        if isinstance(self._executors[role], PieceExecutor):
            return self._executors[role].sha256(buffer)
        held = self._held((role, buffer))
        if held not in self._hashes:
            self._hashes[held] = self._executors[role].sha256(buffer)
        return self._hashes[held]

    def watch(self, next_minibatch: NextMinibatch) -> None:
        """Gets the function that returns step and samples of a learner's next mini-batch."""

    def planned(self, role: int, action: ExecutorAction) -> None:
        """Freezes the inputs of a long action until it is done."""

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        match action:
            case Copy():
                self._share((role, action.source), (role, action.target))
                return None
            case Hash() if not isinstance(self._executors[role], PieceExecutor):
                return Hashed(self.sha256(role, action.buffer))
            case Compute():
                return self.compute(role, action)
            case RunFirstStage() | BackpropFirstStage() | RunLastStage():
                for field_ in action.changes:
                    name = getattr(action, field_)
                    self._hold((role, name), self._new(role, name))
                (found,) = finished(self._executors[role].perform(action))
                if isinstance(action, RunLastStage):
                    self.posted(role, action.activations)
                elif isinstance(action, BackpropFirstStage):
                    self.posted(role, action.returned)
                return found
        names = (*(getattr(action, field_) for field_ in action.changes), *getattr(action, "gradients", ()))
        for name in filter(None, names):
            self._make_own((role, name))
        event = next(iter(finished(self._executors[role].perform(action))), None)
        return structs.replace(event, seconds=seconds) if event is not None and hasattr(event, "seconds") else event

    def compute(self, role: int, action: Compute) -> Computed:
        self._computes((role, action.gradient))
        self._hold((role, action.gradient), self._new(role, action.gradient))
        (computed,) = finished(self._learner(role).compute(action))
        assert isinstance(computed, Computed)
        self._forget_stale((role, action.weights))
        return computed

    def reduce(self, reductions: Mapping[int, Reduce], sums: Sequence[Sequence[int]]) -> None:
        """Averages the gradients of one group's members. The result is one vector for all members.

        Args:
            reductions: Reductions of the members, in group_rank order.
            sums: Order of addition (`Plan.partial_sums`).
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
        """Frees the vectors that only a lost role held, and removes its hooks, which will not be called again."""
        self._executors[role].hooks = None
        if self._unsent is not None and self._unsent[0] == role:
            self._unsent = None
        for name in self._executors[role].names:
            self._let_go((role, name))

    def regroup(self, role: int, owner: int, keepers: Sequence[int] = ()) -> None:
        """Drops a role's current work. A role that updates weights itself takes over their owner's weights.

        Args:
            role: Id of the role.
            owner: Id of the owner of the weights.
            keepers: Ids of all roles whose state the role takes over, if replicas stay.
        """
        if self._unsent is not None and self._unsent[0] == role:
            self._unsent = None
        executor = self._executors[role]
        if isinstance(executor, OwnerExecutor):
            self._make_own((role, WEIGHTS))
            alone = self._owner(owner).state(alone=True) if not keepers else {}
            executor.restore(alone or joined([self._owner(keeper).state() for keeper in keepers]))

    def _owner(self, role: int) -> OwnerExecutor:
        executor = self._executors[role]
        assert isinstance(executor, OwnerExecutor)
        return executor

    def _learner(self, role: int) -> LearnerExecutor:
        executor = self._executors[role]
        assert isinstance(executor, LearnerExecutor)
        return executor

    def _computes(self, gradient: RoleBuffer) -> None:
        """Drops an unsent gradient. A plain learner sends gradients at once, so its learner is leaving."""
        if not self._learner(gradient[0]).pushes_at_once:
            return
        if self._unsent is not None:
            self._let_go(self._unsent)
        self._unsent = gradient

    def _forget_stale(self, weights: RoleBuffer) -> None:
        """Drops a plain learner's old weights. It requests newer weights after each gradient."""
        if self._learner(weights[0]).pushes_at_once and not any(
            role in self._servers for role, _ in self._holders[self._held(weights)]
        ):
            self.posted(*weights)

    # Holders of vectors.

    def _new(self, role: int, name: str = WEIGHTS) -> Buffer:
        """Returns a vector without holders, with the size of the role's buffer of that name. Its content is
        undefined."""
        executor = self._executors[role]
        if free := self._free.get(executor.size_of(name)):
            return free.pop()
        self.vectors += 1
        made = executor.new_buffer(name)
        if self._poison:
            made.vector.fill_(float("nan"))
        return made

    def _release(self, buffer: Buffer) -> None:
        buffer.version += 1  # it will hold something else
        self._free.setdefault(len(buffer.vector), []).append(buffer)

    def _held(self, place: RoleBuffer) -> Buffer:
        executor = self._executors[place[0]]
        if not executor.has(place[1]):  # a vector that was let go, before a new one
            executor.put(place[1], self._new(*place))
        held = executor.buffer(place[1])
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
        """Prepares a vector for writing: its other holders get one shared copy."""
        buffer = self._held(place)
        self._hashes.pop(buffer, None)
        others = self._holders[buffer] - {place}
        if others:
            copy = self._new(*place)
            copy.vector.copy_(buffer.vector)
            for other in others:
                self._hold(other, copy)
