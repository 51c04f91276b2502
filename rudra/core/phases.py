"""Phases of a run: job, role assignment and learning rates between two changes of its job."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Self

from rudra.core.decisions import start_of
from rudra.core.schedule import Schedule
from rudra.core.training_state import DecidedChange, TrainingState
from rudra.job.boundary import Boundary
from rudra.job.job import Job
from topologies import Plan


class Phase(NamedTuple):
    """Phase of a run.

    Attributes:
        start: Boundary that begins the phase. Until all earlier phases have begun, it waits.
        job: Job of this phase, without changes.
        plan: Role assignment. All phases have the same roles on the same ranks.
        schedule: Learning rates before modulation.
        text: Description of the changes.
        restarts: Whether all replicas restart from the weights when it begins.
    """

    start: Boundary
    job: Job
    plan: Plan
    schedule: Schedule
    text: str = ""
    restarts: bool = False


class Phases(tuple[Phase, ...]):
    """Phases of a run in order, as its job plans them. Changes that are decided during the run add phases.

    Args:
        planned: The phases.
        job: Job of the run, with its changes.
        make: Function that returns the phases of another job in this run. None: no change can be decided.
    """

    _job: Job | None
    _make: "Callable[[Job], Phases] | None"
    _known: "dict[tuple[DecidedChange, ...], Phases]"

    def __new__(
        cls, planned: Iterable[Phase] = (), job: Job | None = None, make: "Callable[[Job], Phases] | None" = None
    ) -> Self:
        made = super().__new__(cls, planned)
        made._job, made._make, made._known = job, make, {}
        return made

    @property
    def may_change(self) -> bool:
        """Whether the job of the run changes, or may change."""
        return len(self) > 1 or (bool(self) and self[0].job.decides)

    def having(self, decided: tuple[DecidedChange, ...]) -> "Phases":
        """Returns the phases with changes that were decided and have taken effect."""
        if not decided or self._make is None or self._job is None:
            return self
        if decided not in self._known:
            made = self._make(self._job.with_decided(decided))
            restarts = [start_of(each) for each in decided if each.restarts]
            phases = (phase._replace(restarts=phase.start in restarts) for phase in made)
            self._known[decided] = Phases(phases, made._job, made._make)
        return self._known[decided]

    def tried(self, position: TrainingState, changes: Sequence[str]) -> bool:
        """Returns whether the last of some decided changes makes a difference.

        Args:
            position: Position in the run, without decided changes. Its planned changes precede the decided ones.
            changes: JSON of each decided change: table -> key -> value.

        Raises:
            ConfigError, ValueError: The job cannot change in this way.
        """
        if self._job is None or self._make is None:
            return False
        begun = len(phases_begun(self, position)) - 1
        job, key = self._job.after(begun), f"at_{self._job.decided_at}"
        for text in changes:
            job = job.after(len(job.changes)).with_decided([(json.dumps({key: 1, **json.loads(text)}), 0)])
        before, after = self._make(job)
        return before.job != after.job


def phases_begun(phases: Phases, position: TrainingState) -> tuple[Phase, ...]:
    """Returns the phases of a run that have begun at a position. The last of them is the present phase."""
    present = phases.having(position.in_effect)
    return tuple(takewhile(lambda phase: phase.start.is_reached(position.epoch, position.timestamp), present))


def phase_at(phases: Phases, position: TrainingState) -> Phase:
    """Returns the phase of a run at a position."""
    return phases_begun(phases, position)[-1]
