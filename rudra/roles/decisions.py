"""Changes of the job that are decided during the run, by the user's function (`[decisions]`) or for banks that grow.

The driver calls the function when it records an epoch, and reports its answer as `Decided`. The statistics server
checks the change, records it, and informs the owner of the weights. It decides itself about the growth of banks
(`rudra.roles.bank_tuner`). Without a server, each learner owns the weights.
The learners then find out, by the flags of their gradients, when all of them know the change, and follow it together.

An owner applies the change at the end of its present epoch, or with its next update, as a planned change. Training
states contain the change from then on, and other roles learn it from there.
"""

import json
import re
from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from rudra.core.actions import Action, Fail, Record, Send, Warn
from rudra.core.decisions import LONGEST, WIDTH, MeasuredBanks, in_events, in_texts, tables_of, text_of
from rudra.core.events import Decided
from rudra.core.messages import ChangeDecided, RoleExhausted, Rows
from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError
from rudra.job.table import named
from rudra.roles.bank_tuner import BankTuner
from rudra.roles.ledger import Ledger
from rudra.roles.machine import Setup
from rudra.roles.minibatch_log import MinibatchLog

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
        self._titles = [each.title for each in plan.roles]
        self._latest = setup.position.timestamp, setup.position.time_s  # update whose row came last, and its time
        self._owners = [plan.server] if plan.served else sorted({*plan.learners, *plan.dormant})
        self._phases, self._call, self._epochs = setup.all_phases, setup.job.decisions.call, setup.job.training.epochs
        self._known = len(setup.position.decided)  # to the owners, as part of the training state
        self._texts = [tables_of(each) for each in setup.position.decided]
        self._tuner = BankTuner(setup) if setup.job.cluster.grows else None
        self.awaited = 0

    def recall(self, texts: Sequence[str], measured: Sequence[MeasuredBanks]) -> None:
        """Takes note of the decisions from before the checkpoint that the run resumes from.

        Args:
            texts: JSON of the changes.
            measured: measurements of banks that grow.
        """
        self._texts = max(self._texts, [*texts], key=len)
        if self._tuner is not None:
            self._tuner.recall(measured)

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
        self._latest = event.timestamp, event.time_s
        return self._decide(event.change) if changes else []

    def exhausted(self, message: RoleExhausted) -> list[Action]:
        """Decides how the run continues when memory does not suffice: with fewer learners in each bank that grows.

        If that is not possible, the owner of the weights makes a checkpoint and ends the run.
        """
        text, tuner = text_of(message.rows), self._tuner
        about = message.role, message.learners
        if tuner is not None and tuner.lacks_memory(*about):  # another role has said so
            return []
        found = None if tuner is None else tuner.give_back(*about)
        if tuner is None or found is None:
            owner = Send(self._owners[0], structs.replace(message, sender=self._role))
            return [self._event(b"memory", text[:WIDTH], message.role), owner]
        text = f"{text.partition('; use ')[0]}; from now on learners of each device: {tuner.text}"
        measured = self._event(b"measured", found.text)
        warned = Warn(f"{self._titles[message.role]}: {text}")
        memory = self._event(b"memory", text[:WIDTH], message.role)
        return [memory, measured, warned, *self._decide(tuner.change, at_once=True)]

    def left_out(self, text: str, epoch: int) -> list[Action]:
        """Notes that the last evaluation does not fit into memory. Nothing is left to decide."""
        return [self._event(b"memory", text[:WIDTH], self._role), Warn(f"epoch {epoch} is not evaluated: {text}")]

    def time(self, rows: Rows) -> None:
        """Takes in rows of mini-batches."""
        if self._tuner is not None:
            self._tuner.time(rows)

    def measure(self, rows: Rows) -> list[Action]:
        """Takes in rows of updates. If they complete a measurement of the banks, it decides about their size."""
        self._latest = int(rows["timestamp"][-1]), float(rows["time_s"][-1])
        if self._tuner is None or self._tuner.ended:
            return []
        before = self._tuner.sizes
        if (found := self._tuner.enter(rows)) is None:
            return []
        grows = self._tuner.sizes != before
        measured = self._event(b"measured", found.text)
        return [measured, *(self._decide(self._tuner.change) if grows else [])]

    def _decide(self, change: str, *, at_once: bool = False) -> list[Action]:
        """Records a change and sends it to the owners of the weights."""
        self._texts.append(change)
        return [self._event(b"decision", change), *self._sent(len(self._texts), at_once=at_once)]

    def _event(self, kind: bytes, text: str, role: int = -1) -> Record:
        """Returns the action that records an event at the latest update that is known here."""
        return Record("events", in_events(kind, text, self._latest[0], 0, self._latest[1], role))

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

    def _sent(self, number: int, *, at_once: bool = False) -> list[Action]:
        message = ChangeDecided(self._role, number, in_texts(self._texts[number - 1]), at_once)
        return [Send(owner, message) for owner in self._owners]


class Deciding(Protocol):
    """Learner that owns weights, or will."""

    log: MinibatchLog

    @property
    def received(self) -> dict[int, str]:
        """JSON of the decided changes that the learner has received, by number."""


class ReceivedDecisions:
    """Decided changes that a learner has received, if learners own the weights.

    Args:
        ledger: ledger of the learner.

    Attributes:
        texts: JSON of the changes, by number.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.texts: dict[int, str] = {}

    def receive(self, message: ChangeDecided) -> None:
        """Takes note of a change."""
        self.texts[message.number] = text_of(message.rows)

    @property
    def new(self) -> int:
        """Number of changes that the learners have not agreed on, up to 255."""
        return min(255, max(0, max(self.texts) - len(self._ledger.rules.decided))) if self.texts else 0

    def follow_at_once(self) -> None:
        """Follows all changes after the present update. Other learners need not have received them."""
        agreed = len(self._ledger.rules.decided)
        texts = [self.texts[number] for number in sorted(self.texts) if number > agreed]
        self._ledger.rules.decide_at_once(texts, self._ledger.timestamp)

    def agree(self, count: int, ahead: int) -> None:
        """Follows the next `count` changes, because all learners have received them.

        Args:
            count: number of changes.
            ahead: number of updates until the next one after which the job can change.
        """
        agreed = len(self._ledger.rules.decided)
        for number in range(agreed + 1, agreed + 1 + count):
            self._ledger.decide(number, self.texts[number], ahead)
