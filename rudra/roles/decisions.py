"""Changes of the job that the user's function decides during the run (`[decisions]`).

The driver calls the function when it records an epoch, and reports its answer as `Decided`. The statistics server
checks the change, records it, and informs the owner of the weights. Without a server, each learner owns the weights.
The learners then find out, by the flags of their gradients, when all of them know the change, and follow it together.

An owner applies the change at the end of its present epoch, or with its next update, as a planned change. Training
states contain the change from then on, and other roles learn it from there.
"""

import json
import re
from collections.abc import Sequence

from rudra.core.actions import Action, Fail, Record, Send
from rudra.core.decisions import LONGEST, in_events, in_texts, tables_of, text_of
from rudra.core.events import Decided
from rudra.core.messages import ChangeDecided
from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError
from rudra.job.table import named
from rudra.roles.ledger import Ledger
from rudra.roles.machine import Setup

_NUMBERED = re.compile(r"\[\[changes\]\] at_[a-z]+ = 1: |\[?decided change\]? ")
"""Names of a decided change in errors, as it has no such place in the job."""


class Decisions:
    """Decided changes at the statistics server.

    Args:
        role: id of the statistics server.
        setup: arguments of the role.

    Attributes:
        awaited: number of recorded epochs that the user's function has not answered yet.
    """

    def __init__(self, role: int, setup: Setup) -> None:
        plan, self._role = setup.plan, role
        self._owners = [plan.server] if plan.served else [*plan.learners]
        self._phases, self._call, self._epochs = setup.all_phases, setup.job.decisions.call, setup.job.training.epochs
        self._known = len(setup.position.decided)  # to the owners, as part of the training state
        self._texts = [tables_of(each) for each in setup.position.decided]
        self.awaited = 0

    def recall(self, texts: Sequence[str]) -> None:
        """Takes note of the decisions from before the checkpoint that the run resumes from, as JSON."""
        self._texts = max(self._texts, [*texts], key=len)

    def resume(self) -> list[Action]:
        """Sends the owners the recalled decisions that the checkpoint does not contain."""
        return [action for number in range(self._known, len(self._texts)) for action in self._sent(number + 1)]

    def lose(self, role: int) -> None:
        """Takes note of a role that has died."""
        if role in self._owners:
            self._owners.remove(role)

    def expect(self) -> None:
        """Notes that an epoch was recorded. The driver calls the user's function for it."""
        self.awaited += self._call is not None

    def enter(self, event: Decided) -> list[Action]:
        """Checks, records and sends the answer of the function. It fails if the job cannot change in this way."""
        self.awaited -= 1
        if not event.change or event.epoch >= self._epochs:
            return []
        try:
            changes = self._changes(event)
        except (ConfigError, ValueError) as error:
            where = f"[decisions] call = '{named(self._call or '')}' decided after epoch {event.epoch}"
            return [Fail(f"{where}: {_NUMBERED.sub('', str(error))}")]
        if not changes:
            return []
        self._texts.append(event.change)
        rows = in_events(b"decision", event.change, event.timestamp, 0, event.time_s)
        return [Record("events", rows), *self._sent(len(self._texts))]

    def _changes(self, event: Decided) -> bool:
        """Returns whether a change differs from the job with all earlier changes.

        Raises:
            ConfigError, ValueError: The job cannot change in this way.
        """
        if len(event.change) > LONGEST:
            raise ConfigError(f"the change has {len(event.change):,} characters as JSON; use at most {LONGEST:,}")
        if given := {"at_epoch", "at_update"} & json.loads(event.change).keys():
            raise ConfigError(f"{min(given)} is not for the function to decide; leave it out")
        position = TrainingState(epoch=event.epoch, timestamp=event.timestamp)
        return self._phases.tried(position, [*self._texts, event.change])

    def _sent(self, number: int) -> list[Action]:
        message = ChangeDecided(self._role, number, in_texts(self._texts[number - 1]))
        return [Send(owner, message) for owner in self._owners]


class ReceivedDecisions:
    """Decided changes that a learner has received, if learners own the weights.

    Args:
        ledger: ledger of the learner.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._texts: dict[int, str] = {}

    def inherit(self, before: "ReceivedDecisions") -> None:
        """Takes over the changes of the learner before a restart."""
        self._texts = before._texts

    def receive(self, message: ChangeDecided) -> None:
        """Takes note of a change."""
        self._texts[message.number] = text_of(message.rows)

    @property
    def new(self) -> int:
        """Number of changes that the learners have not agreed on, up to 255."""
        return min(255, max(0, max(self._texts) - len(self._ledger.rules.decided))) if self._texts else 0

    def agree(self, count: int, ahead: int) -> None:
        """Follows the next `count` changes, because all learners have received them.

        Args:
            count: number of changes.
            ahead: number of updates until the next one after which the job can change.
        """
        agreed = len(self._ledger.rules.decided)
        for number in range(agreed + 1, agreed + 1 + count):
            self._ledger.decide(number, self._texts[number], ahead)
