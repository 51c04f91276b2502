"""Findings about a run from its rows, each one sentence or two for a reader who has not seen the job."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols import rule_of, shipped
from rudra.core.messages import Rows
from rudra.core.records import TIMES
from rudra.errors import RudraError
from rudra.job.job import Job
from rudra.results.identity import completed
from rudra.results.reader import Results
from rudra.results.summary import protocol_label
from topologies import Plan

ALIKE = 1.15
"""Largest ratio of two learners' times that counts as equal speed."""

HELD = 0.01
"""Smallest fraction of the time that counts as holding training back."""

_WARM = 5  # first mini-batches of each learner, which are left out
_WORDS = {
    "compute_s": "compute",
    "reduce_s": "average gradients with others",
    "push_s": "deliver gradients",
    "wait_s": "wait for the server's answer",
    "pull_s": "receive weights",
    "update_s": "update their own weights",
}

Times = NDArray[np.float64]


def expected_staleness(results: Results) -> float | None:
    """Returns the mean staleness that the protocol predicts. None: the user's own rule decides it.

    It imports no code of the user.
    """
    tables = {name: results.job[name] for name in ("hogbatch", "averaging") if name in results.job}
    # Without what may name the user's code.
    protocol = {**results.job.get("protocol", {}), "modulation": "none", "correction": None, "correction_options": {}}
    if protocol.get("name") not in shipped():
        return None
    try:
        return Job(**tables, protocol=protocol).make_protocol(results.plan()).expected_staleness
    except (RudraError, ValueError):  # a job of another version
        return None


def findings(results: Results) -> list[str]:
    """Returns sentences about a run, the most general first. A running run has findings as well.

    Args:
        results: Results of the run.
    """
    plan, summary = results.plan(), results.summary()
    rows = results.minibatches
    rows = rows[(rows["step"] >= _WARM) & (rows["compute_s"] > 0)]
    found, early_passes = [_title(summary, plan)], bool(results.attributes.get("early_passes"))
    if len(rows):
        found.append(_time(rows, plan, early_passes=early_passes))
        if completed(results.job)["cluster"]["learners_per_device"] is None:  # those of a bank compute together
            found += _speeds(rows, plan, str(summary["protocol"]))
    else:
        found.append("No mini-batch is recorded, so it is unknown where the learners' time went.")
    found.append(_staleness(summary, expected_staleness(results), plan))
    found.append(_rate(summary, results))
    return [*found, _evaluations(results), _checkpoints(results)]


def _title(summary: dict[str, Any], plan: Plan) -> str:
    clock = "virtual seconds" if summary["driver"] == "simulation" else "seconds"
    where = f"{summary['topology']}, λ = {summary['learners']} learners, μ = {summary['minibatch_size']} samples"
    ends = summary["epoch_end_s"]
    whole = f"{ends[-1] / len(ends):.4g} {clock} per epoch, " if ends and ends[-1] else ""
    rate = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "no update yet"
    return f"{summary['name']}: {protocol_label(summary)} on {where}: {whole}{rate} ({summary['status']})."


def _time(rows: Rows, plan: Plan, *, early_passes: bool) -> str:
    """Says where the learners' time went."""
    parts = {name: float(rows[name].sum()) for name in TIMES}
    whole = sum(parts.values())
    shown = [f"{_WORDS[name]} {taken / whole:.0%}" for name, taken in parts.items() if taken / whole >= 0.005]
    size = float(rows["samples"].mean())
    each = f"A mini-batch of {size:.3g} samples takes {rows['compute_s'].mean() * 1e3:.3g} ms of computing."
    if plan.overlapped:
        return f"Learners push and pull while they compute. {each}"
    early = " A forward pass that began before the end of an exchange counts as a part of it." if early_passes else ""
    return f"Of their time, learners {', '.join(shown)}. {each}{early}"


def _speeds(rows: Rows, plan: Plan, protocol: str) -> Iterator[str]:
    """Says which learners are slow, and which ones the others wait for."""
    numbers = [plan.roles[role].index for role in plan.learners]
    per_sample = {}
    for role, number in zip(plan.learners, numbers, strict=True):
        mine = rows[rows["learner"] == number]
        if len(mine):
            per_sample[role] = float(np.median(mine["compute_s"] / mine["samples"]))
    if len(per_sample) < 2:
        return
    usual = sorted(per_sample.values())[(len(per_sample) - 1) // 2]
    slow = {role: taken / usual for role, taken in per_sample.items() if taken / usual >= ALIKE}
    waits = _waits(rows, plan, protocol)
    if slow:
        names = [
            f"learner {plan.roles[role].index} (rank {plan.roles[role].world_rank}, node {plan.roles[role].node}) "
            f"needs {factor:.2f} times as long for a sample"
            for role, factor in sorted(slow.items(), key=lambda item: -item[1])
        ]
        shown = [*names[:3], *([f"and {len(names) - 3} more learners are slow"] if len(names) > 3 else [])]
        text = f"{'; '.join(shown)}, compared with the others."
        text = text[0].upper() + text[1:]
    else:
        text = f"All learners are about equally fast: the times for a sample differ by {_range(per_sample):.0%}."
    yield f"{text} {waits}".strip()


def _range(times: dict[int, float]) -> float:
    return max(times.values()) / min(times.values()) - 1


def _waits(rows: Rows, plan: Plan, protocol: str) -> str:
    """Says for whom learners wait that make an update, or a gradient of their group, together."""
    if plan.averaging or plan.overlapped:
        return ""
    most = max(map(len, plan.groups), default=1)
    if most > 1:
        group = np.zeros(plan.learner_numbers, np.int64)
        for role in plan.learners:
            group[plan.roles[role].index] = plan.roles[role].group or 0
        key = group[rows["learner"]] * (1 << 40) + rows["step"]
    elif rule_of(protocol).ordered and len(plan.learners) > 1:
        key, most = rows["timestamp"], len(plan.learners)
    else:
        return "No learner waits for another one." if len(plan.learners) > 1 else ""
    counts: dict[int, int] = {}
    lost = whole = 0.0
    order = np.lexsort((rows["time_s"], key))
    sorted_rows, keys = rows[order], key[order]
    ends = np.flatnonzero(np.append(keys[1:] != keys[:-1], True))
    starts = np.concatenate([[0], ends[:-1] + 1])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        together = sorted_rows[start : end + 1]
        last = int(together["learner"][-1])
        counts[last] = counts.get(last, 0) + 1
        lost += float((together["time_s"][-1] - together["time_s"]).sum())
        whole += float(sum(together[name].sum() for name in TIMES))
    last = max(counts, key=lambda number: counts[number])
    share = counts[last] / len(ends)
    fair = 1 / most
    who = f"learner {last} in {share:.0%} of the steps" if share > 1.5 * fair else "each learner about equally often"
    return f"Every step waits for its last learner, {lost / whole:.0%} of all learners' time: that is {who}."


def _staleness(summary: dict[str, Any], expected: float | None, plan: Plan) -> str:
    """Says whether the staleness is what theory says."""
    mean = summary["mean_staleness"]
    if mean is None:
        return "No gradient was applied yet, so there is no staleness."
    if expected is None:
        return (
            f"Gradients are {mean:.2f} updates old on average. The rule is your own, so theory says nothing about it."
        )
    if not expected and not mean:
        return "No gradient is stale: all learners compute with the newest weights, as the protocol demands."
    text = f"Gradients are {mean:.2f} updates old on average, at most {summary['max_staleness']}"
    if plan.overlapped and mean >= expected:
        return f"{text}. Theory says more than {expected:.2f}, because learners push and pull while they compute."
    if abs(mean - expected) <= max(0.3, 0.25 * expected):
        return f"{text}. Theory says {expected:.2f}: as expected."
    more = "more: some learners are slow, or messages queue" if mean > expected else "less: learners are few or in step"
    return f"{text}. Theory says {expected:.2f}; it is {more}."


def _rate(summary: dict[str, Any], results: Results) -> str:
    """Says whether the learning rate fits the staleness and the size of an update."""
    factor, name, sigma = summary["rate_factor"], summary["modulation"], summary["mean_staleness"] or 0.0
    base = summary["base_learning_rate"]
    if factor is None or base is None:
        return "The file does not say how the learning rate follows the protocol."
    rate = f"The learning rate begins at {base * factor:.4g} = α0 x {factor:.4g} (modulation {name})"
    samples = int(results.attributes.get("gradients_per_update") or 1) * int(summary["minibatch_size"])
    if sigma <= 1:
        reference = results.job.get("protocol", {}).get("reference_batch_size")
        if name == "sqrt" or not reference or summary["protocol"] != "hardsync":
            return f"{rate}. Staleness of at most 1 needs no lower rate."
        wanted = math.sqrt(samples / reference)
        fits = 1 / 1.5 < factor / wanted < 1.5
        judged = "which fits" if fits else f"but sqrt gives α0 x {wanted:.3g}: set protocol.modulation=sqrt"
        return f"{rate} for updates of {samples} samples, {judged}."
    if name in ("mean_staleness", "gradient_staleness"):
        return f"{rate}, lowered by the measured staleness: it fits."
    wanted = 1 / sigma
    if factor > 1.5 * wanted:
        return (
            f"{rate}. That is {factor / wanted:.2g} times α0/⟨σ⟩, which is too high in theory: set "
            "protocol.modulation=mean_staleness."
        )
    if factor < wanted / 1.5:
        return f"{rate}. That is only {factor / wanted:.2g} times α0/⟨σ⟩: a higher rate may learn faster."
    return f"{rate}, which fits the staleness: α0/⟨σ⟩ is {base * wanted:.4g}."


def held_by_evaluation(results: Results) -> float | None:
    """Returns the fraction of the time that training lost during evaluations. None: it cannot be known."""
    epochs, updates = results.epochs, results.updates
    began_s: NDArray[np.float64] = epochs["evaluation_began_s"]
    tested = epochs[np.isfinite(began_s)]
    if not len(tested) or len(updates) < 10:
        return None
    first, last = float(updates["time_s"][0]), float(updates["time_s"][-1])
    began = tested["evaluation_began_s"]
    spans = [
        (max(first, start), min(last, end))
        for start, end in zip(began.tolist(), (began + tested["evaluation_s"]).tolist(), strict=True)
        if start < last
    ]
    inside_s = sum(max(0.0, end - start) for start, end in spans)
    outside_s = last - first - inside_s
    if not inside_s or outside_s <= 0.1 * (last - first):
        return None
    times, samples = updates["time_s"], updates["samples"].astype(float)
    within = np.zeros(len(times), bool)
    for start, end in spans:
        within |= (times >= start) & (times < end)
    rate_in, rate_out = samples[within].sum() / inside_s, samples[~within].sum() / outside_s
    return float(max(0.0, inside_s / (last - first) * (1 - rate_in / rate_out))) if rate_out else None


def _evaluations(results: Results) -> str:
    """Says whether evaluations hold training back."""
    taken = results.epochs["evaluation_s"]
    taken = taken[np.isfinite(taken)]
    if not len(taken):
        return "No weights were evaluated."
    about = f"{len(taken)} evaluations took {np.median(taken):.3g} s each"
    held = held_by_evaluation(results)
    if held is None:
        return f"{about}; they cover too much of the time, or too little, to say whether they hold training back."
    if held < HELD:
        return f"{about}, in parallel with training: they do not hold it back."
    return f"{about}, and training loses {held:.0%} of its time to them; set training.evaluate=false, or evaluate less."


def _checkpoints(results: Results) -> str:
    """Says whether checkpoints hold training back: the pauses of updates around them."""
    events, updates = results.events, results.updates
    moments = events["time_s"][events["kind"] == b"checkpoint"]
    if not len(moments):
        return "No checkpoint was written during training."
    lost = _pauses(updates["time_s"], moments)
    whole = float(updates["time_s"][-1] - updates["time_s"][0]) if len(updates) > 1 else 0.0
    held = lost / whole if whole else 0.0
    judged = "they do not hold training back" if held < HELD else f"training loses {held:.0%} of its time to them"
    return f"{len(moments)} checkpoint{'' if len(moments) == 1 else 's'} written: {judged}."


def _pauses(times: Times, moments: Sequence[float] | Times) -> float:
    """Returns the additional seconds of updates around some moments."""
    if len(times) < 10:
        return 0.0
    gaps = np.diff(times)
    usual = float(np.median(gaps))
    places = {int(place) for place in np.searchsorted(times, moments) if 0 < place < len(times)}
    return sum(max(0.0, float(gaps[max(0, place - 1) : place + 1].max()) - 2 * usual) for place in places)
