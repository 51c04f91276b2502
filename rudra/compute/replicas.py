"""Executors of averaging learners, which have a replica of their own and a copy of the agreed weights."""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from protocols import Averaging
from rudra.compute.averaging import CHUNK, slices
from rudra.compute.carried import CarriedState
from rudra.compute.device.devices import kind_of
from rudra.compute.device.kind import CPU
from rudra.compute.device.streams import Number, Pending, known, until_done
from rudra.compute.executor import performs
from rudra.compute.final_gradients import Ready
from rudra.compute.graphs import GraphedSteps
from rudra.compute.learners import LearnerExecutor, OwningLearnerExecutor
from rudra.compute.optim import Rates, UpdateRule
from rudra.compute.owners import OwnerExecutor, ServerExecutor, UpdateResult
from rudra.compute.step_ahead import StepAhead
from rudra.compute.tasks import number
from rudra.compute.vectors import Buffer
from rudra.core.actions import Correct, PullReplica, ResetReplica, SetOptimizer, StepReplica, Update
from rudra.core.buffer_names import DIFFERENCE, REFERENCE, REPLICA, WEIGHTS
from rudra.core.events import ReplicaStepped
from rudra.core.state_names import CORRECTION
from rudra.errors import CheckpointError, ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from topologies import Plan


def outer_rule(job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
    """Returns the optimiser that `[averaging]` sets for the agreed weights.

    Raises:
        ConfigError: The optimiser does not accept its options.
    """
    name, momentum, options = Averaging.of(job.make_protocol(plan)).outer
    try:
        table = OptimizerTable(name=name, momentum=momentum, options=options)
        return UpdateRule(table, weights)
    except (ConfigError, ValueError) as error:
        raise ConfigError(str(error).replace("[optimizer]", "[averaging.outer]")) from None


class ElasticExecutor(LearnerExecutor):
    """Executor that steps a replica and corrects it by weights received from elsewhere.

    Differences contain parameters only. In the positions of model buffers (BatchNorm's statistics) they contain the
    replica's own values. The weights get the mean of these values by samples, and each replica keeps its own.
    """

    def train_alone(self, job: Job, plan: Plan, role: int) -> None:
        """Creates the replica, and the job's optimiser for it."""
        replica = self.buffer(REPLICA).vector
        self._inner = UpdateRule(job.optimizer, replica[: self.parameters], self.layout)
        self._graphed = GraphedSteps(self.device)

    def put(self, name: str, buffer: Buffer) -> None:
        super().put(name, buffer)
        if name == REPLICA:
            self._inner.move(buffer.vector[: self.parameters])

    def prepare(self) -> None:
        super().prepare()
        self._inner.prepare()

    def _rule_for(self, replica: str) -> UpdateRule:
        """Returns the rule that steps a replica."""
        return self._inner

    @performs(SetOptimizer)
    def set_optimizer(self, action: SetOptimizer) -> None:
        assert action.weights == REPLICA
        self._inner.change(action.momentum, action.options)
        self._graphed.forget()

    def stepping(
        self, action: StepReplica, weights: torch.Tensor | None = None, rates: Callable[[], Rates] = tuple
    ) -> Callable[[], tuple[Number, ...]]:
        """Returns the work of a step. It returns the sum of the squares of the difference, or NaN without one.

        Args:
            action: The step.
            weights: (size,) float32, the weights. None: they are in the buffer that the action names.
            rates: Returns the rates as for `UpdateRule.step`.
        """
        rule, parameters = self._rule_for(action.replica), self.parameters
        gradient, replica = self.buffer(action.gradient).vector, self.buffer(action.replica).vector
        weights = self.buffer(action.weights).vector if weights is None else weights
        difference = self.renew(action.difference).vector if action.difference else None
        early = action.elasticity is not None
        squares: Number = 0.0
        summed = torch.Tensor.double if kind_of(self.device).records else number

        def differ(part: slice) -> None:
            nonlocal squares
            assert difference is not None
            torch.sub(weights[part], replica[part], out=difference[part])
            squares += summed(torch.dot(difference[part], difference[part]))

        def before(part: slice) -> torch.Tensor:
            if difference is not None and early:
                differ(part)
            return gradient[part]

        def after(part: slice) -> None:
            if difference is not None and not early:
                differ(part)
            elif difference is not None and action.elasticity:
                replica[part].add_(difference[part], alpha=action.elasticity)

        def work() -> tuple[Number, ...]:
            nonlocal squares
            squares, memory = 0.0, rates()
            sliced = rule.sliced if replica.is_cpu and not memory else None
            if sliced is not None:  # each slice passes through memory once
                sliced.step(before, action.learning_rate, CHUNK, after)
            else:
                parts = list(slices(0, parameters, CHUNK if replica.is_cpu else parameters))
                for part in parts:
                    before(part)
                rule.step(gradient[:parameters], action.learning_rate, rates=memory)
                for part in parts:
                    after(part)
            if self.size > parameters:
                replica[parameters:] = gradient[parameters:]
                if difference is not None:
                    difference[parameters:] = replica[parameters:]
            return (math.nan if difference is None else squares,)

        return work

    @performs(StepReplica)
    def step(self, action: StepReplica) -> ReplicaStepped | Iterator[ReplicaStepped | Pending]:
        began = time.perf_counter()
        rule, work, buffer = self._rule_for(action.replica), self.stepping(action), self.buffer(action.replica)
        buffer.version += 1
        # The step of a shared reference has no stream of its own, because its role does not wait for it.
        apart = self.own_stream and self._stage is None and action.replica == REPLICA
        if not apart:
            numbers = work()
            if not kind_of(self.device).apart:
                return ReplicaStepped(time.perf_counter() - began, math.sqrt(*known(numbers)))

        def on_stream() -> tuple[Number, ...]:
            if not rule.repeats:
                return work()
            vectors = [self._buffers[name].vector for name in (action.difference, action.replica) if name]
            about = action.learning_rate, action.elasticity, not action.difference
            read = [self.buffer(name).vector for name in (action.gradient, action.weights)]
            return self._graphed.do(work, about, read, [*vectors, *rule.state().values()])

        pending = self._stream.submit(on_stream if apart else lambda: numbers)

        def rest() -> Iterator[ReplicaStepped | Pending]:
            yield from until_done(pending)
            yield ReplicaStepped(time.perf_counter() - began, math.sqrt(*pending.numbers()))

        return rest()

    @performs(ResetReplica)
    def restart(self, action: ResetReplica) -> None:
        if not action.keeps_momentum:
            self._rule_for(action.replica).reset()
        replica = self.renew(action.replica)
        replica.vector.copy_(self.buffer(action.weights).vector)
        replica.version += 1


class AveragerExecutor(ElasticExecutor, OwningLearnerExecutor):
    """Executor that steps a replica, and steps the weights by the mean difference between them and all replicas.

    It may make the last step of a period while the gradient is computed (`StepAhead`). It then has another buffer for
    the replica, and another state of its optimiser.
    """

    _own: tuple[str, ...] = (REPLICA,)
    _ahead: StepAhead | None = None

    def train_alone(self, job: Job, plan: Plan, role: int) -> None:
        super().train_alone(job, plan, role)
        first = plan.group_of(role)[0]
        self._leads, self._leads_group = role == plan.server, role == first
        keeper = role if role in plan.keepers else first
        self._prefix, self._of_group = (f"{REPLICA}{plan.roles[i].index}." for i in (keeper, first))
        self.buffer(REPLICA).vector.copy_(self.buffer(WEIGHTS).vector)

    def _rule_of(self, job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
        return outer_rule(job, plan, weights)

    def state_bytes(self) -> int:
        return super().state_bytes() + self._inner.state_bytes()

    @property
    def rules(self) -> dict[str, UpdateRule]:
        return {REPLICA: self._inner, **super().rules}

    @property
    def ahead_bytes(self) -> int:
        """Memory that steps which begin with their gradient take: another replica, and another state of its rule."""
        return 4 * self.size + self._inner.state_bytes() if self._stage is None else 0

    def _tensors(self, *, alone: bool = False) -> dict[str, torch.Tensor]:
        found = super()._tensors() if self._leads else {}
        # Each replica has a correction of its own.
        shared = {name: tensor for name, tensor in found.items() if not name.startswith(CORRECTION)}
        if alone:
            return shared
        own = {WEIGHTS: self.buffer(REPLICA).vector, **self._inner.state()}
        if self.corrector is not None:
            own |= self.corrector.state()
        return shared | {self._prefix + name: tensor for name, tensor in own.items()}

    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Takes over the weights, and the replica if the state has one. Otherwise the replica starts from the weights.

        Raises:
            CheckpointError: The tensors do not match this model and these optimisers.
        """
        self._drop_ahead()
        super().restore({name: tensor for name, tensor in tensors.items() if not name.startswith(REPLICA)})
        try:
            found = self._restore_own({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from None
        if found:
            return
        self._begin_anew(*self._own)
        if not any(name.startswith(REPLICA) for name in tensors):  # no replica at all: all learners restart
            self._rule.reset()

    def _restore_own(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Takes over the replica, if the state has one."""
        start = self._prefix
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        if not own:
            return False
        self.renew(REPLICA).vector.copy_(own.pop(WEIGHTS))
        corrections = {name: own.pop(name) for name in [*own] if name.startswith(CORRECTION)}
        if self.corrector is not None:
            self.corrector.restore(corrections)
        self._inner.restore(own)
        self.buffer(REPLICA).version += 1
        return True

    def _adopt(self, state: CarriedState) -> None:
        """Begins with a replica equal to the weights, and with the momentum of the role that stepped before."""
        self._rule.take_over_names(state.outer)
        self._begin_anew(*self._own)
        self._inner.take_over(state.steps)

    def _begin_anew(self, *names: str) -> None:
        """Restarts buffers from the weights. The optimiser of the weights keeps its state."""
        for name in names:
            super().restart(ResetReplica(name, WEIGHTS))

    def step_ahead(self, action: StepReplica, final: Ready) -> Ready | None:
        """Prepares for a step by the gradient that is computed now, whose difference is sent in parts.

        Args:
            action: the step. Its difference has a new buffer.
            final: called with each part of the difference that is final.

        Returns:
            Function to call with each piece of the gradient that is final. None: the step is made afterwards.
        """
        self._drop_ahead()
        sliced = self._rule_for(action.replica).sliced
        if sliced is None or self._stage is not None or self.own_stream or self.device.type != CPU.type:
            return None
        gradient, weights, difference = map(self.buffer, (action.gradient, action.weights, action.difference))
        self._ahead = StepAhead(action, sliced, self.spare(), gradient, weights, difference, final)
        return self._ahead.take

    def _drop_ahead(self) -> None:
        """Drops a step that was begun. All ranks also drop its average."""
        if self._ahead is not None:
            self._use_again(self._ahead.into)
        self._ahead = None

    def step(self, action: StepReplica) -> ReplicaStepped | Iterator[ReplicaStepped | Pending]:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super().step(action)
        assert ahead.action == action
        began = time.perf_counter()
        squares = ahead.complete()
        before, into = self.buffer(action.replica), ahead.into
        if self.size > self.parameters:
            behind = slice(self.parameters, self.size)
            into.vector[behind] = self.buffer(action.gradient).vector[behind]
            self.buffer(action.difference).vector[behind] = into.vector[behind]
        into.version = before.version + 1
        self._replace(action.replica, into)
        return ReplicaStepped(time.perf_counter() - began, math.sqrt(squares))

    @performs(PullReplica)
    def approach(self, action: PullReplica) -> None:
        self.approach_to(self.buffer(action.weights).vector, action.replica, action.elasticity)
        self.buffer(action.replica).version += 1

    def approach_to(self, weights: torch.Tensor, replica: str, elasticity: float) -> None:
        """Moves the parameters of a replica towards weights, (size,) float32, by a fraction of the distance."""
        moved, there = self.buffer(replica).vector[: self.parameters], weights[: self.parameters]
        torch.lerp(moved, there, elasticity, out=moved)

    def set_optimizer(self, action: SetOptimizer) -> None:
        base = ElasticExecutor if action.weights == REPLICA else OwnerExecutor
        self._drop_ahead()
        base.set_optimizer(self, action)

    def _replica(self) -> Callable[[], npt.NDArray[np.float32]]:
        return lambda: self.buffer(REPLICA).array

    @performs(ResetReplica)
    def restart(self, action: ResetReplica) -> None:
        self._drop_ahead()
        self._rule.reset()
        if self.corrector is not None and not action.keeps_momentum:
            self.corrector.reset()
        super().restart(action)


class ReferrerExecutor(AveragerExecutor):
    """Executor that steps a replica with a reference for each block of learners.

    The reference corrects the replica. The mean difference of the block's replicas corrects the reference, and the mean
    difference of all references corrects the weights.
    """

    _own = (REPLICA, REFERENCE)

    def train_alone(self, job: Job, plan: Plan, role: int) -> None:
        super().train_alone(job, plan, role)
        reference = self.buffer(REFERENCE).vector
        reference.copy_(self.buffer(WEIGHTS).vector)
        self._moves_reference = UpdateRule(OptimizerTable(name="sgd", momentum=0.0), reference[: self.parameters])

    def put(self, name: str, buffer: Buffer) -> None:
        super().put(name, buffer)
        if name == REFERENCE:
            self._moves_reference.move(buffer.vector[: self.parameters])

    def prepare(self) -> None:
        super().prepare()
        self._moves_reference.prepare()

    def follow(self, other: OwnerExecutor) -> None:
        super().follow(other)
        self.copy_from(other, REFERENCE)

    def _rule_for(self, replica: str) -> UpdateRule:
        return self._moves_reference if replica == REFERENCE else super()._rule_for(replica)

    def _tensors(self, *, alone: bool = False) -> dict[str, torch.Tensor]:
        tensors = super()._tensors(alone=alone)
        if self._leads_group and not alone:
            tensors[self._of_group + REFERENCE] = self.buffer(REFERENCE).vector
        return tensors

    def _restore_own(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Takes over reference and replica, if the state has the reference."""
        left = dict(tensors)
        reference = left.pop(self._of_group + REFERENCE, None)
        if reference is None:
            return False
        self.renew(REFERENCE).vector.copy_(reference)
        self.buffer(REFERENCE).version += 1
        if not super()._restore_own(left):  # other members of the block have their replicas
            self._begin_anew(REPLICA)
        return True


class CentralExecutor(ServerExecutor):
    """Executor of a server that exchanges its weights with one replica at a time. It receives replicas as gradients.

    A correction changes the difference of the weights and the replica.
    """

    _correction: Correct | None = None  # of the next difference

    def _rule_of(self, job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
        return outer_rule(job, plan, weights)

    def correct(self, action: Correct) -> None:
        self._correction = action

    def _adopt(self, state: CarriedState) -> None:
        self._rule.take_over_names(state.outer)

    def update(self, action: Update) -> UpdateResult:
        replica, weights = self.buffer(action.gradient).vector, self.buffer(action.weights).vector
        difference, parameters = self.renew(DIFFERENCE).vector, self.parameters
        torch.sub(weights[:parameters], replica[:parameters], out=difference[:parameters])
        torch.lerp(weights[parameters:], replica[parameters:], action.learning_rate, out=difference[parameters:])
        if self._correction is not None:
            self._correct(difference, self._correction)
            self._correction = None
        self._give_back(action.gradient)
        return super().update(structs.replace(action, gradient=DIFFERENCE))
