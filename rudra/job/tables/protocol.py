"""When weights are updated, by what, and where they are: tables protocol, workers, weights and averaging."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocols import MODULATIONS
from protocols.hogbatch import BatchBounds
from rudra.errors import unknown
from rudra.job.table import Named, Table, short
from rudra.job.tables.optimizer import known_optimizer
from rudra.plugins import CALLABLE


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
    modulation: Literal["auto", "none", "sqrt", "n", "mean_staleness", "gradient_staleness"] | str = Field(
        "auto",
        description="rule by which the protocol changes the learning rate: none, sqrt, n, mean_staleness, "
        "gradient_staleness, or your own, package.module:class; auto: sqrt for hardsync, n for softsync and async, "
        "none for hogbatch",
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
    lr_scaling: Literal["linear", "sqrt", "none"] | None = Field(
        None,
        description="of hogbatch: linear: the learning rate is multiplied by samples of the gradient / "
        "reference_batch_size; sqrt: by the square root of that; default: linear",
    )
    options: dict[str, Any] = Field(
        {}, description="hogbatch: alpha, beta, shuffle, counts; keyword arguments of your own protocol"
    )

    @field_validator("modulation")
    @classmethod
    def _known_modulation(cls, value: str) -> str:
        valid = ("auto", *MODULATIONS)
        if value not in valid and ":" not in value:
            raise ValueError(unknown(value, (*valid, CALLABLE)))
        return value

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
    def worker(self) -> BatchBounds:
        """What the protocol is told of each of them."""
        least, most = (1, 64) if self.kind == "small" else (128, 8192)
        own = (least if self.min is None else self.min, most if self.max is None else self.max)
        return BatchBounds(self.kind, self.threads, *own)


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
        "adam, adamw, rmsprop, or your own, package.module:class; default: sgd",
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

    _known = field_validator("optimizer")(known_optimizer)

    @property
    def given(self) -> dict[str, Any]:
        """What is not left to the protocol."""
        return {key: value for key, value in self.model_dump(exclude_none=True).items() if value != {}}
