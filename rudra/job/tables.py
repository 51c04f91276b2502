"""The tables of a job, with every key, declared once: what it means, what is allowed, what it is by default.

Unknown keys are refused with the list of valid ones. Rules that span tables stand in `rudra.job.job`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
)

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
    name: Named = Field(
        "lenet",
        description="mlp, lenet, cifar10_full, alexnet, vgg16, resnet32, resnet50, lstm, or package.module:callable",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments for the model's factory")


class DataTable(Table):
    name: Any = Field(
        "digits",
        description="digits, idx, cifar10, libsvm, csv, npz, hdf5, arff, text, folder, or package.module:callable "
        "giving (train, test)",
    )
    path: Path | None = Field(
        None, description="file of the data, or directory that holds its files; relative to the working directory"
    )
    train_limit: int | None = Field(None, ge=1, description="use only the first N training samples")
    test_limit: int | None = Field(None, ge=1, description="use only the first N test samples")
    classes: int | None = Field(None, ge=2, description="number of classes, for data that does not tell it")
    scale: float | None = Field(None, gt=0, description="factor on the inputs after the mean was subtracted")
    subtract_mean: bool | None = Field(
        None,
        description="subtract the mean of all training inputs from each; default: where they are images in memory, in "
        "bytes",
    )
    standardise: bool = Field(
        False, description="give the inputs of a table the mean 0 and the deviation 1 of its training inputs"
    )
    test_split: float | None = Field(
        None, gt=0, lt=1, description="fraction of the training set that becomes the test set, where there is none"
    )
    validation_split: float | None = Field(
        None, gt=0, lt=1, description="fraction of the training set that is not learned, and tested beside the test set"
    )
    target: str | None = Field(
        None, description="which entry is the target, where your dataset's items are dictionaries"
    )
    collate: Named | None = Field(
        None, description="package.module:callable that makes a mini-batch of a list of your dataset's items"
    )
    options: dict[str, Any] = Field({}, description="of the format, or keyword arguments for the user's own callable")

    @field_validator("standardise")
    @classmethod
    def _alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (given := [key for key in ("scale", "subtract_mean") if info.data.get(key) is not None]):
            raise ValueError(f"= true gives mean and deviation; valid: false, or no {' and '.join(given)}")
        return value


class AugmentTable(Table):
    crop: int = Field(0, ge=0, lt=2**16, description="move training images by up to so many pixels, each way")
    flip: bool = Field(False, description="mirror half of the training images, left to right")
    name: Named | None = Field(
        None,
        description="package.module:callable of (inputs, torch.Generator) that gives a mini-batch's changed inputs",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments for that callable")


class TaskTable(Table):
    name: Named = Field(
        "classification",
        description="classification, multi-label, language, regression, or a loss of your own, package.module:callable",
    )
    metrics: tuple[Named, ...] = Field(
        (), description="package.module:callable of (output, target), each a mean over the samples: for every test"
    )
    options: dict[str, Any] = Field(
        {}, description="keyword arguments for the loss, such as label_smoothing and weight, see Tasks"
    )


class TrainingTable(Table):
    epochs: int = Field(10, ge=1, lt=2**31, description="passes over the training set, counted in applied samples")
    minibatch_size: int = Field(16, ge=1, lt=2**31, description="μ: samples per learner per gradient")
    seed: int = Field(0, ge=0, description="of weights, sampling, dropout and simulated time")
    warm_start: Path | None = Field(None, description="result file whose final weights to start from")
    evaluate: bool | Literal["always"] = Field(
        True,
        description="test the weights at each epoch's end, unless the test before is still under way; always: training "
        "waits for that",
    )
    evaluation_batch_size: int = Field(256, ge=1, description="samples that are tested at a time")
    compile: bool = Field(
        False, description="compute gradients by torch.compile: faster, differs in the last bits; needs a C++ compiler"
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of forward, loss and backward, by torch.autocast; weights and gradients stay float32"
    )
    target: str | None = Field(
        None, description="such as `accuracy >= 0.98`: what the median of the last tests is to reach"
    )
    target_window: int = Field(WINDOW, ge=1, description="how many tests that median is of, one for each epoch")
    stop_at_target: bool = Field(False, description="end the training with the epoch after which it is reached")

    patience: int | None = Field(
        None, ge=1, description="end the training after so many tests in a row that are no better than the best before"
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
    """Parameters that are updated otherwise than the rest.

    Attributes:
        parameters: their names, as patterns of the shell: `"*.bias"`, or a list of such.
        rate_factor: on the learning rate.
        weight_decay: in place of that of all; None: the same.
    """

    parameters: tuple[str, ...] = Field((), validate_default=True)
    rate_factor: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)

    @field_validator("parameters", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        value = (value,) if isinstance(value, str) else value
        if not value:
            raise ValueError("must be names of parameters or patterns such as '*.bias'")
        return value


class OptimizerTable(Table):
    name: str = Field("sgd", description="sgd, adagrad, adam, adamw, rmsprop: torch.optim over the flat vector")
    learning_rate: float = Field(0.01, gt=0, description="α0")
    schedule: Named = Field(
        "step",
        description="how the rate falls: step, cosine, plateau, or package.module:callable giving a torch scheduler",
    )
    milestones: tuple[int, ...] = Field(
        (), description="completed epochs after which the rate is multiplied by decay_factor"
    )
    decay_factor: float = Field(0.1, gt=0, description="of the learning rate at every milestone, or plateau")
    schedule_options: dict[str, Any] = Field(
        {}, description="keyword arguments for the torch scheduler; plateau: patience"
    )
    schedule_every: Literal["epoch", "update"] = Field(
        "epoch", description="when the torch scheduler is stepped: after each epoch or update"
    )
    warm_up: float = Field(
        0.0, ge=0, description="epochs in which the rate grows to the scheduled one, linearly with the applied samples"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd and rmsprop only")
    momentum_form: Literal["torch", "caffe"] = Field(
        "torch", description="where the rate changes: torch scales the whole velocity, caffe (the papers) what is added"
    )
    momentum_correction: Literal["none", "implicit"] = Field(
        "none",
        description="implicit: staleness g - 1 acts like momentum 1 - 1/g, so that much less is used; a heuristic",
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, as the torch.optim class applies it")
    groups: tuple[ParameterGroup, ...] = Field(
        (), description="tables of parameters, rate_factor, weight_decay: what some parameters have of their own"
    )
    clip_norm: float | None = Field(None, gt=0, description="an update's gradient with a larger norm is scaled to this")
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

    @property
    def scale_invariant(self) -> bool:
        """Whether the optimiser's step ignores the scale of its gradients."""
        return self.name in {"adagrad", "adam", "adamw", "rmsprop"}


class ProtocolTable(Table):
    name: Named = Field("softsync", description="hardsync, softsync, async, or package.module:class")
    n: int | None = Field(None, ge=1, description="softsync: the splitting parameter, 1 <= n <= learners")
    modulation: Literal["auto", "none", "sqrt", "n", "mean_staleness", "gradient_staleness"] = Field(
        "auto", description="how the protocol changes the learning rate; auto is the paper's choice"
    )
    reference_batch_size: int = Field(128, ge=1, description="B: the batch size that learning_rate was tuned for")
    options: dict[str, Any] = Field({}, description="keyword arguments for the user's own protocol")


class TopologyTable(Table):
    name: Named = Field("base", description="base, adv, adv*, groups, or package.module:object")
    options: dict[str, Any] = Field(
        {},
        description="adv, adv*: fan_out; adv*: weight_fan_out, outstanding; groups: groups, reduction, server; "
        "or the user's own",
    )


class ClusterTable(Table):
    learners: int | None = Field(
        None, ge=1, le=100_000, description="λ; without it: 4, or what the launcher's ranks leave"
    )
    threads_per_rank: int | None = Field(
        None, ge=1, description="torch threads of a learner; default: cores / learners"
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="of gradients and tests; auto: a GPU if there is one for every learner, and then no replay",
    )
    gpu_aware_mpi: bool = Field(
        False, description="MPI reads and writes learners' vectors on their GPUs; needs a library that can; not groups"
    )
    gradient_format: Literal["float32", "float16"] = Field(
        "float32",
        description="how gradients travel to servers; float16 is half as much, is added up as float32, loses bits",
    )
    flush_denormals: bool = Field(True, description="treat denormal numbers as zero: faster, changes bits")

    @property
    def gradient_share(self) -> float:
        """Size of a gradient on the wire, as a fraction of the weights' size."""
        return 0.5 if self.gradient_format == "float16" else 1.0


class FaultToleranceTable(Table):
    non_finite_loss: Literal["stop", "warn"] = Field(
        "stop", description="what a loss of NaN or infinity does to the run"
    )
    restarts: int = Field(
        0, ge=0, description="how often `rudra run` starts again from the last checkpoint when a needed rank dies"
    )
    on_learner_loss: Literal["continue", "stop"] = Field(
        "continue", description="when a learner's rank dies: go on with the others, or stop with a checkpoint"
    )
    straggler_timeout_s: float | None = Field(
        None,
        gt=0,
        description="hardsync without groups drops a learner of which nothing came for so long while all wait",
    )
    stall_warning_s: float = Field(60.0, gt=0, description="a rank that waits longer says for whom and for what")
    stall_limit_s: float | None = Field(
        None,
        gt=0,
        description="a rank that waits longer ends the run; once one has died, 30 s of waiting by all do",
    )


class ResultsTable(Table):
    minibatches: bool = Field(True, description="record the training error of every mini-batch")
    flush_s: float = Field(1.0, gt=0, description="how often rows are flushed to the file while it is written")
    swmr: Literal["auto", "on", "off"] = Field(
        "auto", description="readers may follow while the file is written; auto: not on NFS and the like"
    )
    report_s: float = Field(0.25, ge=0, description="how long learners and server gather rows before they send them")
    checkpoint_every: str = Field(
        "600 s",
        description="`N updates`, `N epochs` or `N s`: how often to write a checkpoint, beside that of the end; "
        "`never`: only if stopped",
    )

    keep_every: int | None = Field(
        None, ge=1, description="epochs: the weights of every N-th are kept in the file; default: the final ones alone"
    )

    keep_best: bool = Field(
        False, description="the weights of the epoch with the best test are kept in the file, see Weights elsewhere"
    )

    @field_validator("checkpoint_every")
    @classmethod
    def _interval(cls, value: str) -> str:
        if value != "never" and not _INTERVAL.fullmatch(value):
            raise ValueError(f"'{value}' is no interval; valid: `N updates`, `N epochs`, `N s`, `never`")
        return value

    @property
    def checkpoint_interval(self) -> tuple[int, str] | None:
        """How many updates, epochs or seconds from one checkpoint to the next; None: there are none."""
        found = _INTERVAL.fullmatch(self.checkpoint_every)
        return None if found is None else (int(found[1]), found[2])


class Hook(Table):
    """Code that is called at moments of roles (`rudra.core.hooks`)."""

    SHIPPED: ClassVar[dict[str, str]] = {name: f"rudra.results.journals:{name}" for name in ("csv", "tensorboard")}

    at: Literal["update", "epoch", "end"] = Field(description="update, epoch or end")
    call: Named = Field(description="csv, tensorboard, or package.module:callable of a rudra.Moment")
    role: str | None = Field(
        None,
        description="whose moments: a role as `rudra topology` names it, or learners, all of them; default: see Hooks",
    )
    every: int = Field(1, ge=1, description="only each Nth update or epoch")
    options: dict[str, Any] = Field({}, description="keyword arguments for the callable")

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
    """What `rudra sweep` makes of a job, and what `rudra report` draws of that. Keys of the job are dotted here."""

    title: str = Field("", description="what the report is headed with")
    figure: Literal["staleness", "test-error", "tradeoff", "speed-up", "table"] = Field(
        "table", description="what the report shows first"
    )
    grid: dict[str, list[Any]] = Field({}, description="job key -> values: every combination is a point")
    points: list[dict[str, Any]] = Field([], description="tables of job key = value: further points")
    quick: dict[str, Any] = Field({}, description="job key = value: what `--quick` changes in every point")
    quick_grid: dict[str, list[Any]] = Field({}, description="with `--quick` in place of grid, as is the next")
    quick_points: list[dict[str, Any]] = Field([], description="in place of points")
    paper: list[str] = Field([], description="tables of paper.toml, beside the job file, to compare with")

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
