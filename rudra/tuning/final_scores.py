"""Scores of the finalists on the test set.

The test set decides nothing. The finalists are evaluated on it once, after the last decision of a search. The journal
keeps the scores, so a search that continues does not read the test set again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rudra.job.job import Job
from rudra.job.target import Target
from rudra.results.scores import on_test_set
from rudra.tuning.journal import Journal
from rudra.tuning.probes import Probe
from rudra.tuning.rounds import latest_s, until_target
from rudra.tuning.space import Settings
from rudra.tuning.state import SearchState, key_of


class Score(NamedTuple):
    """Score of a finalist with one seed.

    Attributes:
        settings: Settings of the finalist.
        seed: Seed, added to the seed of the job. 0: the run began with the common checkpoint.
        epochs: Number of epochs from the initial weights to the evaluated ones.
        reached: Whether the run had reached the target by then.
        held_out: Metric of the target on the validation split.
        value: Metric of the target on the test set. NaN: the evaluation does not measure it.
    """

    settings: Settings
    seed: int
    epochs: int
    reached: bool
    held_out: float
    value: float


Find = Callable[[Probe, int], tuple[int, Path] | None]
"""Probe, number of epochs -> number of epochs of its nearest checkpoint, and the path: see `Trainer.checkpoint`."""

Evaluate = Callable[[Sequence[Path]], list[float]]
"""Checkpoints -> the target's metric on the test set."""


def ends_of(state: SearchState, settings: Settings, *, fresh: bool) -> list[Probe]:
    """Returns the probes of a finalist that the answer is about.

    Args:
        state: The search, after its last probe.
        settings: Settings of the finalist.
        fresh: Whether it was trained from the initial weights with fresh seeds. Otherwise its probe from the common
            checkpoint counts.
    """
    own = [probe for probe in state.probes.values() if probe.settings == key_of(settings)]
    if not fresh:
        return [probe for probe in own if probe.origin]
    most_s = latest_s(state)
    return [p for p in own if p.seed and not p.origin and not until_target(state, p, most_s)]


def final_scores(
    state: SearchState, probes: Sequence[Probe], journal: Journal, find: Find, evaluate: Evaluate
) -> tuple[Score, ...]:
    """Returns the scores of the finalists, seed by seed, from the journal or else from their checkpoints.

    A finalist is evaluated at the target. If that checkpoint is gone, or the target was not reached, it is evaluated at
    its last one.

    Args:
        state: The search, after its last probe.
        probes: Probes of the finalists.
        journal: Is extended by the scores, unless it has them.
        find: Finds the checkpoint of a probe.
        evaluate: Reads the test set.

    Raises:
        CheckpointError: A checkpoint is damaged.
    """
    entry = next(journal.of("test"), None)
    if entry is None:
        ends = {probe: end for probe in probes if (end := find(probe, _wanted(state, probe))) is not None}
        if not ends:
            return ()
        scores = dict(zip(ends, evaluate([path for _, path in ends.values()]), strict=True))
        entry = {"kind": "test", "scores": [[probe.name, ends[probe][0], scores[probe]] for probe in ends]}
        journal.add(entry)
    known = {name: (epochs, value) for name, epochs, value in entry["scores"]}
    return tuple(_score(state, probe, *known[probe.name]) for probe in probes if probe.name in known)


def _wanted(state: SearchState, probe: Probe) -> int:
    """Returns the number of epochs after which a probe first reached the target, or all its epochs."""
    marks, end = state.outcomes[probe.name].marks, state.first_at_target(probe)
    return len(marks) if end is None else marks.index(end) + 1


def _score(state: SearchState, probe: Probe, epochs: int, value: float) -> Score:
    mark, end = state.outcomes[probe.name].marks[epochs - 1], state.first_at_target(probe)
    reached = end is not None and end.samples <= mark.samples
    return Score(probe.by_key, probe.seed, probe.begins_at + epochs, reached, mark.metric, value)


def evaluator(job: Job, target: Target, test_limit: int | None) -> Evaluate:
    """Returns a function that evaluates checkpoints of probes.

    Args:
        job: Job that probes vary.
        target: Target of the search.
        test_limit: Number of test samples in the user's job. None: all.
    """

    def evaluate(paths: Sequence[Path]) -> list[float]:
        whole = job.with_(data={"test_limit": test_limit})
        values = [target.of(scores) for scores in on_test_set(whole, paths)]
        return [float("nan") if value is None else value for value in values]

    return evaluate
