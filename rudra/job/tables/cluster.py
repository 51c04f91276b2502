"""Tables placement, topology, cluster and fault_tolerance: roles, resources, and reaction to failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator

from rudra.job.table import Named, Table, short
from rudra.job.tables.optimizer import OptimizerTable

LEAST_BUCKET_MB, MOST_BUCKET_MB = 0.001, 10_000.0
"""Megabytes of a bucket at least and at most."""

LARGEST_BANK = 64
"""Number of learners of a bank at most, if the run chooses it and the job has no limit."""

TRIED_BANK = 8
"""Number of learners of a bank that grows, at most, if its form is measured."""

GPU_STREAMS = 8
"""Most streams of a bank on a GPU, unless the job sets their number. Activations take memory for each of them."""

BANK_KEYS = ("learners_per_device", "most_learners_per_device", "growth", "bank", "streams")
"""Keys of `[cluster]` about banks."""

PLACEMENT_RULES = ("ralp", "auto")
"""Rules that choose the cut if the job names no layer."""


class PlacementTable(Table):
    """Placement of the last layers on a stage server. Learners hold the layers before them."""

    cut: Any = Field(
        None,
        description="first layer on the stage server: its name, or the number of layers before it. ralp or auto: this "
        "rule of `rudra place` chooses the layer before training (so no layer can have such a name). Default: "
        "learners hold all layers",
    )
    rule: Literal["merged", "synchronous"] = Field(
        "merged",
        description="merged: the stage server updates its layers at once after each mini-batch, or batch of a compute "
        "group, without staleness. synchronous: it updates them after the mini-batches of all learners, as hardsync "
        "updates the other layers",
    )
    servers: int = Field(
        1,
        ge=1,
        description="number of stage servers. Each serves a part of the learners, and all hold the same layers and "
        "make the same updates",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of the placed layers before schedule, warm-up and modulation. Default: "
        "optimizer.learning_rate",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of the placed layers. Default: optimizer.momentum, without a correction"
    )

    @field_validator("cut")
    @classmethod
    def _layer(cls, value: Any) -> Any:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
            raise ValueError(f"must be the name of a layer, or its number, not {short(value)}")
        return value

    @property
    def given(self) -> bool:
        """Whether a stage server holds some layers, or may hold some."""
        return self.cut is not None

    @property
    def by_rule(self) -> bool:
        """Whether a rule must choose the layer before training."""
        return self.cut in PLACEMENT_RULES

    def rate_factor(self, table: OptimizerTable) -> float | None:
        """Returns the learning rate of the placed layers relative to the other layers, or None for the same rate."""
        return None if self.learning_rate is None else self.learning_rate / table.learning_rate


class TopologyTable(Table):
    """Roles of the ranks, and connections between them."""

    name: Named = Field(
        "auto",
        description="base, sharded, adv, adv*, groups, replicas, hierarchical, or your own, package.module:object. "
        "auto: replicas with protocols that average replicas, else base",
    )
    options: dict[str, Any] = Field(
        {},
        description="sharded: shards, apart. adv: fan_out. adv*: fan_out, weight_fan_out, outstanding. groups: "
        "groups, reduction, server. replicas: groups, reduction, server. hierarchical: blocks, reduction. Or "
        "the options of your own topology",
    )

    def with_name(self, name: str) -> TopologyTable:
        """Returns the table with a name instead of "auto". It does not count as set: a new protocol changes it."""
        return TopologyTable.model_construct(self.model_fields_set - {"name"}, name=name, options=self.options)


class ClusterTable(Table):
    """Learners, and their threads, devices and number formats."""

    learners: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="λ: number of learners. Default: the number that the launcher's ranks can host in addition to the "
        "servers, or 4 without a launcher",
    )
    active_learners: int | tuple[int, ...] | None = Field(
        None,
        description="number of learners that take part, at most learners. The others are dormant: they compute nothing "
        "until [[changes]] raises this number, or a learner dies. With banks each rank has as many of them as any "
        "other, or one fewer. A list, only with banks, has the number of each rank with learners. Default: all "
        "learners",
    )
    learners_per_rank: int = Field(
        1,
        ge=1,
        le=100_000,
        description="largest number of learners on an MPI rank, which computes them one after another. Learners of a "
        "rank are neighbours on one node and in one compute group",
    )
    learners_per_device: int | Literal["auto"] | None = Field(
        None,
        description="m: number of learners of a bank. They share an MPI rank and its device, and each rank with "
        "learners has exactly m of them. Use it instead of learners_per_rank, which is only the largest number. auto: "
        "with protocols that average replicas synchronously, each bank begins with one active learner and grows while "
        "this makes the run faster. Default: no banks",
    )
    most_learners_per_device: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="with learners_per_device auto: number of learners of each bank, of which some may stay dormant. "
        "Default: 64, or fewer if learners are fewer or memory is short",
    )
    growth: Literal["double", "one"] = Field(
        "double",
        description='with learners_per_device = "auto": double doubles m while this brings 1.2 times the samples per '
        "second, then takes the smallest m within 10 % of the best. one adds one learner while this brings more than "
        "1.1 times as many",
    )
    bank: Literal["auto", "loop", "graphs", "fused"] = Field(
        "auto",
        description="how the learners of a bank compute. loop: one after another. graphs: at the same time, each "
        "repeats a recorded graph on a stream of a GPU, or has a thread of a CPU and one torch thread. fused: one "
        "vectorised pass computes the gradients of all learners that are ready, which changes the last bits. auto: the "
        "fastest one of these on ranks, measured before training; not fused with deterministic = true; loop in "
        "virtual time",
    )
    streams: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="s: number of learners of a bank that compute at the same time with bank = 'graphs', at most "
        "learners_per_device. Default: 8 on a GPU, threads_per_rank on a CPU",
    )
    one_rank: bool | Literal["auto"] = Field(
        "auto",
        description="true: one MPI rank hosts all roles, so they share one process and, on a GPU, one copy of the data "
        "and of CUDA. Tensors between them stay where they are computed. auto: true if `rudra run` starts the ranks, "
        "the machine has one GPU for all learners, and the job allows it",
    )
    threads_per_rank: int | None = Field(
        None,
        ge=1,
        description="number of torch threads of each learner. With bank = 'graphs' on CPUs each learner has one, and "
        "this number of learners compute at the same time. Default: cores of the node divided by its ranks with "
        "learners. If some learners compute on the CPU and others on GPUs, each GPU takes one core, and ranks on the "
        "CPU divide the others",
    )
    shares: Literal["auto"] | tuple[float, ...] = Field(
        (),
        description="for each learner, its part of a batch relative to the other learners. auto: in proportion to the "
        "speed, which is measured before training. Learners of a compute group, or all learners with hardsync, then "
        "draw adjacent parts of one stream. Default: each learner draws μ samples from its own stream",
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="device for gradients and evaluation. auto: GPUs if every learner has one, else CPUs. Runs on "
        "GPUs can be replayed only with deterministic = true",
    )
    cpu_learners: int | tuple[int, ...] = Field(
        0,
        description="with device cuda: learners that compute on the CPU although the others use GPUs. A number: the "
        "last learners of each node. A list: learners of these numbers. With shares = 'auto' each batch is divided by "
        "measured speed",
    )
    deterministic: bool = Field(
        False,
        description="true: torch uses only operations whose results are bitwise identical each time, which may be "
        "slower. A model with an operation that has no such form is refused",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="record the step of a model on a GPU as a CUDA graph, and repeat it. auto: if the model can be "
        "recorded. on: a model that cannot be recorded is refused. Results are bitwise identical with deterministic = "
        "true",
    )
    transport: Literal["auto", "ipc", "mpi", "nccl", "staged"] = Field(
        "auto",
        description="how tensors travel between ranks that compute on GPUs. ipc: ranks of one node read each other's "
        "GPU memory. mpi: a GPU-aware MPI library reads and writes GPU memory. staged: through main memory. auto: for "
        "each pair of ranks, ipc on one node if it works there, mpi between nodes if the library is GPU-aware, else "
        "staged. nccl: compute groups reduce by NCCL, which needs a GPU for each learner and adds in its own order; "
        "the rest as with auto",
    )
    gradient_format: Literal["float32", "float16"] = Field(
        "float32",
        description="number format of gradients in messages to a server. float16 halves the bytes and loses "
        "precision, sums stay float32",
    )
    node_memory: bool = Field(
        True,
        description="true: ranks of one node read gradients and weights in each other's memory. false: they use "
        "messages, for comparison. Results are bitwise identical",
    )
    buckets: Literal["auto", "off"] | float = Field(
        "auto",
        description="megabytes of a gradient or a replica that are averaged, or pushed to a server, at a time, while "
        "the rest is still computed; at least a 62nd of it. For learners on several nodes. auto: chosen at the start "
        "of the run, from the latency and the bandwidth of the network. off: all of it at once. Weights from a server "
        "come in the same way. Results are bitwise identical",
    )
    flush_denormals: bool = Field(
        True, description="treat denormal numbers as zero: faster, but changes the last bits of results"
    )

    @field_validator("active_learners", mode="before")
    @classmethod
    def _number_or_numbers(cls, value: Any) -> Any:
        numbers = value if isinstance(value, list | tuple) and value else [value]
        if value is not None and any(isinstance(one, bool) or not isinstance(one, int) for one in numbers):
            raise ValueError(f"must be a number, or a list of numbers, not {short(value)}")
        if value is not None and not 1 <= min(numbers) <= max(numbers) <= 100_000:
            raise ValueError(f"must be {'>= 1' if min(numbers) < 1 else '<= 100000'}, not {short(value)}")
        return value

    @field_validator("cpu_learners", mode="before")
    @classmethod
    def _count_or_numbers(cls, value: Any) -> Any:
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in numbers):
            raise ValueError(f"must be a number, or a list of learners' numbers, not {short(value)}")
        if min(numbers, default=0) < 0 or len({*numbers}) < len(numbers):
            raise ValueError(f"must be >= 0, or a list that names each learner once, not {short(value)}")
        return value

    @field_validator("learners_per_device", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"must be a number, or 'auto', not {short(value)}")
        if isinstance(value, int) and not 1 <= value <= 100_000:
            raise ValueError(f"must be {'>= 1' if value < 1 else '<= 100000'}, not {value}")
        return value

    @field_validator("shares", mode="before")
    @classmethod
    def _numbers_or_auto(cls, value: Any) -> Any:
        numbers = isinstance(value, Iterable) and all(isinstance(share, int | float) for share in value)
        if value != "auto" and not numbers:
            raise ValueError(f"must be a list of numbers, or 'auto', not {short(value)}")
        return value

    @field_validator("buckets", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value not in ("auto", "off") and not (number and LEAST_BUCKET_MB <= value <= MOST_BUCKET_MB):
            span = f"{LEAST_BUCKET_MB} … {MOST_BUCKET_MB:,g}"
            raise ValueError(f"must be megabytes, {span}, 'auto' or 'off', not {short(value)}")
        return value

    @property
    def active_count(self) -> int | None:
        """Number of learners that take part. None: all do, or a bank that grows begins."""
        return sum(self.active_learners) if isinstance(self.active_learners, tuple) else self.active_learners

    def on_rank(self, learners: int) -> int:
        """Returns how many learners a rank has at most, if the job has this number of learners."""
        return learners if self.one_rank is True else self.per_rank

    @property
    def per_rank(self) -> int:
        """Largest number of learners on a rank, if a rank does not host all roles."""
        return self.bank_size or self.learners_per_rank

    @property
    def grows(self) -> bool:
        """Whether the run chooses how many learners of each bank take part."""
        return self.learners_per_device == "auto"

    @property
    def bank_key(self) -> str:
        """Key and value that make banks."""
        return f"learners_per_device = {self.learners_per_device!r}"

    @property
    def bank_size(self) -> int | None:
        """Number of learners of each bank, with dormant ones. None: there are no banks."""
        if self.learners_per_device != "auto":
            return self.learners_per_device
        return self.most_learners_per_device or min(LARGEST_BANK, self.learners or LARGEST_BANK)

    @property
    def tried_bank_size(self) -> int | None:
        """Number of learners of a bank whose form is measured before training. A bank that grows is measured once."""
        return min(self.bank_size, TRIED_BANK) if self.bank_size and self.grows else self.bank_size

    @property
    def sharing(self) -> str:
        """Key and value that let several learners share a rank. Empty: each has its own."""
        if self.per_rank == 1:
            return ""
        return f"learners_per_rank = {self.per_rank}" if self.learners_per_device is None else self.bank_key

    @property
    def fused(self) -> bool:
        """Whether the learners of a bank compute in one vectorised pass. With "auto" this is not known yet."""
        return self.learners_per_device is not None and self.bank == "fused"

    @property
    def graphed(self) -> bool:
        """Whether the learners of a bank compute at the same time. With "auto" this is not known yet."""
        return self.learners_per_device is not None and self.bank == "graphs"

    def streams_of_bank(self, *, recorded: bool) -> int:
        """Returns how many learners of a bank compute at the same time in the form `graphs`.

        Args:
            recorded: Whether their device repeats recorded work, as a GPU does.
        """
        usual = GPU_STREAMS if recorded else self.threads_per_rank or 1
        return min(self.streams or usual, self.bank_size or 1)

    @property
    def torch_threads(self) -> int:
        """Number of torch threads of a gradient. The last bits depend on it."""
        return 1 if self.graphed and not self.accelerated else self.threads_per_rank or 1

    @property
    def accelerated(self) -> bool:
        """Whether learners compute on another device than the CPU. With "auto" this is not known yet."""
        return self.device not in ("cpu", "auto")

    @property
    def nccl(self) -> bool:
        """Whether compute groups reduce by NCCL."""
        return self.transport == "nccl"

    @property
    def parts(self) -> tuple[float, ...]:
        """The shares as numbers. They are equal until they are measured."""
        return (1.0,) * (self.learners or 0) if self.shares == "auto" else self.shares

    @property
    def gradient_share(self) -> float:
        """Size of a gradient in a message, as a fraction of the size of the weights."""
        return 0.5 if self.gradient_format == "float16" else 1.0


class FaultToleranceTable(Table):
    """Reaction of a run to a dead, slow or stalled rank, and to a loss that is not finite."""

    decides_weights = False

    non_finite_loss: Literal["stop", "warn"] = Field(
        "stop", description="stop the run or only warn if a loss is NaN or infinite"
    )
    restarts: int = Field(
        0,
        ge=0,
        description="number of times that `rudra run` restarts from the last checkpoint after the death of a rank that "
        "the run needs",
    )
    on_learner_loss: Literal["continue", "stop"] = Field(
        "continue",
        description="after the death of a learner's rank: continue with the other learners, or stop with a checkpoint",
    )
    straggler_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which hardsync (on base and adv) drops a learner that all others wait for; "
        "default: never",
    )
    stall_warning_s: float = Field(
        60.0,
        gt=0,
        description="seconds of waiting after which a rank reports the role and the message that it waits for",
    )
    stall_limit_s: float | None = Field(
        None,
        gt=0,
        description="seconds of waiting after which a rank or the launcher ends the run, at any time of the run; "
        "default: 300 s for the start of MPI, 30 s if a rank has died and all others wait, else no limit",
    )
