"""Learners of compute groups. A group is synchronous inside, and acts as one learner with batch size kμ.

Source: omnivore.txt §IV-A and appendix D-A3. Members average their gradients on the group's communicator. With several
groups there is a parameter server: the first member pushes the average and pulls for all members. The weights then go
down a tree of the group. A single group needs no server (`rudra.roles.replica`).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rudra.core.actions import Action, Fail, Reduce, Send
from rudra.core.buffer_names import ACTIVATIONS, GRADIENT, WEIGHTS
from rudra.core.events import Computed, Hashed, Received, Reduced, Sent
from rudra.core.messages import (
    ChildDone,
    MessageKind,
    PullAnswer,
    PushedGradient,
    Ready,
    Stop,
    TrainingStarted,
    Weights,
)
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.machine import Setup, States, Transition, listed, self_loops, short_digest
from rudra.roles.readiness import Readiness


class GroupLearner(Learner):
    """Member of one of several compute groups, with the arguments of `Learner`.

    Same states as for `Learner`, with one additional step. The group reduces a gradient before it is pushed. Then the
    first member exchanges the average for newer weights, and the others wait in the same state until the weights reach
    them. A member continues after it has forwarded the weights to all its receivers.
    """

    __slots__ = (
        "_before",
        "_early",
        "_first",
        "_group",
        "_handing_on",
        "_leads",
        "_members",
        "_readiness",
        "_receivers",
        "_reducing",
    )

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **Learner.TRANSITIONS,
        **self_loops(
            [LearnerState.HASHING, LearnerState.READY], {Sent: "_handed_on", MessageKind.READY: "_member_ready"}
        ),
        (LearnerState.COMPUTING, Computed): Transition("_push", LearnerState.COMPUTING),
        (LearnerState.COMPUTING, Sent): Transition("_sent_while_computing", LearnerState.COMPUTING),
        (LearnerState.COMPUTING, Reduced): Transition(
            "_reduced", LearnerState.COMPUTING, LearnerState.EXCHANGING, LearnerState.STOPPED
        ),
        (LearnerState.COMPUTING, MessageKind.TIMESTAMP): Transition("_answered_early", LearnerState.COMPUTING),
        (LearnerState.EXCHANGING, Sent): Transition(
            "_returned", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.STOPPED
        ),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        plan = setup.plan
        group = plan.roles[role].group
        assert group is not None
        self._group = group
        self._leads = plan.group_of(role)[0] == role
        # Members may come from other groups, so each counts the gradients that it has pushed in this group.
        self._first, self._before = self.pushed, setup.position.below(plan, role)
        self._members = plan.children[role]
        self._receivers = plan.receivers[role]
        self._handing_on = 0
        self._reducing = False
        self._early: Received[PullAnswer] | None = None  # answer that came before the reduction ended here
        self._readiness = Readiness()  # of this learner and its `_members`

    @property
    def waiting_for(self) -> str:
        if self._reducing:
            return f"the gradients of compute group {self._group}"
        if self.state is LearnerState.EXCHANGING and self._handing_on:
            return f"{listed([self.plan.roles[i].name for i in self._receivers])} to take weights"
        if self.state is LearnerState.EXCHANGING and not self._leads:
            return f"{self.plan.roles[self._source].name} to hand on weights"
        return super().waiting_for

    def validate(self) -> None:
        assert 0 <= self._handing_on <= len(self._receivers)

    # Start: the first member reports for the whole group.

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        return [*super()._first_weights(event, now), *self._hand_on(event)]

    def _report_digest(self, event: Hashed, now: float) -> list[Action]:
        self.state = LearnerState.READY
        return self._ready(self.id, short_digest(event.digest))

    def _member_ready(self, event: Received[Ready], now: float) -> list[Action]:
        return self._ready(event.message.sender, event.message.digest)

    def _ready(self, role: int, digest: int) -> list[Action]:
        self._readiness.enter(role, digest)
        if len(self._readiness.roles) <= len(self._members):
            return []
        if not self._readiness.agree:
            return [Fail(f"learners of compute group {self._group} received different initial weights")]
        return [Send(self.server, Ready(self.id, digest))]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        return [*(Send(to, event.message) for to in self._receivers), *super()._begin(event, now)]

    # Gradients: reduced over the group, then pushed to the server by its first member.

    def _push(self, event: Computed, now: float) -> list[Action]:
        # A learner that must stop still takes part in this reduction: the others may not know of the stop yet.
        stopping, self._stopping = self._stopping, False
        actions, ends = self._computed(event, now)
        if ends:
            return actions
        self._stopping, self._reducing = stopping, True
        return [Reduce(GRADIENT, self._group, self._together, self._gradient(event, now), to_all=False), *actions]

    @property
    def _together(self) -> int:
        """Number of gradients that each member has pushed since the group began."""
        return self.pushed - self._first

    def _reduced(self, event: Reduced, now: float) -> list[Action]:
        self._reducing = False
        if self._stopping:
            if self._leads:  # the average of this step is not pushed
                self._uncount()
            self.log.report_unused()
            return self._leave(now)
        self.state, self._pushed_at = LearnerState.EXCHANGING, now
        if not self._leads:
            self._delivered_at = now
            early, self._early = self._early, None
            return [] if early is None else self._answered(early, now)
        message = PushedGradient(self.id, self.timestamp, self.timestamp, event.gradients)
        return [Send(self.server, message, GRADIENT)]

    def _uncount(self) -> None:
        self.pushed -= 1
        self.log.take_back()

    # Weights: from the server to the first member, then down the tree of the group.

    def _answered_early(self, event: Received[PullAnswer], now: float) -> list[Action]:
        self._early = event
        return []

    def _answered(self, event: Received[PullAnswer], now: float) -> list[Action]:
        return [*(Send(to, event.message) for to in self._receivers), *super()._answered(event, now)]

    def _pulled(self, event: Received[Weights], now: float) -> list[Action]:
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._hand_on(event) or self._advance(now)

    def _hand_on(self, event: Received[Weights]) -> list[Action]:
        self._handing_on = len(self._receivers)
        return [Send(to, event.message, WEIGHTS) for to in self._receivers]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == GRADIENT:
            return self._delivered(event, now)
        self._handing_on -= 1
        return self._advance(now)

    def _sent_while_computing(self, event: Sent, now: float) -> list[Action]:
        return self._request.take(event) if event.buffer == ACTIVATIONS else self._handed_on(event, now)

    def _handed_on(self, event: Sent, now: float) -> list[Action]:
        self._handing_on -= 1
        return []

    def _advance(self, now: float) -> list[Action]:
        if self._handing_on:
            return []
        # If the first member has forwarded an answer, the others continue, so it must continue with them.
        stopping = self._stopping
        self._stopping = stopping and not (self._leads and self._answered_at is not None)
        actions = super()._advance(now)
        self._stopping = stopping
        return actions

    # The end: the first member notifies the others, and sends them the number of pushed gradients.

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        if not self._leads and self._together > event.message.pushed:
            self._uncount()
        return super()._stop_soon(event, now)

    def _leave(self, now: float) -> list[Action]:
        stop = Stop(self.id, self._together)
        actions: list[Action] = [Send(to, stop) for to in self._receivers]
        *report, _ = super()._leave(now)
        if not self._leads:
            return actions + report
        in_all = self._before + self._together * (1 + len(self._members))
        return [*actions, *report, Send(self.server, ChildDone(self.id, in_all))]
