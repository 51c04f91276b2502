"""Who computes what where, and what happens when somebody fails: placement, topology, cluster, fault_tolerance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator

from rudra.job.table import Named, Table, short
from rudra.job.tables.optimizer import OptimizerTable

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
        "auto",
        description="base, sharded, adv, adv*, groups, replicas, hierarchical, or your own, package.module:object; "
        "auto: replicas with protocols by which learners average, else base",
    )
    options: dict[str, Any] = Field(
        {},
        description="sharded: shards, apart; adv: fan_out; adv*: fan_out, weight_fan_out, outstanding; groups: groups, "
        "reduction, server; replicas: groups, reduction, server; hierarchical: blocks, reduction; or those of your "
        "own topology",
    )

    def with_name(self, name: str) -> TopologyTable:
        """The table with the name that "auto" stands for. It does not count as set: a changed protocol changes it."""
        return TopologyTable.model_construct(self.model_fields_set - {"name"}, name=name, options=self.options)


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
        description="seconds of waiting after which a rank, or the launcher, ends the run, from the start to the end; "
        "default: no limit, but 300 s for the start of MPI, and 30 s once a rank has died and all others wait",
    )
