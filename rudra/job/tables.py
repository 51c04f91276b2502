"""The tables of a job, with every key, declared once: what it means, what is allowed, what it is by default.

Unknown keys are refused with the list of valid ones. Rules that span tables stand in `rudra.job.job`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from protocols.hogbatch import Worker
from rudra.errors import ConfigError, unknown
from rudra.job import renamed
from rudra.job.jobfiles import flattened
from rudra.job.table import Named, Table, short
from rudra.job.target import WINDOW, Target
from rudra.plugins import CALLABLE
from topologies import Plan

OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}
"""Name in a job -> class of torch.optim."""


_INTERVAL = re.compile(r"0*([1-9][0-9]{0,9}) *(update|epoch|s)s?")


class ModelTable(Table):
    """The network that is trained."""

    name: Named = Field(
        "lenet",
        description="shipped network (mlp, lenet, cifar10_full, alexnet, vgg16, resnet32, resnet50, lstm), or "
        "package.module:callable that returns a torch.nn.Module",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the model's factory")


class DataTable(Table):
    """Where samples come from, and how they are prepared."""

    name: Any = Field(
        "digits",
        description="reader (digits, idx, cifar10, libsvm, csv, npz, hdf5, arff, text, folder), or "
        "package.module:callable that returns (train, test)",
    )
    path: Path | None = Field(
        None, description="data file, or directory of the data files; relative to the working directory"
    )
    train_limit: int | None = Field(None, ge=1, description="use only the first N training samples")
    test_limit: int | None = Field(None, ge=1, description="use only the first N test samples")
    classes: int | None = Field(None, ge=2, description="number of classes, where the data does not say it")
    scale: float | None = Field(
        None, gt=0, description="factor that multiplies the inputs, after the mean is subtracted"
    )
    subtract_mean: bool | None = Field(
        None,
        description="subtract the mean of all training inputs from every input; default: true for images that are "
        "held in memory as bytes, else false",
    )
    standardise: bool = Field(
        False,
        description="shift and scale each column of a table, so that its training inputs have mean 0 and standard "
        "deviation 1",
    )
    sparse: bool | Literal["auto"] = Field(
        False,
        description="inputs of which most is 0 stay sparse up to the model's first layer, as those of libsvm and arff "
        "can; auto: if at most a tenth of them is stored",
    )
    test_split: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of the training set that becomes the test set, if the data has no test set",
    )
    validation_split: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of the training set that is held out: no gradient uses it, and every test of the "
        "weights also measures it",
    )
    target: str | None = Field(
        None, description="entry that holds the target, if the items of your dataset are dictionaries"
    )
    collate: Named | None = Field(
        None,
        description="package.module:callable that makes a mini-batch from a list of your dataset's items, like a "
        "DataLoader's collate_fn",
    )
    options: dict[str, Any] = Field({}, description="options of the reader, or keyword arguments of your callable")

    @field_validator("standardise")
    @classmethod
    def _alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (given := [key for key in ("scale", "subtract_mean") if info.data.get(key) is not None]):
            raise ValueError(f"= true gives mean and deviation; valid: false, or no {' and '.join(given)}")
        return value


class AugmentTable(Table):
    """Random changes of training inputs, which a replay repeats."""

    crop: int = Field(
        0, ge=0, lt=2**16, description="shift each training image by up to this many pixels in each direction"
    )
    flip: bool = Field(False, description="mirror each training image left to right with probability 1/2")
    name: Named | None = Field(
        None,
        description="package.module:callable of (inputs, torch.Generator) that returns the changed inputs of a "
        "mini-batch",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of that callable")


class TaskTable(Table):
    """The loss, and the metrics that every test measures."""

    name: Named = Field(
        "classification",
        description="classification, multi-label, language, regression, or your own loss, package.module:callable",
    )
    metrics: tuple[Named, ...] = Field(
        (),
        description="further metrics to measure at every test: package.module:callable of (output, target) that "
        "returns a mean over the samples",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the loss, such as label_smoothing and weight")


class TrainingTable(Table):
    """How long training lasts, how large mini-batches are, and when the weights are tested."""

    epochs: int = Field(
        10,
        ge=1,
        lt=2**31,
        description="passes over the training set; an epoch ends when applied gradients have used as many samples as "
        "the set has",
    )
    minibatch_size: int = Field(16, ge=1, lt=2**31, description="μ: number of samples in each gradient of each learner")
    seed: int = Field(0, ge=0, description="seed of initial weights, sampling, dropout and simulated times")
    warm_start: Path | None = Field(
        None, description="result file or checkpoint whose weights become the initial weights"
    )
    evaluate: bool | Literal["always"] = Field(
        True,
        description="true: test the weights at the end of each epoch, unless the previous test is still running; "
        "always: training waits until that test has ended; false: no tests",
    )
    evaluation_batch_size: int = Field(256, ge=1, description="number of samples that a test computes at a time")
    compile: bool = Field(
        False,
        description="compute gradients with torch.compile: faster, but the last bits differ; needs a C++ compiler",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="number format of forward pass, loss and backward pass, by torch.autocast; weights and gradients "
        "stay float32",
    )
    target: str | None = Field(
        None,
        description="goal of the training, such as `accuracy >= 0.98`; it is reached when the median of the last "
        "tests meets it",
    )
    target_window: int = Field(
        WINDOW, ge=1, description="number of tests, one an epoch, in the median that target looks at"
    )
    stop_at_target: bool = Field(False, description="end the training with the epoch in which target is reached")

    patience: int | None = Field(
        None, ge=1, description="end the training after this many tests in a row without a new best result"
    )

    @field_validator("target")
    @classmethod
    def _target(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                Target.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value


class ParameterGroup(Table):
    """Parameters with a learning rate or weight decay of their own."""

    parameters: tuple[str, ...] = Field(
        (), validate_default=True, description="names of parameters, or patterns such as `*.bias`: one or a list"
    )
    rate_factor: float = Field(1.0, ge=0, description="multiplies the learning rate of these parameters")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay of these parameters; default: that of all others"
    )

    @field_validator("parameters", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        value = (value,) if isinstance(value, str) else value
        if not value:
            raise ValueError("must be names of parameters or patterns such as '*.bias'")
        return value


class OptimizerTable(Table):
    """The update rule and its learning rate."""

    name: str = Field(
        "sgd",
        description="sgd, adagrad, adam, adamw or rmsprop: the torch.optim class that updates the flat weight vector",
    )
    learning_rate: float = Field(0.01, gt=0, description="α0: learning rate before schedule, warm-up and modulation")
    schedule: Named = Field(
        "step",
        description="how the learning rate falls: step, cosine, plateau, or package.module:callable that returns a "
        "torch scheduler",
    )
    milestones: tuple[int, ...] = Field(
        (), description="epochs after which step multiplies the learning rate by decay_factor"
    )
    decay_factor: float = Field(
        0.1, gt=0, description="factor on the learning rate at each milestone of step, or at each plateau"
    )
    schedule_options: dict[str, Any] = Field(
        {}, description="keyword arguments of the torch scheduler; for plateau: patience, in tests"
    )
    schedule_every: Literal["epoch", "update"] = Field(
        "epoch", description="how often the torch scheduler steps: once an epoch or once an update"
    )
    warm_up: float = Field(
        0.0,
        ge=0,
        description="number of epochs during which the learning rate grows from 0 to its scheduled value, linearly "
        "in applied samples",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum; for sgd and rmsprop only")
    momentum_form: Literal["torch", "caffe"] = Field(
        "torch",
        description="what a change of the learning rate scales: the whole velocity (torch), or only new gradients "
        "(caffe, as in the papers)",
    )
    momentum_correction: Literal["none", "implicit"] = Field(
        "none",
        description="implicit: subtract the momentum that asynchrony acts like, 1 - 1/g with g = mean staleness + 1; "
        "a rule of thumb",
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, applied the way the torch.optim class applies it")
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="tables with parameters (names or patterns), rate_factor and weight_decay, for parameters that "
        "need other settings",
    )
    clip_norm: float | None = Field(
        None, gt=0, description="largest norm of an update's gradient; a longer gradient is scaled down to it"
    )
    options: dict[str, Any] = Field({}, description="further keyword arguments of the torch.optim class")

    @field_validator("name", mode="before")
    @classmethod
    def _in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(unknown(value, OPTIMIZERS))
        return value

    @field_validator("momentum_form")
    @classmethod
    def _of_sgd(cls, value: str, info: ValidationInfo) -> str:
        if value != "torch" and (name := info.data.get("name", "sgd")) != "sgd":
            raise ValueError(f"'{value}' is for sgd only, not {name}")
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: Named) -> Named:
        shipped = ("step", "cosine", "plateau")
        if isinstance(value, str) and value not in shipped and ":" not in value:
            raise ValueError(unknown(value, (*shipped, CALLABLE)))
        return value

    @field_validator("milestones")
    @classmethod
    def _ascending(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if any(m < 1 for m in value) or list(value) != sorted(set(value)):
            raise ValueError(f"must be ascending epochs, each >= 1, not {list(value)}")
        if value and (schedule := info.data.get("schedule", "step")) != "step":
            raise ValueError(f"are those of schedule 'step', not of {short(schedule)}")
        return value

    @field_validator("schedule_options")
    @classmethod
    def _of_torch(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("schedule") == "step":
            raise ValueError("are for other schedules than 'step', which has milestones and decay_factor")
        if info.data.get("schedule") == "plateau":
            if unknown := [key for key in value if key != "patience"]:
                raise ValueError(f"unknown option '{unknown[0]}' of schedule 'plateau'; valid: patience")
            patience = value.get("patience", 1)
            if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
                raise ValueError(f"patience must be a whole number >= 1, not {short(patience)}")
        return value

    @property
    def plateau(self) -> int | None:
        """Tests without progress after which the rate is lowered; None: it does not go by tests."""
        return self.schedule_options.get("patience", 10) if self.schedule == "plateau" else None

    @field_validator("schedule_every")
    @classmethod
    def _steps(cls, value: str, info: ValidationInfo) -> str:
        if value == "update" and (schedule := info.data.get("schedule")) in ("step", "plateau"):
            raise ValueError(f"'update' is for other schedules than '{schedule}', which goes by epochs")
        return value

    @field_validator("warm_up")
    @classmethod
    def _of_epochs(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("schedule_every") == "update":
            raise ValueError(f"= {value:g} is for schedules that are stepped after epochs, not updates; valid: 0")
        return value

    def groups_of(self, names: Iterable[str]) -> tuple[ParameterGroup, ...]:
        """The groups as far as they are of these parameters."""
        known = tuple(names)
        here = [tuple(p for p in group.parameters if fnmatch.filter(known, p)) for group in self.groups]
        pairs = zip(self.groups, here, strict=True)
        return tuple(group.model_copy(update={"parameters": mine}) for group, mine in pairs if mine)

    @property
    def scale_invariant(self) -> bool:
        """Whether the optimiser's step ignores the scale of its gradients."""
        return self.name in {"adagrad", "adam", "adamw", "rmsprop"}


class ProtocolTable(Table):
    """Which gradients make an update, and how the protocol changes the learning rate."""

    name: Named = Field(
        "softsync",
        description="hardsync, softsync, async; hogbatch, which deals samples out to unlike workers; average, diloco, "
        "easgd, sma, with which learners average replicas; or your own, package.module:class",
    )
    n: int | None = Field(
        None,
        ge=1,
        description="splitting parameter of softsync, 1 <= n <= learners: c = floor(learners / n) gradients make an "
        "update",
    )
    modulation: Literal["auto", "none", "sqrt", "n", "mean_staleness", "gradient_staleness"] = Field(
        "auto",
        description="rule by which the protocol changes the learning rate; auto: sqrt for hardsync, n for softsync "
        "and async, none for hogbatch",
    )
    reference_batch_size: int = Field(
        128,
        ge=1,
        description="B: batch size that learning_rate was tuned for; sqrt compares it with learners times "
        "minibatch_size",
    )
    rule: Literal["fixed", "adaptive", "balanced"] | None = Field(
        None,
        description="of hogbatch: how many samples a worker gets next: fixed, adaptive (Algorithm 2) or balanced, "
        "which changes the batches of large workers last; default: fixed",
    )
    lr_scaling: Literal["linear", "none"] | None = Field(
        None,
        description="of hogbatch: linear: the learning rate is multiplied by samples of the gradient / "
        "reference_batch_size; default: linear",
    )
    options: dict[str, Any] = Field(
        {}, description="hogbatch: alpha, beta, shuffle, counts; keyword arguments of your own protocol"
    )

    @property
    def of_hogbatch(self) -> dict[str, Any]:
        """Keys that only hogbatch has, as far as they are given."""
        return {key: value for key in ("rule", "lr_scaling") if (value := getattr(self, key)) is not None}


class WorkersTable(Table):
    """Learners of one kind, to which protocol hogbatch deals samples out; there may be several such tables."""

    ranks: tuple[int, ...] | None = Field(
        None, description="numbers of the learners, from 0; default: all that no other table names"
    )
    kind: Literal["small", "large"] = Field(
        description="small: a batch is computed in as many parts as there are threads, each of which is an update; "
        "large: a batch is one gradient"
    )
    threads: int = Field(
        1, ge=1, le=100_000, description="parts of a small worker's batch, computed one after another on real ranks"
    )
    device: Literal["cpu"] | None = Field(
        None, description="cpu: they compute there, where others have GPUs; default: cluster.device"
    )
    min: int | None = Field(
        None, ge=1, lt=2**31, description="smallest batch, in samples for each thread; default: small 1, large 128"
    )
    max: int | None = Field(
        None, ge=1, lt=2**31, description="largest batch, in samples for each thread; default: small 64, large 8192"
    )
    compute_s: float | dict[int, float] | None = Field(
        None,
        description="in virtual time, seconds in which one thread computes a part: a number, or sizes and seconds as "
        "in simulation.compute_s; default: simulation.compute_s",
    )

    @field_validator("compute_s")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        points = value if isinstance(value, dict) else {1: value}
        if value is not None and not (points and all(size >= 1 and s > 0 for size, s in points.items())):
            raise ValueError(f"must be seconds > 0, or a table of sizes >= 1 and such seconds, not {short(value)}")
        return value

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.kind == "large" and self.threads > 1:
            raise ValueError(f"threads = {self.threads}: a batch of a large worker is one gradient; valid: 1")
        if self.worker.least > self.worker.most:
            raise ValueError(f"min = {self.worker.least} is more than max = {self.worker.most}")
        return self

    @property
    def worker(self) -> Worker:
        """What the protocol is told of each of them."""
        least, most = (1, 64) if self.kind == "small" else (128, 8192)
        own = (least if self.min is None else self.min, most if self.max is None else self.max)
        return Worker(self.kind, self.threads, *own)


class WeightsTable(Table):
    """Where the weights are that workers update, to which protocol hogbatch deals samples out."""

    at: Literal["server", "window"] = Field(
        "server",
        description="server: workers push gradients to the coordinator; window: the ranks of one node share memory "
        "with the weights, and bring their gradients into it themselves",
    )
    update: Literal["racing", "locked"] = Field(
        "racing",
        description="how workers write to a window: racing: in place and without a lock, as in Hogwild; locked: one "
        "after the other, each making a new generation of the weights",
    )
    push: Literal["gradient", "overwrite"] = Field(
        "gradient",
        description="what large workers do in a window: gradient: they bring it into the weights as they are by then; "
        "overwrite: the weights become their updated copy, and what others did meanwhile is lost",
    )


def kinds_of(value: Any) -> str | None:
    """`small+large`, for people, of a list of tables `[[workers]]`; None: it is none."""
    if not (isinstance(value, list) and value and all(isinstance(table, dict) and "kind" in table for table in value)):
        return None
    return "+".join(str(table["kind"]) for table in value)


class AveragingTable(Table):
    """How learners average replicas of their own; keys that are left out are as the protocol has them."""

    period: int | None = Field(
        None,
        ge=1,
        lt=2**20,
        description="τ: number of mini-batches of each learner from one average to the next; default: 1, diloco 50",
    )
    elasticity: float | None = Field(
        None,
        ge=0,
        description="α: part of the way to the weights that a replica goes at each average; default: 1; easgd and sma: "
        "1 / learners, or 1 / (learners + 1) where there is no outer momentum",
    )
    optimizer: str | None = Field(
        None,
        description="outer optimiser, which updates the weights by the mean difference of all replicas: sgd, adagrad, "
        "adam, adamw, rmsprop; default: sgd",
    )
    learning_rate: float | None = Field(
        None,
        ge=0,
        description="learning rate of the outer optimiser; default: average 1, diloco 0.7; easgd and sma: elasticity "
        "times learners",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of the outer optimiser; default: 0, diloco and sma 0.9"
    )
    options: dict[str, Any] = Field(
        {},
        description="further keyword arguments of the outer optimiser's torch.optim class; default: none, diloco "
        "nesterov = true",
    )
    restart: bool | None = Field(
        None,
        description="let all replicas go on from the weights, without momentum, each time the learning rate drops "
        "(schedules step and plateau); default: false, sma true",
    )
    keeps_momentum: bool | None = Field(
        None, description="let replicas keep the momentum of their own optimiser at a restart; default: false"
    )
    local_elasticity: float | None = Field(
        None,
        ge=0,
        description="part of the way to the reference of its block that a replica goes in every mini-batch, with "
        "topology hierarchical, where elasticity is that of references; default: 1 / (learners of the block + 1)",
    )

    @field_validator("optimizer")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in OPTIMIZERS:
            raise ValueError(unknown(value, OPTIMIZERS))
        return value

    @property
    def given(self) -> dict[str, Any]:
        """What is not left to the protocol."""
        return {key: value for key, value in self.model_dump(exclude_none=True).items() if value != {}}


PLACEMENT_RULES = ("ralp", "auto")
"""By which a layer is chosen, where a job names none."""


class PlacementTable(Table):
    """Which layers a stage server has, and how it updates them; learners have those before."""

    cut: Any = Field(
        None,
        description="first layer that the stage server has: its name, or how many layers there are before it; ralp or "
        "auto: chosen before training by that rule of `rudra place` (so no layer can be named so); default: learners "
        "have all layers",
    )
    rule: Literal["merged", "synchronous"] = Field(
        "merged",
        description="merged: the stage server updates its layers by each mini-batch, or compute group's batch, at "
        "once, without staleness; synchronous: by those of all learners together, as hardsync does with the other "
        "layers",
    )
    servers: int = Field(
        1,
        ge=1,
        description="stage servers, among which learners are divided; all have the same layers, and update them alike",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of its layers before schedule, warm-up and modulation; default: "
        "optimizer.learning_rate",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of its layers; default: optimizer.momentum, without a correction"
    )

    @field_validator("cut")
    @classmethod
    def _layer(cls, value: Any) -> Any:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
            raise ValueError(f"must be the name of a layer, or its number, not {short(value)}")
        return value

    @property
    def given(self) -> bool:
        """Whether some layers are with a stage server, or may be."""
        return self.cut is not None

    @property
    def by_rule(self) -> bool:
        """Whether a rule is still to choose the layer."""
        return self.cut in PLACEMENT_RULES

    def rate_factor(self, table: OptimizerTable) -> float | None:
        """By how much its learning rate differs from that of the other layers; None: by nothing."""
        return None if self.learning_rate is None else self.learning_rate / table.learning_rate


class TopologyTable(Table):
    """Which rank has which role, and which ranks exchange messages."""

    name: Named = Field(
        "base",
        description="base, sharded, adv, adv*, groups, replicas, hierarchical, or your own, package.module:object",
    )
    options: dict[str, Any] = Field(
        {},
        description="sharded: shards; adv: fan_out; adv*: fan_out, weight_fan_out, outstanding; groups: groups, "
        "reduction, server; replicas: groups, reduction, server; hierarchical: blocks, reduction; or those of your "
        "own topology",
    )


class ClusterTable(Table):
    """Learners, and what each of them may use: threads, devices, formats."""

    learners: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="λ: number of learners; default: as many as the launcher's ranks can host beside the servers, or 4 "
        "without a launcher",
    )
    learners_per_rank: int = Field(
        1,
        ge=1,
        le=100_000,
        description="most learners that share an MPI rank, on which they compute one after another; those of a rank "
        "are neighbours on one node and in one compute group",
    )
    threads_per_rank: int | None = Field(
        None,
        ge=1,
        description="torch threads of each learner; default: cores of the node divided by its ranks with learners",
    )
    shares: Literal["auto"] | tuple[float, ...] = Field(
        (),
        description="for each learner, how much of a batch it takes compared with the others, or auto: in proportion "
        "to speed, which is measured before training; those of a compute group, or all with hardsync, then draw "
        "adjacent parts of one stream; default: μ each, of streams of their own",
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="device that computes gradients and tests; auto: GPUs if every learner has one, else CPUs; runs "
        "on GPUs cannot be replayed",
    )
    gpu_aware_mpi: bool = Field(
        False,
        description="let MPI read and write the learners' vectors on their GPUs; needs an MPI library that can, and "
        "no compute groups",
    )
    gradient_format: Literal["float32", "float16"] = Field(
        "float32",
        description="number format of gradients on their way to a server; float16 halves the bytes and loses bits, "
        "sums stay float32",
    )
    node_memory: bool = Field(
        True,
        description="ranks of one node read gradients and weights in each other's memory; false: by messages, for "
        "comparison; the same bits",
    )
    flush_denormals: bool = Field(True, description="treat denormal numbers as zero: faster, but changes bits")

    @field_validator("shares", mode="before")
    @classmethod
    def _numbers_or_auto(cls, value: Any) -> Any:
        numbers = isinstance(value, Iterable) and all(isinstance(share, int | float) for share in value)
        if value != "auto" and not numbers:
            raise ValueError(f"must be a list of numbers, or 'auto', not {short(value)}")
        return value

    @property
    def parts(self) -> tuple[float, ...]:
        """The shares as numbers, which are equal as long as they are still to be measured."""
        return (1.0,) * (self.learners or 0) if self.shares == "auto" else self.shares

    @property
    def gradient_share(self) -> float:
        """Size of a gradient on the wire, as a fraction of the weights' size."""
        return 0.5 if self.gradient_format == "float16" else 1.0


class FaultToleranceTable(Table):
    """What a run does about a dead, slow or stalled rank, and about a loss that is not finite."""

    non_finite_loss: Literal["stop", "warn"] = Field(
        "stop", description="stop the run, or only warn, when a loss is NaN or infinite"
    )
    restarts: int = Field(
        0,
        ge=0,
        description="how many times `rudra run` starts again from the last checkpoint after a rank that the run "
        "needs has died",
    )
    on_learner_loss: Literal["continue", "stop"] = Field(
        "continue",
        description="after a learner's rank died: continue with the other learners, or stop with a checkpoint",
    )
    straggler_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which hardsync (on base and adv) drops a learner that all others wait for; "
        "default: never",
    )
    stall_warning_s: float = Field(
        60.0, gt=0, description="seconds of waiting after which a rank reports for whom and for what it waits"
    )
    stall_limit_s: float | None = Field(
        None,
        gt=0,
        description="seconds of waiting after which a rank ends the run; default: no limit, but 30 s once a rank has "
        "died and all others wait",
    )


class ResultsTable(Table):
    """What the result file records, and how often a checkpoint is written."""

    minibatches: bool = Field(True, description="record loss, error and times of every mini-batch")
    flush_s: float = Field(1.0, gt=0, description="seconds between flushes of the result file during the run")
    swmr: Literal["auto", "on", "off"] = Field(
        "auto",
        description="let readers open the result file during the run (HDF5's single-writer mode); auto: unless the "
        "file is on NFS or the like",
    )
    report_s: float = Field(
        0.25,
        ge=0,
        description="seconds for which learners and servers gather rows before they send them to the statistics server",
    )
    checkpoint_every: str = Field(
        "600 s",
        description="how often to write a checkpoint: `N updates`, `N epochs` or `N s`, and once more at the end; "
        "`never`: only when the run is stopped",
    )

    keep_checkpoints: str = Field(
        "never",
        description="how often to keep a checkpoint beside the result file, with which other runs can begin: "
        "`N epochs` or `N updates`; training waits where one before it is still being written; default: never",
    )

    keep_every: int | None = Field(
        None,
        ge=1,
        description="keep the weights of every Nth epoch in the result file; default: only the final weights",
    )

    keep_best: bool = Field(False, description="keep the weights of the epoch with the best test in the result file")

    @field_validator("checkpoint_every")
    @classmethod
    def _interval(cls, value: str) -> str:
        if value != "never" and not _INTERVAL.fullmatch(value):
            raise ValueError(f"'{value}' is not an interval; valid: `N updates`, `N epochs`, `N s`, `never`")
        return value

    @field_validator("keep_checkpoints")
    @classmethod
    def _kept(cls, value: str) -> str:
        found = _INTERVAL.fullmatch(value)
        if value != "never" and (found is None or found[2] == "s"):
            raise ValueError(f"'{value}' is no number of epochs; valid: `N epochs`, `N updates`, `never`")
        return value

    @property
    def kept_interval(self) -> tuple[int, str] | None:
        """How many updates or epochs from one checkpoint that is kept to the next; None: none is."""
        found = _INTERVAL.fullmatch(self.keep_checkpoints)
        return None if found is None else (int(found[1]), found[2])

    @property
    def checkpoint_interval(self) -> tuple[int, str] | None:
        """How many updates, epochs or seconds from one checkpoint to the next; None: there are none."""
        found = _INTERVAL.fullmatch(self.checkpoint_every)
        return None if found is None else (int(found[1]), found[2])


class Hook(Table):
    """Your own code, which a role calls at its updates, at epochs or at the end (`rudra.core.hooks`)."""

    SHIPPED: ClassVar[dict[str, str]] = {name: f"rudra.results.journals:{name}" for name in ("csv", "tensorboard")}

    at: Literal["update", "epoch", "end"] = Field(description="moment of the call: update, epoch or end")
    call: Named = Field(description="csv, tensorboard, or package.module:callable that takes a rudra.Moment")
    role: str | None = Field(
        None,
        description="role whose moments count, named as `rudra topology` prints it, or learners for all learners; "
        "default: the parameter server for update, else the statistics server",
    )
    every: int = Field(1, ge=1, description="call at every Nth update or epoch")
    options: dict[str, Any] = Field({}, description="keyword arguments of the callable")

    @field_validator("call")
    @classmethod
    def _callable(cls, value: Named) -> Named:
        if isinstance(value, str) and value in renamed.HOOKS:
            raise ValueError(f"{value} is now {renamed.HOOKS[value]}")
        if isinstance(value, str) and ":" not in value and value not in cls.SHIPPED:
            raise ValueError(unknown(value, [*cls.SHIPPED, CALLABLE]))
        return value

    @field_validator("every")
    @classmethod
    def _counts(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("at") == "end":
            raise ValueError("counts updates and epochs, and a run has one end")
        return value

    def roles(self, plan: Plan) -> tuple[int, ...]:
        """Ids of the roles that call it.

        Raises:
            ValueError: there are no such roles, or not with such moments.
        """
        learners = (plan.server, *(i for i in plan.learners if i != plan.server))
        able = {"update": learners, "epoch": (plan.statistics,), "end": tuple(range(len(plan.roles)))}[self.at]
        if self.role is None:
            return (plan.server if self.at == "update" else plan.statistics,)
        if self.role == "learners" and self.at != "epoch":
            return plan.learners
        found = tuple(i for i in able if plan.roles[i].name == self.role)
        if not found:
            kinds: dict[str, list[str]] = {}
            for i in able:
                kinds.setdefault(plan.roles[i].kind, []).append(plan.roles[i].name)
            valid = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in kinds.values()]
            valid += ["learners"] if set(able) & set(plan.learners) else []
            raise ValueError(f"'{self.role}' has no moment '{self.at}'; valid: {', '.join(valid)}")
        return found


class StudyTable(Table):
    """The variants of the job that `rudra sweep` runs, and the figure that `rudra report` draws of them."""

    title: str = Field("", description="heading of the report")
    figure: Literal["staleness", "test-error", "target", "tradeoff", "speed-up", "penalties", "workers", "table"] = (
        Field("table", description="figure that the report shows first")
    )
    grid: dict[str, list[Any]] = Field({}, description="job key -> list of values; the study runs every combination")
    points: list[dict[str, Any]] = Field([], description="tables of job key = value; each is one more run")
    quick: dict[str, Any] = Field({}, description="job key = value: changes to every run under `--quick`")
    quick_grid: dict[str, list[Any]] = Field({}, description="grid that `--quick` uses in place of grid")
    quick_points: list[dict[str, Any]] = Field([], description="points that `--quick` uses in place of points")
    paper: list[str] = Field(
        [], description="names of tables in paper.toml, beside the job file, to print beside the results"
    )

    @field_validator("grid", "points", "quick", "quick_grid", "quick_points", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        """TOML reads `protocol.n = 4` as a table in a table."""
        return [flattened(entry) for entry in value] if isinstance(value, list) else flattened(value)

    @field_validator("grid", "quick_grid")
    @classmethod
    def _different(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in value.items():
            if not values or any(v in values[:i] for i, v in enumerate(values)):
                raise ValueError(f"{key} must have one or more values, each once, not {short(values)}")
        return value
