"""Choice of the best cut of a job's model between its learners and a stage server."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rudra.benchmark_report import Report
from rudra.core.placement import THRESHOLD, CutEstimate, Layer, PlacementDecision, PlacementHardware, Rule, choose
from rudra.job.job import Job
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.prepare.cut import buckets_of, cluster_of, copies_by_group, known
from rudra.prepare.profile import profile

RULES: tuple[Rule, ...] = ("ralp", "auto")


@dataclass(frozen=True, slots=True)
class Placement:
    """Decisions of both rules.

    Attributes:
        name: name of the job.
        layers: layers of its model.
        cluster: nodes and links of the job.
        threshold: threshold of the skewness.
        decisions: decisions by rule.
    """

    name: str
    layers: tuple[Layer, ...]
    cluster: PlacementHardware
    threshold: float
    decisions: Mapping[Rule, PlacementDecision]

    def as_dict(self) -> dict[str, Any]:
        """Returns the placement as plain values."""
        chosen = {rule: {"cut": d.cut and d.cut.name, "why": d.why} for rule, d in self.decisions.items()}
        about = asdict(self.decisions["ralp"])
        about = {key: value for key, value in about.items() if key not in {"cut", "why"}}
        layers = [asdict(layer) for layer in self.layers]
        return {"job": self.name, **asdict(self.cluster), "layers": layers, **about, "chosen": chosen}


def place(
    job: Job, *, threshold: float = THRESHOLD, back_speed: float = 1.0, seconds: float | None = None
) -> Placement:
    """Applies both rules to a job's model. Measures its layers if the job's costs do not include them.

    Args:
        job: job whose link and latency are in `[simulation]`.
        threshold: largest skewness for a cut by "ralp".
        back_speed: speed of the stage server relative to a learner.
        seconds: how long steps are timed.

    Raises:
        RudraError: a mistake in the job, or its model is no chain of layers.
    """
    job = cost_files.load(job.resolved(cores=cores()))
    table = job.simulation
    layers = known(table, job.training.minibatch_size) or profile(job, seconds=seconds).with_loss
    cluster, buckets = cluster_of(job, table, back_speed), buckets_of(job)
    copies = copies_by_group(job)
    decisions = {rule: choose(rule, layers, cluster, threshold, buckets=buckets, copies=copies) for rule in RULES}
    return Placement(job.name, layers, cluster, threshold, decisions)


def as_text(found: Placement) -> str:
    """Returns a table of the cuts, and the decisions with their reasons."""
    cluster, about = found.cluster, found.decisions["ralp"]
    rate = f"{cluster.bytes_per_s:.3g} B/s, {cluster.latency_s * 1e6:.3g} µs"
    head = f"{found.name}: λ = {cluster.learners}, μ = {cluster.minibatch_size}, link of the server {rate}"
    report = Report(["first layer of the back", "front, kB", "activations, kB", "tensors a step, MB", "step, ms", ""])
    for cut in about.cuts:
        sizes = [f"{size / 1e3:,.1f}" for size in (cut.front_bytes, cut.activations_bytes)]
        sizes.append(f"{cut.placed_bytes / 1e6:,.2f}")
        report.rows.append((cut.name, *sizes, f"{cut.step_s * 1e3:.3g}", _said(found, cut)))
    for name, size, seconds in (
        ("(parameter server)", about.server_bytes, about.server_s),
        ("(allreduce)", about.allreduce_bytes, about.allreduce_s),
    ):
        report.rows.append((name, "", "", f"{size / 1e6:,.2f}", f"{seconds * 1e3:.3g}", ""))
    report.notes = [f"Skewness of the parameters {about.skewness:.2f}; threshold {found.threshold:g}."]
    for rule, decision in found.decisions.items():
        where = "no cut" if decision.cut is None else f"cut = {decision.cut.name!r}"
        report.notes.append(f"{rule}: {where}: {decision.why}.")
    return f"{head}\n{report.as_text()}"


def _said(found: Placement, cut: CutEstimate) -> str:
    """Returns the rules that choose a cut, and any objection to it."""
    rules = [rule for rule, decision in found.decisions.items() if decision.cut and decision.cut.index == cut.index]
    return ", ".join([*rules, *(["convolutions after it"] if cut.between_convolutions else [])])
