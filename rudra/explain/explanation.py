"""Explanation of a run: findings from its rows, and changes that would make it faster, the best one first."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rudra.benchmark_report import Report
from rudra.errors import RudraError
from rudra.explain.findings import findings
from rudra.prepare.recorded_job import UNUSED
from rudra.results.reader import open_results
from rudra.trust import code_of

if TYPE_CHECKING:
    from rudra.simulation.alternatives import Alternative
    from rudra.simulation.whatif import FittedRun

COLUMNS = ("what if", "faster by", "s/epoch", "⟨σ⟩", "samples per update", "how")


@dataclass(frozen=True)
class Explanation:
    """Explanation of a run.

    Attributes:
        lines: Sentences, the most general first.
        alternatives: Changes, the best one first. Empty: the costs of the run are not known.
        staleness: Mean staleness of the run, by its prediction.
        samples: Number of samples of an update of the run.
    """

    lines: tuple[str, ...]
    alternatives: "tuple[Alternative, ...]" = ()
    staleness: float = 0.0
    samples: int = 0

    @property
    def worth(self) -> "list[Alternative]":
        """The changes that are worth it."""
        from rudra.simulation.alternatives import WORTH

        return [each for each in self.alternatives if each.gain > WORTH]

    def rows(self) -> list[tuple[str, ...]]:
        """Returns one row of texts for each change that is worth it, with `COLUMNS`."""
        return [
            (
                each.what,
                f"{each.gain:.0%}",
                f"{each.epoch_s:.4g}",
                f"{self.staleness:.2f} → {each.staleness:.2f}",
                f"{self.samples} → {each.samples}",
                " ".join(f"--set {override}" for override in each.overrides),
            )
            for each in self.worth
        ]

    def as_text(self) -> str:
        """Returns the lines and the table."""
        text = "\n".join(self.lines)
        if not self.worth:
            return text
        report = Report(list(COLUMNS))
        report.rows = [*self.rows()]
        return f"{text}\n\n{report.as_text()}"

    def as_json(self) -> str:
        """Returns one JSON object."""
        about: dict[str, Any] = {"lines": self.lines, "alternatives": [asdict(each) for each in self.alternatives]}
        return json.dumps(about, ensure_ascii=False, indent=2)


def explain(path: str | Path, *, trust: bool | None = False) -> Explanation:
    """Explains a run.

    Args:
        path: Result file of the run.
        trust: Whether to import the code that the file names, even if another user wrote the file. None: import no
            code that the file names; there are then no predictions for a run with own rules.

    Raises:
        ResultsError: The file cannot be read.
    """
    path = Path(path)
    with open_results(path) as results:
        lines = findings(results)
        own = {table: keys for table, keys in results.job.items() if table not in UNUSED}
        named = trust is None and code_of(own)
    if named:
        return Explanation(
            (*lines, "No predictions: the job has a protocol or topology of its own; use `rudra explain`.")
        )
    from rudra.simulation.alternatives import alternatives, samples_of
    from rudra.simulation.whatif import FittedRun

    try:
        with _quiet():
            run = FittedRun.read(path, trust=bool(trust))
            found, even = tuple(alternatives(run)), _evened(run)
    except RudraError as error:
        return Explanation((*lines, f"No predictions: {error}."))
    itself = run.itself
    explanation = Explanation((), found, itself.mean_staleness, samples_of(itself))
    lines += [_bound(run) + even, run.as_text().replace("\n", " "), _verdict(explanation)]
    return Explanation(tuple(lines), found, explanation.staleness, explanation.samples)


def _bound(run: "FittedRun") -> str:
    itself = run.itself
    what = {"compute": "the learners' computing", "server": "the server", "link": "a link"}[itself.bound]
    least = itself.bound_s * run.ratio
    loads = f"the busiest server is occupied {itself.loads['server']:.0%} of the time, the busiest link "
    return (
        f"The limit is {what}: if all else took no time, an epoch would take {least:.4g} s; {loads}"
        f"{itself.loads['link']:.0%}."
    )


def _evened(run: "FittedRun") -> str:
    """Says what slow learners cost."""
    if max(run.costs.slow.values(), default=1.0) <= 1.0:
        return ""
    found = run.predict(run.written(["simulation.slowdown={}"]))
    return f" If no learner were slow, it would take {found.epoch_s:.4g} s."


def _verdict(explanation: Explanation) -> str:
    if not explanation.worth:
        return "No change that was tried would make it faster by more than 5 %."
    best = explanation.worth[0]
    return f"Best change: {best.what}, {best.gain:.0%} more samples per second. The table has all above 5 %."


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what predictions of single changes say about shares."""
    logger = logging.getLogger("rudra")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
