"""Gradients of the learners of a bank in any of its forms, for checks and measurements before training."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch

from rudra.compute import models, tasks
from rudra.compute.bank.gathering import ReadyLearner, bank_gradients
from rudra.compute.bank.graphs import Drawing, check_apart, check_graphs, drawing_of, own_streams
from rudra.compute.checks import check_fused
from rudra.compute.device.devices import finish, kind_of
from rudra.compute.device.streams import Number, Stream
from rudra.compute.first_gradient import portion_of
from rudra.compute.flat import FlatModel, Gradients
from rudra.compute.gradients import GradientSource
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.data.load import Data
from rudra.errors import ConfigError
from rudra.job.job import Job
from topologies import Plan


class BankLearners:
    """Learners of a bank that compute gradients for a trial.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.
        gradients: `training.gradients` of the job.

    Attributes:
        device: As passed in.
        models: Their models. The loop and the fused form use the first one only.
    """

    def __init__(self, job: Job, plan: Plan, data: Data, device: torch.device, gradients: str) -> None:
        assert data.training is not None
        self.job, self.data, self.training = job, data, data.training
        self._how: Gradients = "direct" if gradients == "direct" else "autograd"
        self._plan, self.device = plan, device
        self.models = [self._model()]

    def _model(self) -> FlatModel:
        task = tasks.make(self.job.task, self.data.info.classes)
        module = models.build(self.job.model, self.data.info, self.job.training.seed).to(self.device)
        found = FlatModel(module, task, 1, self.job.training.precision, gradients=self._how)
        if kind_of(self.device).records and self.job.cluster.graphs != "off":
            found.record_passes()
        return found

    @property
    def roles(self) -> Sequence[int]:
        """Roles of the learners."""
        return self._plan.whole.learners[: self.job.cluster.tried_bank_size]

    def sources(self, *, apart: bool, count: int | None = None) -> list[GradientSource]:
        """Returns the sources of gradients of all learners, or of some, with one model for each or for all."""
        roles = self.roles[:count]
        while apart and len(self.models) < len(roles):
            self.models.append(self._model())
        return [self._source(role, self.models[place * apart]) for place, role in enumerate(roles)]

    def _source(self, role: int, model: FlatModel) -> GradientSource:
        work = portion_of(self.job, self._plan, role).work(0)
        return GradientSource(self.job, self._plan.roles[role].index, work, model, self.training, prefetch=False)

    @cached_property
    def vectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and gradients of all learners, (m, size) float32 each."""
        weights, gradients = torch.empty(2, len(self.roles), self.models[0].size, device=self.device)
        self.models[0].read_into(weights[0])
        weights[1:] = weights[0]
        return weights, gradients

    def check_fused(self) -> None:
        """Raises ConfigError if the form is "fused", and the model or the data does not allow it."""
        model = self.models[0]
        weights = torch.empty(model.size, device=model.device)
        model.read_into(weights)
        check_fused("[cluster] bank = 'fused'", "valid for this model: loop", model, weights, self.data.info.sample)

    def check_graphs(self) -> None:
        """Raises ConfigError if the form is "graphs", and the model or the data does not allow it."""
        sources = self.sources(apart=True, count=2)
        check_apart(sources)
        check_graphs(sources[0])
        if self.job.cluster.bank == "auto" and self.drawing.in_turn:
            raise ConfigError(f"[cluster] bank = 'graphs': {self.drawing.in_turn}")

    @cached_property
    def drawing(self) -> Drawing:
        """How they draw random numbers."""
        return drawing_of(self.job, self.sources(apart=True, count=1)[0], self.training)


def _pair(weights: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weights, out


class FormTrial:
    """Gradients of all learners of a bank in one form, again and again.

    Args:
        learners: The learners.
        form: Their form.
        threads: Number of torch threads of the form, if it is not "graphs" on a CPU. None: as in this thread.
    """

    def __init__(self, learners: BankLearners, form: str, threads: int | None = None) -> None:
        self._fused = form == "fused"
        self._sources = learners.sources(apart=form == "graphs")
        model = self._sources[0].model
        self.device, self._step = model.device, 0
        self._streams: list[Stream] = [kind_of(self.device).stream(self.device)] * len(self._sources)
        if form == "graphs":
            self._streams = own_streams(learners.job, self._sources, masks=learners.drawing.masks)
        self._weights, self._outs = learners.vectors
        one = form == "graphs" and not kind_of(self.device).records
        self._threads = 1 if one else threads or torch.get_num_threads()

    def _ready(self) -> Iterator[ReadyLearner]:
        self._step += 1
        for source, *pair in zip(self._sources, self._weights, self._outs, strict=True):
            action = Compute(self._step, source.work.after(self._step), WEIGHTS, GRADIENT)
            yield ReadyLearner(source, action, partial(_pair, *pair))

    def seconds(self) -> float:
        """Computes a gradient of each learner."""
        torch.set_num_threads(self._threads)
        finish(self.device)
        began = time.perf_counter()
        if self._fused:
            bank_gradients([*self._ready()], joint=False)
        else:
            submitted = zip(self._streams, self._ready(), strict=True)
            for pending in [stream.submit(partial(_figures, each)) for stream, each in submitted]:
                pending.numbers()
        finish(self.device)
        return time.perf_counter() - began

    def close(self) -> None:
        """Ends its threads."""
        for stream in self._streams:
            stream.close()


def _figures(ready: ReadyLearner) -> tuple[Number, Number]:
    ((loss, errors, *_),) = bank_gradients([ready], joint=False)
    return loss, errors
