"""Table [simulation] of a job: durations and faults in virtual time."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rudra.job.table import Table


class Fault(Table):
    """Learner that dies or slows down in virtual time, or tree server that dies."""

    learner: int | None = Field(
        None, description="number of the learner; default, only for random times: every learner, each at its own times"
    )
    tree_server: int | None = Field(None, description="number of the tree server that dies at `dies_at_s`")
    dies_at_s: float | None = Field(None, ge=0, description="virtual time of the death")
    mean_time_to_failure_s: float | None = Field(
        None, gt=0, description="mean of the exponentially distributed time until the death"
    )
    slows_at_s: float | None = Field(None, ge=0, description="virtual time when the learner becomes slow")
    mean_time_to_slowdown_s: float | None = Field(
        None, gt=0, description="mean of the exponentially distributed times at usual speed before each slow time"
    )
    factor: float | None = Field(None, gt=0, description="factor on the compute time of the learner while it is slow")
    for_s: float | None = Field(None, gt=0, description="duration of the slow time, in seconds")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        given = [key for key in _WHEN if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no time'}; use one of {', '.join(_WHEN)}")
        (when,) = given
        if self.tree_server is not None and (when != "dies_at_s" or self.learner is not None):
            others = [when] if self.learner is None else [when, "learner"]
            raise ValueError(f"has tree_server and {' and '.join(others)}; use tree_server with only dies_at_s")
        if when in {"dies_at_s", "slows_at_s"} and self.learner is None and self.tree_server is None:
            raise ValueError(f"has {when}, but no learner; set learner")
        for key in ("factor", "for_s"):
            if (getattr(self, key) is None) is not self.deadly:
                raise ValueError(f"has {when}, and {f'{key}; remove' if self.deadly else f'no {key}; set'} {key}")
        return self

    @property
    def deadly(self) -> bool:
        """Whether the learner or tree server dies."""
        return self.dies_at_s is not None or self.mean_time_to_failure_s is not None


class LayerCost(Table):
    """Parameters, output and times of one layer of a model, as `rudra calibrate` writes them."""

    name: str = Field(description="name of the layer in the model")
    kind: Literal["convolution", "pool", "linear", "recurrent", "embedding", ""] = Field(
        "", description="kind of the layer, empty for a layer that only reshapes or scales"
    )
    parameters_bytes: int = Field(ge=0, description="bytes of the trained parameters")
    output_bytes: int = Field(ge=0, description="bytes of the output for one sample")
    forward_s: dict[int, float] = Field(description="table of μ = seconds of the forward pass of a mini-batch")
    backward_s: dict[int, float] = Field(
        description="table of μ = seconds of the backward pass of a mini-batch. The last layer includes the loss"
    )
    cut: bool = Field(True, description="whether the model can be cut after the layer")


_WHEN = ("dies_at_s", "mean_time_to_failure_s", "slows_at_s", "mean_time_to_slowdown_s")


def _dotted(entry: Any) -> Any:
    """Returns nested tables as one table with keys of the form `table.key`."""
    if not isinstance(entry, dict):
        return entry
    flat: dict[str, Any] = {}
    for table, keys in entry.items():
        table_of = isinstance(keys, dict) and "." not in table
        flat |= {f"{table}.{key}": value for key, value in keys.items()} if table_of else {table: keys}
    return flat


DEFAULTS = "defaults"
"""Name of the costs in `SimulationTable`, which a job can select although other costs were measured."""

UNMEASURED = "not measured here: run rudra calibrate"
"""Remark on times that come from the default costs."""


PER_BYTE = {"gradient_s": "gradient_s_per_byte", "update_s": "update_s_per_byte"}
"""Key in seconds, for a model of any size -> key in seconds per byte that replaces it."""


class SimulationTable(Table):
    """Durations and faults in virtual time, for `rudra simulate` and `rudra predict`."""

    decides_weights = False

    costs: str | None = Field(
        None,
        description="source of times that the job does not set: a preset (crossbow, p775, ralp, wan), a file of "
        "`rudra calibrate`, the result file of a run, or defaults. Default: measurements of `rudra calibrate` on this "
        "machine for this model, else defaults",
    )
    compute_s: float | dict[int, float] = Field(
        0.1, description="compute time of a learner for one mini-batch, in seconds: a number, or a table of μ = seconds"
    )
    bank_s: dict[int, float | dict[int, float]] = Field(
        {},
        description="table of m = seconds until each of m learners of a bank has computed a mini-batch: a number, or a "
        "table of μ = seconds. Other m are interpolated. Default: one learner after another, in m times compute_s",
    )
    layers: tuple[LayerCost, ...] = Field(
        (),
        description="list of tables: times of each layer, for `rudra place` and for gradients in buckets. Default: "
        "`rudra place` measures them",
    )
    final_at: tuple[tuple[int, float], ...] = Field(
        (),
        description="list of pairs: a number of consecutive parameters, and the fraction of a gradient's time after "
        "which their gradient is final, for gradients in buckets. Default: by the times of layers; without them, at a "
        "constant rate",
    )
    needed_at: tuple[tuple[int, float], ...] = Field(
        (),
        description="list of pairs: a number of consecutive parameters, and the fraction of a gradient's time after "
        "which its forward pass needs them, for forward passes that begin early. Default: by the times of layers; "
        "without them, at a constant rate",
    )
    forward_share: float = Field(
        1 / 3, ge=0, le=1, description="fraction of a gradient's time that its forward pass takes, with needed_at"
    )
    jitter: float = Field(0.1, ge=0, description="random variation of compute_s, as a fraction of compute_s")
    distribution: Literal["uniform", "lognormal", "exponential", "memoryless"] = Field(
        "uniform",
        description="distribution of the random variation. memoryless: exponential times with mean compute_s, without "
        "jitter",
    )
    learner_jitter: dict[int, float] = Field({}, description="learner -> jitter of the learner")
    slowdown: dict[int, float] = Field({}, description="learner -> factor on the compute time of the learner")
    straggler_probability: float = Field(
        0.0, ge=0, le=1, description="probability that a mini-batch takes straggler_factor times as long"
    )
    straggler_factor: float = Field(10.0, ge=1, description="factor on the compute time of a straggling mini-batch")
    nodes: int | dict[int, int] | None = Field(
        None,
        description="number of nodes with learners, or a table of λ = nodes. Default: one node for each rank with "
        "learners, or one node for all learners if they share weights",
    )
    servers_on_first_node: bool = Field(
        False, description="true: servers share the node of the first learners. false: servers have a separate node"
    )
    sharing: Literal["turns", "equal"] = Field(
        "turns",
        description="turns: a link carries one tensor at a time. equal: all tensors on a link share it at equal "
        "rates, like TCP streams",
    )
    machines: tuple[int, ...] = Field(
        (),
        description="machine of each node: first of the nodes with learners, then of each separate node of servers. "
        "Nodes of one machine share its link, also with background jobs. Default: each node is a machine",
    )
    background_jobs: tuple[dict[str, Any], ...] = Field(
        (),
        description="list of tables, one for each background job, with the keys that differ from this job, as "
        "`table.key = value`. Background jobs train on the same machines until this job ends",
    )
    node_slowdown: float = Field(
        0.0,
        ge=0,
        description="slowdown for each additional rank with learners on the same node, as a fraction of compute_s",
    )
    cores_per_node: int | None = Field(
        None,
        ge=1,
        description="number of cores of a node. If learners use all of them, they are delayed by servers on the node, "
        "by transfers inside the node, by transfers to and from other nodes (cpu_s_per_byte), by communication threads "
        "(communication_s), and by evaluations (evaluation_core_s). Default: no delay",
    )
    cpu_s_per_byte: float = Field(
        0.0,
        ge=0,
        description="core's time for each byte that a node sends to other nodes or receives while learners compute, "
        "in seconds. It delays learners that fill cores_per_node",
    )
    communication_s: float = Field(
        0.0,
        ge=0,
        description="core's time that the communication threads of a learner take for each mini-batch, where they work "
        "while it computes (topology adv*), in seconds. It delays learners that fill cores_per_node",
    )
    latency_s: float = Field(1e-5, ge=0, description="latency of each message between nodes, in seconds")
    latency_jitter_s: float = Field(0.0, ge=0, description="largest random delay of each message, in seconds")
    bandwidth_bytes_per_s: float = Field(
        1e10,
        gt=0,
        description="bandwidth of a node's link in each direction, for weights and gradients, in bytes per second",
    )
    local_latency_s: float | None = Field(
        None, ge=0, description="latency of each message inside a node, in seconds. Default: latency_s"
    )
    local_bandwidth_bytes_per_s: float | None = Field(
        None,
        gt=0,
        description="bandwidth of each role's messages inside a node, in bytes per second. Default: "
        "bandwidth_bytes_per_s",
    )
    blocking_servers: bool = Field(
        False,
        description="true: a server sends or receives one tensor at a time, as with blocking calls. false: one tensor "
        "in each direction",
    )
    message_s: float = Field(1e-5, ge=0, description="time of a server for one message, in seconds")
    gradient_s: float = Field(0.0, ge=0, description="time of a server to add one gradient to another, in seconds")
    gradient_s_per_byte: float | None = Field(
        None, ge=0, description="seconds for each byte of the gradient, instead of gradient_s"
    )
    update_s: float = Field(1e-4, ge=0, description="time of one update of the weights, in seconds")
    update_s_per_byte: float | None = Field(
        None, ge=0, description="seconds for each byte of the weights, instead of update_s"
    )
    copy_s_per_byte: float = Field(
        0.0, ge=0, description="seconds for each byte of weights that a server copies, for example for an evaluation"
    )
    correction_s_per_byte: float = Field(
        0.0, ge=0, description="seconds for each byte of a gradient that a correction changes"
    )
    race_slices: int = Field(
        1,
        ge=1,
        le=100_000,
        description="number of slices of each read and write of lock-free shared weights. Other workers can read and "
        "write between slices",
    )
    evaluation_s: float = Field(0.1, ge=0, description="time of one evaluation of the weights, in seconds")
    evaluation_core_s: float = Field(
        0.0,
        ge=0,
        description="core's time that one evaluation takes, in seconds. If learners fill cores_per_node, it delays "
        "them, and the evaluation takes longer than evaluation_s",
    )
    faults: tuple[Fault, ...] = Field(
        (),
        description="list of tables: learners that die or slow down, at given or random times (see the page on "
        "virtual time)",
    )
    detection_s: float = Field(
        0.1, ge=0, description="time until the other ranks detect the death of a learner, in seconds"
    )
    tensors: bool = Field(True, description="false: simulate only times, without data, gradients and evaluation")
    batching: Literal["none", "big-batch", "vmap"] = Field(
        "none",
        description="compute the gradients of several learners together: faster, but changes the last bits of results",
    )

    @field_validator("background_jobs", mode="before")
    @classmethod
    def _keys_of_tables(cls, value: Any) -> Any:
        """Restores dotted keys, because TOML reads `model.name = "lenet"` as a nested table."""
        return [_dotted(entry) for entry in value] if isinstance(value, list | tuple) else value

    @field_validator("final_at", "needed_at")
    @classmethod
    def _fractions(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        for count, at in value:
            if count < 1 or not 0 <= at <= 1:
                raise ValueError(f"has a pair [{count}, {at:g}]; use a number >= 1 and a fraction from 0 to 1")
        return value

    @field_validator("machines")
    @classmethod
    def _numbers(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value and min(value) < 0:
            raise ValueError(f"has a machine {min(value)}; use 0 or more")
        return value

    @field_validator("slowdown", "compute_s", "bank_s", "nodes", "learner_jitter")
    @classmethod
    def _positive(cls, value: Any, info: ValidationInfo) -> Any:
        least = 0 if info.field_name == "learner_jitter" else None
        of = {"compute_s": "μ =", "bank_s": "m =", "nodes": "λ ="}.get(info.field_name or "", "learner")
        entries = {"": value} if not isinstance(value, dict) else {f"of {of} {k}": v for k, v in value.items()}
        inner = {where: own for where, own in entries.items() if isinstance(own, dict)}
        if (not entries and info.field_name in {"compute_s", "nodes"}) or not all(inner.values()):
            raise ValueError("has no entry; use a number, or a table with at least one entry")
        for where, own in inner.items():
            del entries[where]
            entries |= {f"{where}, μ = {k}": v for k, v in own.items()}
        for where, number in entries.items():
            if number is not None and (number <= 0 if least is None else number < least):
                raise ValueError(f"{where} must be {'> 0' if least is None else '>= 0'}, not {number}".strip())
        return value

    @field_validator("compute_s", "bank_s", "nodes")
    @classmethod
    def _positive_keys(cls, value: Any) -> Any:
        tables = [value, *value.values()] if isinstance(value, dict) else []
        for table in tables:
            if isinstance(table, dict) and any(key < 1 for key in table):
                raise ValueError(f"has a key {min(table)}; use 1 or more")
        return value
