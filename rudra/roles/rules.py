"""Rules of the training in a phase of the run: job, plan, protocol and learning rates."""

import json
from collections.abc import Iterator, Sequence, Set

from msgspec import structs

import protocols
from rudra.core.actions import SetOptimizer
from rudra.core.decisions import start_of, tables_of
from rudra.core.phases import Phase, phase_at, phases_begun
from rudra.core.schedule import Schedule
from rudra.core.training_state import DecidedChange, TrainingState
from rudra.errors import ProtocolError
from rudra.job.boundary import NEVER
from rudra.job.table import named
from rudra.roles.machine import Setup
from rudra.roles.optimizer_settings import changed_settings
from topologies import Plan


class TrainingRules:
    """Rules that an owner of weights follows.

    Args:
        setup: arguments of the owner's role.

    Attributes:
        job: job of the present phase of the run.
        plan: roles of the run and their connections.
        protocol: synchronization protocol that all roles follow.
        schedule: learning rates before modulation.
        until: place in the run at which the job changes next, or `NEVER`.
        lr_drops: numbers of completed epochs after which the rate drops because evaluations stopped improving.
        decided: changes of the job that were decided during the run.
    """

    def __init__(self, setup: Setup) -> None:
        self._phases = setup.all_phases
        self.follow(setup.plan, setup.position)

    def follow(self, plan: Plan, position: TrainingState) -> None:
        """Applies the rules of the phase at a position. All roles begin with this plan, and nothing is under way."""
        self.decided = position.decided
        self._present = phases = self._phases.having(position.in_effect)
        begun = phases_begun(self._phases, position)
        self._begun, self.until = len(begun), phases[len(begun)].start if begun != phases else NEVER
        for each in self.decided:
            self._await(each)
        self.plan, self.job, self.schedule = plan, begun[-1].job, begun[-1].schedule
        self.protocol = self.job.make_protocol(plan)
        self._protocol_name = str(named(self.job.protocol.name))
        if position.protocol_state and position.protocol == self._protocol_name:
            protocols.restored(self.protocol, position.protocol_state)
        self.keep_state()
        self.lr_drops = position.lowered
        if self.job.optimizer.plateau is not None:
            self.schedule = Schedule.stepped(self.job.optimizer, self.lr_drops)

    def settings(self, role: int) -> list[SetOptimizer]:
        """Returns actions that give the optimisers of a role their present settings, if a change of the job may."""
        return changed_settings(role, self._present, self.job, self.plan)

    def keep_state(self) -> None:
        """Stores the present state of the protocol, so that the run can be resumed from it."""
        try:
            self._protocol_state = protocols.saved(self.protocol)
        except ValueError as error:
            raise ProtocolError(f"protocol {self._protocol_name}: {error}") from None

    @property
    def protocol_state(self) -> tuple[str, str]:
        """Name of the protocol, and its stored state. The state is empty for a protocol without one."""
        return self._protocol_name, self._protocol_state

    def replace_protocol(self, protocol: protocols.Protocol) -> None:
        """Switches to a protocol for fewer learners, which takes over the state of the previous protocol.

        Raises:
            ValueError: The new protocol does not accept that state.
        """
        if state := protocols.saved(self.protocol):
            protocols.restored(protocol, state)
        self.protocol = protocol

    def lower(self, count: int, epoch: int) -> Iterator[str]:
        """Lowers the learning rate until it has dropped `count` times in all. An earlier count changes nothing.

        A drop takes effect after the present epoch, or after a later one if the present epoch already has a drop.

        Yields:
            A text for people about each drop.
        """
        while len(self.lr_drops) < count:
            self.lr_drops = (*self.lr_drops, max(epoch, *self.lr_drops, 0) + 1)
            self.schedule = Schedule.stepped(self.job.optimizer, self.lr_drops)
            text = f"evaluations got no better: the rate is multiplied by {self.job.optimizer.decay_factor:g}"
            yield f"{text} after epoch {self.lr_drops[-1]}"

    def decide(self, number: int, text: str, epoch: int, update: int) -> None:
        """Takes in a change that is decided during the run. It takes effect with an update or the end of the epoch.

        Args:
            number: number of decided changes, including this one. An earlier change has no effect.
            text: JSON of the change: table -> key -> value.
            epoch: number of complete epochs.
            update: next update that can be the last one before the change.
        """
        if number != len(self.decided) + 1:
            return
        at_update = self.job.decided_at == "update"
        start = {"at_update": update} if at_update else {"at_epoch": epoch + 1}
        self.decided = (*self.decided, DecidedChange(json.dumps(start | json.loads(text))))
        self._await(self.decided[-1])

    def decide_at_once(self, texts: Sequence[str], timestamp: int) -> None:
        """Takes in changes that take effect now, after the present update, as do all that have not. Replicas restart.

        Args:
            texts: JSON of the changes.
            timestamp: timestamp of the weights.
        """
        waiting = [tables_of(each) for each in self.decided if each.place < 0]
        self.decided = self.decided[: len(self.decided) - len(waiting)]
        for text in (*waiting, *texts):
            change = json.dumps({"at_update": timestamp} | json.loads(text))
            self.decided = (*self.decided, DecidedChange(change, restarts=True))
            self._await(self.decided[-1])

    def replicas_restart(self, position: TrainingState) -> bool:
        """Whether all replicas restart from the weights with the phase at a position."""
        return phase_at(self._phases, position).restarts

    def _await(self, decided: DecidedChange) -> None:
        """Expects the place in the run where a decided change takes effect, if it has not."""
        if decided.place < 0:
            self.until = self.until.or_(start_of(decided))

    def decided_at(self, position: TrainingState) -> tuple[DecidedChange, ...]:
        """Returns the decided changes at a position. Each that takes effect there has its place among all changes."""
        found = list(self.decided)
        for number, each in enumerate(found):
            if each.place < 0 and start_of(each).is_reached(position.epoch, position.timestamp):
                begun = phases_begun(self._phases, structs.replace(position, decided=tuple(found)))
                found[number] = each._replace(place=len(begun) - 1)
        return tuple(found)

    def change(self, dead: Set[int], position: TrainingState) -> tuple[Phase, ...]:
        """Applies the rules at a position, without the dead roles. Returns the phases that begin by then."""
        before = self._begun
        self.follow(self.plan_at(dead, position), position)
        return phases_begun(self._phases, position)[before:]

    def learners_change(self, epoch: int, timestamp: int) -> bool:
        """Returns whether the job changes after these numbers of epochs and updates, and all roles restart.

        They do so if other learners take part, or replicas restart.
        """
        if not self.until.is_reached(epoch, timestamp):
            return False
        position = TrainingState(timestamp, epoch)
        position = structs.replace(position, decided=self.decided_at(position))
        others = self.plan_at(frozenset(), position).learners != self.plan.learners
        return others or self.replicas_restart(position)

    def plan_at(self, dead: Set[int], position: TrainingState) -> Plan:
        """Returns the plan at a position, without the dead roles."""
        gone, plan = self.plan.gone | dead, phase_at(self._phases, position).plan
        return plan.without(gone) if gone else plan

    def staleness_warning(self, epoch: int, mean_staleness: float) -> str:
        """Returns a warning if the gradients of an epoch were too stale for their learning rate, or an empty string.

        Source: rudra.txt §5.1.
        """
        n = self.protocol.modulation.assumed_staleness
        if n is None or not mean_staleness > 2 * n:  # the mean may be NaN
            return ""
        remedy = "modulation = 'mean_staleness' divides it by what is measured"
        if self.plan.overlapped:
            remedy += ", [topology] options.outstanding bounds that"
        text = f"the gradients of epoch {epoch} were stale by {mean_staleness:.1f} updates on average, more than 2n"
        return f"{text} = {2 * n}, but modulation 'n' divides the rate only by {n}; {remedy}"


class TrainingClock:
    """Training clock. It stops during pauses, and between the end of a run and its resumption.

    Args:
        spent_s: training time in seconds before this start.

    Attributes:
        start_time: start of training in seconds on the driver's clock, as if there had been no pauses.
        ended: time of the last update in seconds on the driver's clock.
        started: whether training has begun.
    """

    def __init__(self, spent_s: float) -> None:
        self._spent_s = spent_s
        self.start_time = self.ended = 0.0
        self.started = False

    def start(self, now: float) -> int:
        """Starts the clock if it has not started. Returns the start in nanoseconds on the driver's clock."""
        if not self.started:
            self.started, self._began_ns = True, round((now - self._spent_s) * 1e9)
            self.start_time = self._began_ns * 1e-9  # rounded, so that all roles have the same number
            self.ended = self.start_time + self._spent_s
        return self._began_ns

    def pause(self, seconds: float) -> None:
        """Leaves out a pause of `seconds` that ends now."""
        began = round((self.start_time + seconds) * 1e9) * 1e-9  # rounded as at the start
        self.ended += began - self.start_time
        self.start_time = began
