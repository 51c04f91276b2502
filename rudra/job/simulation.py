"""The table [simulation] of a job: what things cost in virtual time, and what goes wrong in it."""

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
    """A learner that dies or slows down in virtual time, or a tree server that dies."""

    learner: int | None = Field(
        None, description="number of the learner; default, at random times only: every learner, each at its own times"
    )
    tree_server: int | None = Field(None, description="number of the tree server that dies at `dies_at_s`")
    dies_at_s: float | None = Field(None, ge=0, description="virtual time of its death")
    mean_time_to_failure_s: float | None = Field(
        None, gt=0, description="mean of the exponentially distributed time until it dies"
    )
    slows_at_s: float | None = Field(None, ge=0, description="virtual time at which it becomes slow")
    mean_time_to_slowdown_s: float | None = Field(
        None, gt=0, description="mean of the exponentially distributed times at its usual pace, before each slow time"
    )
    factor: float | None = Field(None, gt=0, description="multiplies its compute time while it is slow")
    for_s: float | None = Field(None, gt=0, description="how long it stays slow")

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
        return self.dies_at_s is not None or self.mean_time_to_failure_s is not None


class LayerCost(Table):
    """What one layer of a model holds, gives and takes, as `rudra calibrate` writes it."""

    name: str = Field(description="name in the model")
    kind: Literal["convolution", "pool", "linear", "recurrent", "embedding", ""] = Field(
        "", description="what the layer is; empty for one that only shapes or scales"
    )
    parameters_bytes: int = Field(ge=0, description="bytes of the parameters that it trains")
    output_bytes: int = Field(ge=0, description="bytes that go to the next layer for one sample")
    forward_s: dict[int, float] = Field(description="table of μ = seconds of a mini-batch")
    backward_s: dict[int, float] = Field(description="table of μ = seconds of a mini-batch; the last has the loss, too")
    cut: bool = Field(True, description="whether the model can be cut behind the layer")


_WHEN = ("dies_at_s", "mean_time_to_failure_s", "slows_at_s", "mean_time_to_slowdown_s")


def _dotted(entry: Any) -> Any:
    """Tables of keys as keys with the table's name before them."""
    if not isinstance(entry, dict):
        return entry
    flat: dict[str, Any] = {}
    for table, keys in entry.items():
        table_of = isinstance(keys, dict) and "." not in table
        flat |= {f"{table}.{key}": value for key, value in keys.items()} if table_of else {table: keys}
    return flat


DEFAULTS = "defaults"
"""Names the costs that stand in `SimulationTable`, also where others were measured."""

UNMEASURED = "not measured here: run rudra calibrate"
"""What is to be said of times that come from these."""


PER_BYTE = {"gradient_s": "gradient_s_per_byte", "update_s": "update_s_per_byte"}
"""Keys that are seconds, whatever the model -> those that stand in their place."""


class SimulationTable(Table):
    """Costs and faults in virtual time, for `rudra simulate` and `rudra predict`."""

    costs: str | None = Field(
        None,
        description="where times come from that the job does not set: a preset (crossbow, p775, ralp, wan), a file of "
        "`rudra calibrate`, or defaults; default: what `rudra calibrate` measured here for this model, else defaults",
    )
    compute_s: float | dict[int, float] = Field(
        0.1, description="seconds that a learner computes one mini-batch: a number, or a table of μ = seconds"
    )
    layers: tuple[LayerCost, ...] = Field(
        (), description="list of tables: what each layer costs, for `rudra place`; default: it measures"
    )
    jitter: float = Field(0.1, ge=0, description="random variation of compute_s, as a fraction of it")
    distribution: Literal["uniform", "lognormal", "exponential", "memoryless"] = Field(
        "uniform",
        description="distribution of that variation; memoryless: exponential times with mean compute_s, jitter ignored",
    )
    learner_jitter: dict[int, float] = Field({}, description="learner -> jitter of this learner")
    slowdown: dict[int, float] = Field({}, description="learner -> factor on the compute time of this learner")
    straggler_probability: float = Field(
        0.0, ge=0, le=1, description="probability that a mini-batch takes straggler_factor times as long"
    )
    straggler_factor: float = Field(10.0, ge=1, description="factor on the compute time of such a mini-batch")
    nodes: int | dict[int, int] | None = Field(
        None,
        description="number of nodes that hold the learners, or a table of λ = nodes; default: one node for each "
        "rank with learners, or one if they share weights in a window",
    )
    servers_on_first_node: bool = Field(
        False, description="true: servers share the node of the first learners; false: they have a node of their own"
    )
    sharing: Literal["turns", "equal"] = Field(
        "turns",
        description="turns: a link carries one tensor at a time; equal: all that cross it, at equal rates, as streams "
        "of TCP do",
    )
    machines: tuple[int, ...] = Field(
        (),
        description="machine of each node: of those with learners, and then of each that servers have of their own; "
        "nodes of one machine share its link, also with jobs beside; default: each node is a machine",
    )
    beside: tuple[dict[str, Any], ...] = Field(
        (),
        description="list of tables, each of the keys in which one more job differs from this one, as `table.key = "
        "value`: it trains beside this one, on the same machines, for as long as this one does",
    )
    node_slowdown: float = Field(
        0.0,
        ge=0,
        description="slowdown of compute_s for each further rank with learners on the same node, as a fraction",
    )
    cores_per_node: int | None = Field(
        None,
        ge=1,
        description="cores of a node; where learners fill them all, a server's work on that node delays them; "
        "default: it never does",
    )
    latency_s: float = Field(1e-5, ge=0, description="seconds of latency of each message between nodes")
    latency_jitter_s: float = Field(
        0.0, ge=0, description="largest random delay that is added to each message, in seconds"
    )
    bandwidth_bytes_per_s: float = Field(
        1e10, gt=0, description="bandwidth of a node's link in each direction, for weights and gradients"
    )
    local_latency_s: float | None = Field(
        None, ge=0, description="seconds of latency of each message inside a node; default: latency_s"
    )
    local_bandwidth_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth of each role's messages inside a node; default: bandwidth_bytes_per_s"
    )
    blocking_servers: bool = Field(
        False,
        description="true: a server sends or receives one tensor at a time, as with blocking calls; false: one in "
        "each direction",
    )
    message_s: float = Field(1e-5, ge=0, description="seconds that a server spends on one message")
    gradient_s: float = Field(0.0, ge=0, description="seconds that a server needs to add one gradient to another")
    gradient_s_per_byte: float | None = Field(
        None, ge=0, description="in place of gradient_s: seconds for each byte of the gradient"
    )
    update_s: float = Field(1e-4, ge=0, description="seconds that one update of the weights takes")
    update_s_per_byte: float | None = Field(
        None, ge=0, description="in place of update_s: seconds for each byte of the weights"
    )
    copy_s_per_byte: float = Field(
        0.0, ge=0, description="seconds for each byte of weights that a server copies, such as those that are tested"
    )
    tear: int = Field(
        1,
        ge=1,
        le=100_000,
        description="slices into which reads and writes of a racing window are torn, between which other workers come",
    )
    evaluation_s: float = Field(0.1, ge=0, description="seconds that one test of the weights takes")
    faults: tuple[Fault, ...] = Field(
        (),
        description="list of tables: learners that die or slow down, at given or random times; see the page on "
        "virtual time",
    )
    detection_s: float = Field(0.1, ge=0, description="seconds until the other ranks notice that a learner has died")
    tensors: bool = Field(True, description="false: simulate times alone, without data, gradients and tests")
    batching: Literal["none", "big-batch", "vmap"] = Field(
        "none", description="compute the gradients of several learners together: faster, but changes bits"
    )

    @field_validator("beside", mode="before")
    @classmethod
    def _keys_of_tables(cls, value: Any) -> Any:
        """TOML reads `model.name = "lenet"` as a table in a table."""
        return [_dotted(entry) for entry in value] if isinstance(value, list | tuple) else value

    @field_validator("machines")
    @classmethod
    def _numbers(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value and min(value) < 0:
            raise ValueError(f"has a machine {min(value)}; use 0 or more")
        return value

    @field_validator("slowdown", "compute_s", "nodes", "learner_jitter")
    @classmethod
    def _positive(cls, value: Any, info: ValidationInfo) -> Any:
        least = 0 if info.field_name == "learner_jitter" else None
        of = {"compute_s": "μ =", "nodes": "λ ="}.get(info.field_name or "", "learner")
        entries = {"": value} if not isinstance(value, dict) else {f"of {of} {k}": v for k, v in value.items()}
        if not entries and info.field_name in {"compute_s", "nodes"}:
            raise ValueError("has no entry; use a number, or a table with at least one entry")
        for where, number in entries.items():
            if number is not None and (number <= 0 if least is None else number < least):
                raise ValueError(f"{where} must be {'> 0' if least is None else '>= 0'}, not {number}".strip())
        return value

    @field_validator("compute_s", "nodes")
    @classmethod
    def _positive_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and any(key < 1 for key in value):
            raise ValueError(f"has a key {min(value)}; use 1 or more")
        return value
