"""Rules of a training at an epoch: job, plan, protocol and learning rates, which may change after an epoch."""

import math
from collections.abc import Iterator, Set

import protocols
from rudra.core.phases import Phase, phase_at
from rudra.core.schedule import Schedule
from rudra.core.training_state import TrainingState
from rudra.errors import ProtocolError
from rudra.job.table import named
from rudra.roles.machine import Setup
from topologies import Plan


class TrainingRules:
    """Rules that an owner of weights follows.

    Args:
        setup: what the owner is made from.

    Attributes:
        job: of the part of the run that training is in.
        plan: who is who.
        protocol: the protocol that everybody follows.
        schedule: the learning rates, before modulation.
        until: number of complete epochs at which the job changes.
        lr_drops: completed epochs after which the rate falls because evaluations got no better.
    """

    def __init__(self, setup: Setup) -> None:
        self._phases = setup.all_phases
        self.follow(setup.plan, setup.position)

    def follow(self, plan: Plan, position: TrainingState) -> None:
        """Everybody begins by this plan, at this position; nothing is under way."""
        self._phase = phase_at(self._phases, position.epoch)
        later = (phase.at_epoch for phase in self._phases if phase.at_epoch > position.epoch)
        self.until = next(later, math.inf)
        self.plan, self.job, self.schedule = plan, self._phase.job, self._phase.schedule
        self.protocol = self.job.make_protocol(plan)
        self._protocol_name = str(named(self.job.protocol.name))
        if position.protocol_state and position.protocol == self._protocol_name:
            protocols.restored(self.protocol, position.protocol_state)
        self.keep_state()
        self.lr_drops = position.lowered
        if self.job.optimizer.plateau is not None:
            self.schedule = Schedule.stepped(self.job.optimizer, self.lr_drops)

    def keep_state(self) -> None:
        """Keeps the protocol's present state, from which the run could be resumed."""
        try:
            self._protocol_state = protocols.saved(self.protocol)
        except ValueError as error:
            raise ProtocolError(f"protocol {self._protocol_name}: {error}") from None

    @property
    def protocol_state(self) -> tuple[str, str]:
        """Name of the protocol, and the state that was kept; empty if it has none."""
        return self._protocol_name, self._protocol_state

    def replace_protocol(self, protocol: protocols.Protocol) -> None:
        """Follows a protocol for fewer learners from now on, in the state of the protocol before.

        Raises:
            ValueError: it does not take that state.
        """
        if state := protocols.saved(self.protocol):
            protocols.restored(protocol, state)
        self.protocol = protocol

    def lower(self, count: int, epoch: int) -> Iterator[str]:
        """The rate falls for the `count`-th time in all; a count that was reached before changes nothing.

        It falls after the epoch under way, or after the next one if it already falls there.

        Yields:
            A text for each time.
        """
        while len(self.lr_drops) < count:
            self.lr_drops = (*self.lr_drops, max(epoch, *self.lr_drops, 0) + 1)
            self.schedule = Schedule.stepped(self.job.optimizer, self.lr_drops)
            text = f"evaluations got no better: the rate is multiplied by {self.job.optimizer.decay_factor:g}"
            yield f"{text} after epoch {self.lr_drops[-1]}"

    def change(self, dead: Set[int], position: TrainingState) -> list[Phase]:
        """Follows the job of a position without the dead roles; returns the parts of the run that begin by then."""
        before, gone = self._phase.at_epoch, self.plan.gone | dead
        plan = phase_at(self._phases, position.epoch).plan
        self.follow(plan.without(gone) if gone else plan, position)
        return [phase for phase in self._phases if before < phase.at_epoch <= self._phase.at_epoch]

    def staleness_warning(self, epoch: int, mean_staleness: float) -> str:
        """Returns what to warn of if an epoch's gradients were too stale for their rate, else nothing.

        Source: rudra.txt §5.1.
        """
        n = self.protocol.modulation.assumed_staleness
        if n is None or not mean_staleness > 2 * n:  # it may be NaN
            return ""
        remedy = "modulation = 'mean_staleness' divides it by what is measured"
        if self.plan.overlapped:
            remedy += ", [topology] options.outstanding bounds that"
        text = f"the gradients of epoch {epoch} were stale by {mean_staleness:.1f} updates on average, more than 2n"
        return f"{text} = {2 * n}, but modulation 'n' divides the rate by {n} alone; {remedy}"


class TrainingClock:
    """Clock of a training, which stands still during pauses and between a run and its resumption.

    Args:
        spent_s: time of the training before this start.

    Attributes:
        start_time: seconds on the driver's clock at which training began, as if without pauses.
        ended: seconds on the driver's clock of the last update.
        started: training has begun.
    """

    def __init__(self, spent_s: float) -> None:
        self._spent_s = spent_s
        self.start_time = self.ended = 0.0
        self.started = False

    def start(self, now: float) -> int:
        """Training begins, unless it has begun; returns when, in nanoseconds on the driver's clock."""
        if not self.started:
            self.started, self._began_ns = True, round((now - self._spent_s) * 1e9)
            self.start_time = self._began_ns * 1e-9  # the same number everywhere
            self.ended = self.start_time + self._spent_s
        return self._began_ns

    def pause(self, seconds: float) -> None:
        """The clock has stood still for these seconds, until now."""
        began = round((self.start_time + seconds) * 1e9) * 1e-9  # the same number everywhere, as at the start
        self.ended += began - self.start_time
        self.start_time = began
