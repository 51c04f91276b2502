"""Layers placed on ranks: the cut of a model, and executors for its first and last layers.

The first layers' parameters come first in the flat vector, and their buffers come first among the buffers. So both
sides are parts of the vector (`rudra.core.layout.Part`), each with the layout of a separate model's vector. A snapshot
contains both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rudra.compute import parts
from rudra.compute.averaging import average
from rudra.compute.buffers import buffers_of
from rudra.compute.carried import CarriedState
from rudra.compute.cuts import chain
from rudra.compute.device.streams import known
from rudra.compute.executor import performs
from rudra.compute.flat import FlatModel
from rudra.compute.flat_buffers import travels
from rudra.compute.gradients import BatchResult, GradientSource
from rudra.compute.learners import LearnerExecutor, ReplicaExecutor
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import OwnerExecutor, ServerExecutor
from rudra.compute.runs import runs_of
from rudra.core.actions import AverageGroup, BackpropFirstStage, Hash, RunFirstStage, RunLastStage
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS, AVERAGE, WEIGHTS
from rudra.core.digest import sha256
from rudra.core.events import ActivationsReady, Computed, Hashed
from rudra.core.layout import Entry, Part, Placed
from rudra.core.state_names import BACK
from rudra.core.work import portion
from rudra.data.load import DataInfo
from rudra.data.samples import Samples
from rudra.data.sparse import joined
from rudra.data.trees import called, mapped
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from topologies import Plan


class ModelCut(NamedTuple):
    """A model in two pieces that share its parameters.

    Attributes:
        front, back: First layers, and last layers.
        floats: Number of floats in the first layers' vector, including their buffers.
        buffers: Number of floats of their buffers.
        shape: Shape of the one tensor that crosses the cut, for one sample.
        random: Number of floats for the random generator's state after that tensor. 0: the state need not travel.
    """

    front: nn.Module
    back: nn.Module
    floats: int
    buffers: int
    shape: tuple[int, ...]
    random: int

    def placed(self, size: int, samples: int, info: DataInfo) -> Placed:
        """Measures the pieces relative to a vector of `size` floats, for mini-batches of `samples` samples.

        Operations are counted by a module that takes over a second to import.
        """
        pieces = self.front, self.back
        modes = [piece.training for piece in pieces]
        with torch.no_grad(), FlopCounterMode(display=False) as all_flops:
            crossing = called(self.front.eval(), info.sample[0])
            with FlopCounterMode(display=False) as back_flops:
                self.back.eval()(crossing)
        for piece, mode in zip(pieces, modes, strict=True):
            piece.train(mode)
        total = all_flops.get_total_flops()
        back = back_flops.get_total_flops() / total if total else 0.5
        return Placed(self.floats / size, self.crossing(samples) / size, back, self.buffers / size)

    def sent(self, samples: int) -> int:
        """Returns the bytes of tensors that a mini-batch sends in both directions: 2 (O + P), ralp.txt §4.3."""
        trained = sum(parameter.numel() for parameter in self.front.parameters() if parameter.requires_grad)
        return 2 * 4 * (samples * math.prod(self.shape) + trained)

    def parts(self, table: OptimizerTable, layout: Sequence[Entry]) -> tuple[Part, ...]:
        """Returns the part of the flat vector on each side of the cut.

        Raises:
            ConfigError: A group of the optimiser has only parameters that neither side has.
        """
        list(runs_of(table.groups, layout))
        first = {name for name, _ in (*self.front.named_parameters(), *self.front.named_buffers())}
        sides: dict[bool, list[slice]] = {True: [], False: []}
        for is_first, run in groupby(layout, lambda entry: entry.name in first):
            entries = list(run)
            sides[is_first].append(slice(entries[0].offset, entries[-1].offset + entries[-1].size))
        return Part(tuple(sides[True])), Part(tuple(sides[False]))

    def crossing(self, samples: int) -> int:
        """Returns the number of floats that a mini-batch sends in each direction."""
        return samples * math.prod(self.shape) + self.random


def cut_model(job: Job, module: nn.Module, info: DataInfo) -> ModelCut:
    """Cuts a model at the place that the job sets.

    Args:
        job: Resolved job.
        module: Model to cut.
        info: Description of a sample.

    Raises:
        ConfigError: The model has no such layer, or cannot be cut there.
    """
    where, inputs = f"[placement] cut = {job.placement.cut!r}", info.sample[0]
    module.eval()  # BatchNorm in training mode rejects one sample
    front, back = chain(module, inputs).cut(job.placement.cut)
    with torch.no_grad():
        crossing = called(front, inputs)
    if not isinstance(crossing, torch.Tensor) or crossing.dtype != torch.float32 or len(crossing) != 1:
        text = "the output of the first layers is not one float32 tensor with a row for each sample"
        raise ConfigError(f"{where}: {text}")
    front_draws, several = _draws(front, mapped(lambda tensor: joined([tensor, tensor]), inputs))
    back_draws, _ = _draws(back, several)
    state = torch.default_generator.get_state().numel() // 4 if front_draws and back_draws else 0
    trained = sum(parameter.numel() for parameter in front.parameters() if parameter.requires_grad)
    buffers = sum(buffer.tensor.numel() for buffer in buffers_of(front) if travels(buffer.tensor))
    return ModelCut(front, back, trained + buffers, buffers, tuple(crossing.shape[1:]), state)


def _draws(piece: nn.Module, inputs: Any) -> tuple[bool, Any]:
    """Returns whether layers draw random numbers in training, and their output. Changes their buffers."""
    piece.train()
    before = torch.default_generator.get_state()
    with torch.no_grad():
        output = called(piece, inputs)
    return not torch.equal(before, torch.default_generator.get_state()), output


class FirstStageExecutor(LearnerExecutor):
    """Executor of a learner that has the first layers.

    Attributes:
        activations: Number of floats of activations that it sends.
    """

    _open: torch.Tensor | None = None  # output of the last forward pass, with the graph for its gradient
    _buffer_tail: torch.Tensor  # buffers after that pass

    def place(self, cut: ModelCut, samples: int) -> None:
        """Allocates memory for the activations of mini-batches of `samples` samples."""
        self.cut, self.activations = cut, samples * math.prod(cut.shape)
        self.sizes = dict.fromkeys((ACTIVATIONS, ACTIVATION_GRADIENT), cut.crossing(samples))
        self._buffer_tail = torch.empty(self.size - self.parameters)

    @performs(RunFirstStage)
    def forward(self, action: RunFirstStage) -> Iterator[ActivationsReady]:
        source, model = self.source, self.source.model
        inputs, _ = source.minibatch(action.step, action.work)
        model.bind(self.buffer(action.weights).vector)
        self._open = model.forward(inputs, source.seed(action.step), self._buffer_tail)
        into = self.buffer(action.activations).vector
        into[: self.activations] = self._open.detach().reshape(-1)
        if self.cut.random:
            into[self.activations :].view(torch.uint8).copy_(model.random_state)
        yield ActivationsReady(action.step)

    @performs(BackpropFirstStage)
    def backward(self, action: BackpropFirstStage) -> Iterator[Computed]:
        model, output = self.source.model, self._open
        assert output is not None
        self._open = None
        model.bind(self.buffer(action.weights).vector)  # others may have computed with this module in between
        gradient = self.buffer(action.returned).vector[: self.activations].view(output.shape)
        into = self.buffer(action.gradient).vector
        model.backward(output, gradient, into, self.ready)
        into[self.parameters :] = self._buffer_tail
        yield self.computed(action, BatchResult(action.loss, action.errors, action.samples))


class PieceExecutor(OwnerExecutor):
    """Executor of an owner of some layers or a part of them. Its optimiser covers only these."""

    _side: Part

    def own_side(self, side: Part) -> None:
        """Sets the part of the flat vector with the layers. Call it before `own`."""
        self._side = side

    def _rule_of(self, job: Job, plan: Plan, weights: torch.Tensor) -> UpdateRule:
        assert self._owned_part is not None
        table = job.optimizer.model_copy(update={"momentum": self._momentum(job, plan)})
        here = [e for e in self.layout if e.kind == "parameter" and e in self._side]
        first, own = here[0].offset, self._owned_part.stretches[0]
        mine = tuple(Entry(e.name, e.shape, e.offset - first, e.size, e.kind) for e in here)
        part = None if self._owned_part == self._side else slice(own.start - first, own.stop - first)
        table = table.model_copy(update={"groups": table.groups_of([e.name for e in mine])})
        return UpdateRule(table, weights, mine, part)

    def _momentum(self, job: Job, plan: Plan) -> float:
        return job.explicit_momentum(plan)

    def _adopt(self, state: CarriedState) -> None:
        self._rule.take_over(state.steps, self._side.stretches[0].start)

    def _take_part(self, weights: torch.Tensor) -> None:
        super()._take_part(weights)
        self._side_sha256 = sha256(parts.elements_of(weights, self._side).numpy())

    def hash(self, action: Hash) -> Hashed:
        """Hashes all weights of its side. If other owners have parts of the side, hashes the initial weights."""
        alone = self._owned_part == self._side
        return Hashed(sha256(self.buffer(action.buffer).array) if alone else self._side_sha256)


class _FirstStageOwner(PieceExecutor):
    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        super().restore({name: tensor for name, tensor in tensors.items() if not name.startswith(BACK)})


class FirstStageServerExecutor(_FirstStageOwner, ServerExecutor):
    """Executor of a parameter server that owns the first layers, or a part of them."""


class FirstStageReplicaExecutor(FirstStageExecutor, _FirstStageOwner, ReplicaExecutor):
    """Executor of a learner that updates its own first layers."""

    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        tensors = parts.joined([tensors])
        weights = tensors.get(WEIGHTS)
        if weights is not None and len(weights) == self.size:  # the weights of another replica
            whole = np.zeros(self._of, np.float32)
            for place, stretch in zip(self._side.within, self._side.stretches, strict=True):
                whole[stretch] = weights[place]
            tensors = {**tensors, WEIGHTS: whole}
        super().restore(tensors)


class LastStageExecutor(PieceExecutor, ServerExecutor):
    """Executor of the stage server, which owns the last layers and computes with them."""

    def conclude_for(self, job: Job, plan: Plan, split: Samples, back: FlatModel, cut: ModelCut, role: int) -> None:
        """Sets the mini-batches to complete. They are drawn again for all learners, to obtain their targets.

        Args:
            job: Resolved job.
            plan: Role assignment.
            split: Training samples.
            back: Model of the last layers, which computes.
            cut: Cut that these layers belong to.
            role: Id of the stage server's role.
        """
        self._cut, size = cut, job.training.minibatch_size
        shares, mine = job.cluster.parts, [i for i in plan.whole.learners if plan.stage_of(i) == role]
        works = {plan.roles[i].index: portion(plan, i, size, shares).work(0) for i in mine}
        crossing = {i: cut.crossing(works[plan.roles[i].index].count) for i in mine}
        names = (ACTIVATIONS, ACTIVATION_GRADIENT)
        self.sizes = {f"{name} {i}": floats for i, floats in crossing.items() for name in names}
        self.sizes |= dict.fromkeys(names, crossing[mine[0]])
        self._sources = {
            learner: GradientSource(job, learner, work, back, split, prefetch=False) for learner, work in works.items()
        }

    def _momentum(self, job: Job, plan: Plan) -> float:
        own = job.placement.momentum
        return job.optimizer.momentum if own is None else own

    @performs(RunLastStage)
    def conclude(self, action: RunLastStage) -> Iterator[Computed]:
        source = self._sources[action.learner]
        model = source.model
        _, target = source.minibatch(action.step, action.work)
        came = self.buffer(action.activations).vector
        samples, shape = action.work.count, self._cut.shape
        floats = samples * math.prod(shape)
        activations = came[:floats].view(samples, *shape).detach().requires_grad_()
        seed = came[floats:].view(torch.uint8).clone() if self._cut.random else source.seed(action.step)
        model.bind(self.buffer(action.weights).vector)
        loss, errors = known(model.gradient(activations, target, self.buffer(action.gradient).vector, seed))
        self._give_back(action.activations)
        returned = self.buffer(action.returned).vector[:floats]
        if activations.grad is None:
            returned.zero_()
        else:
            returned.copy_(activations.grad.reshape(-1))
        yield Computed(action.step, loss, errors, samples)

    @performs(AverageGroup)
    def combine(self, action: AverageGroup) -> None:
        into, *_ = vectors = [self.buffer(name).vector for name in action.gradients]
        assert action.into == action.gradients[0]
        average(into, vectors, action.samples, sums=action.sums)

    def restore(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        own = {name.removeprefix(BACK): tensor for name, tensor in tensors.items() if name.startswith(BACK)}
        super().restore({name: tensors[name] for name in (WEIGHTS, AVERAGE) if name in tensors} | own)

    def _tensors(self, *, alone: bool = False) -> dict[str, torch.Tensor]:
        return {
            name if name.startswith((WEIGHTS, AVERAGE)) else BACK + name: tensor
            for name, tensor in super()._tensors(alone=alone).items()
        }
