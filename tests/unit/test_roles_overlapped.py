"""The learner that overlaps: exact traces, and what must hold whatever comes first."""

from hypothesis import given
from hypothesis import strategies as st
from role_traces import DONE, HASHED, START, STOP, computed, feed, job, machine, rows_sent

from rudra.core.actions import Action, Compute, Receive, Send
from rudra.core.events import Event, Received, Sent, Started
from rudra.core.messages import (
    ChildDone,
    GradientApplied,
    MessageKind,
    PushedGradient,
    Weights,
)
from rudra.roles.learner import LearnerState
from rudra.roles.overlapped import OverlappedLearner

ROOT, STATISTICS, SELF = 0, 1, 2
W0, W1, W2 = "weights", "weights 1", "weights 2"
G0, G1 = "gradient 0", "gradient 1"
LEAVES = ["MINIBATCHES@0 to T", "LEARNERS@0 to T", "CHILD_DONE@0 to S"]


def new(**options: int) -> OverlappedLearner:
    """Learner 0 of three on a node: it gets weights from the root and hands them on to two."""
    role = machine(SELF, job("async", 3, topology={"name": "adv*", "options": options}))
    assert isinstance(role, OverlappedLearner)
    return role


def weights(timestamp: int, buffer: str) -> Received:
    return Received(Weights(ROOT, timestamp), buffer)


def delivered(buffer: str) -> Sent:
    return Sent(buffer, ROOT)


def handed_on(buffer: str, *learners: int) -> list[Sent]:
    return [Sent(buffer, SELF + i) for i in learners]


def computing(**options: int) -> OverlappedLearner:
    """It computes its first gradient, and has handed on the first weights."""
    role = new(**options)
    feed(role, Started(), weights(0, W0), HASHED, START, *handed_on(W0, 1, 2))
    return role


def test_overlapped_learner_until_its_first_gradient() -> None:
    role = new()
    assert feed(role, Started()) == ["receive weights from S"]
    assert feed(role, weights(0, W0)) == [
        "WEIGHTS@0 to L1 [weights]",
        "WEIGHTS@0 to L2 [weights]",
        "receive weights 1 from S",
        "hash weights",
    ]
    assert feed(role, HASHED) == ["READY@0 to S"]
    assert feed(role, START) == ["compute 0 weights gradient 0"]


def test_it_goes_on_computing_while_a_gradient_is_delivered() -> None:
    role = computing()
    assert feed(role, computed(0)) == ["GRADIENT@0 to S [gradient 0]", "compute 1 weights gradient 1"]
    assert feed(role, delivered(G0)) == []
    assert feed(role, computed(1)) == ["GRADIENT@0 to S [gradient 1]", "compute 2 weights gradient 0"]


def test_no_push_begins_before_the_one_before_is_delivered() -> None:
    role = computing()
    feed(role, computed(0))
    assert feed(role, computed(1)) == []
    assert role.waiting_for == "the parameter server to take gradient 0"
    assert feed(role, delivered(G0)) == ["GRADIENT@0 to S [gradient 1]", "compute 2 weights gradient 0"]


def applied(timestamp: int) -> Received:
    return Received(GradientApplied(ROOT, timestamp))


def test_a_learner_with_too_many_outstanding_gradients_waits_for_weights_that_hold_them() -> None:
    role = computing(outstanding=1)
    assert feed(role, computed(0)) == ["GRADIENT@0 to S [gradient 0]"]
    assert role.waiting_for == "weights from the parameter server that hold more of its gradients (it has timestamp 0)"
    assert feed(role, delivered(G0)) == []
    assert "compute" not in " ".join(feed(role, weights(1, W1))), "these hold another learner's"
    assert feed(role, applied(2), *handed_on(W1, 1, 2)) == []
    assert feed(role, weights(2, W2))[-1] == "compute 1 weights 2 gradient 1"
    feed(role, *handed_on(W2, 1, 2))
    feed(role, computed(1), delivered(G1), weights(5, W0))
    assert role.state is LearnerState.HELD, "nobody has said that these hold it"
    assert feed(role, applied(4)) == ["compute 2 weights gradient 0"]
    assert [row["step"] for row in rows_sent(role.log.diary.flush(0.0), MessageKind.MINIBATCHES)] == [0, 1]


def test_a_learner_that_is_held_stops_at_once() -> None:
    role = computing(outstanding=1)
    feed(role, computed(0), delivered(G0))
    assert feed(role, STOP) == LEAVES
    assert role.state is LearnerState.STOPPED


def test_a_minibatch_begins_with_the_newest_weights() -> None:
    role = computing()
    assert feed(role, weights(3, W1)) == [
        "WEIGHTS@3 to L1 [weights 1]",
        "WEIGHTS@3 to L2 [weights 1]",
        "receive weights 2 from S",
    ]
    (push, *_) = (a for a in role.handle(computed(0), 1.0) if isinstance(a, Send))
    assert push.message.gradients[0].timestamp == push.message.timestamp == 0, "computed before they came"
    assert push.message.held == -1, "it asks for nothing"
    assert role.timestamp == 3
    feed(role, delivered(G0))
    assert feed(role, computed(1)) == ["GRADIENT@3 to S [gradient 1]", "compute 2 weights 1 gradient 0"]


def test_on_each_edge_the_latest_weights_win() -> None:
    role = computing()
    feed(role, weights(3, W1))
    assert feed(role, weights(4, W2)) == [], "all three are in use: one computes, one is handed on, one is the newest"
    assert feed(role, *handed_on(W1, 1)) == ["WEIGHTS@4 to L1 [weights 2]"]
    assert feed(role, *handed_on(W1, 2)) == ["WEIGHTS@4 to L2 [weights 2]", "receive weights 1 from S"]
    assert feed(role, weights(6, W1)) == []
    assert feed(role, computed(0))[1:] == ["compute 1 weights 1 gradient 1", "receive weights from S"]
    assert feed(role, weights(8, W0)) == []
    assert feed(role, *handed_on(W2, 2)) == ["WEIGHTS@8 to L2 [weights]"], "6 is skipped"


def test_weights_that_nobody_uses_any_more_make_room() -> None:
    role = computing()
    feed(role, weights(3, W1), *handed_on(W1, 1, 2))
    assert feed(role, weights(4, W2)) == [
        "WEIGHTS@4 to L1 [weights 2]",
        "WEIGHTS@4 to L2 [weights 2]",
        "receive weights 1 from S",
    ]


def pushed(role: OverlappedLearner, *events: Event) -> tuple[int, int]:
    """Gradients pushed as the learner reports it, in its row and its farewell."""
    actions = [action for event in events for action in role.handle(event, 1.0)]
    (row,) = rows_sent(actions, MessageKind.LEARNERS)
    (bye,) = (a.message.pushed for a in actions if isinstance(a, Send) and isinstance(a.message, ChildDone))
    assert role.state is LearnerState.STOPPED
    return int(row["pushed"]), bye


def test_it_leaves_when_the_gradient_at_hand_is_ready() -> None:
    role = computing()
    assert feed(role, STOP) == []
    assert feed(role, computed(0)) == LEAVES
    assert feed(role, DONE) == ["halt"]


def test_it_leaves_when_the_last_gradient_is_delivered() -> None:
    role = computing()
    feed(role, computed(0), STOP)
    assert feed(role, computed(1)) == []
    assert role.waiting_for == "the parameter server to take gradient 0"
    assert pushed(role, delivered(G0)) == (1, 1), "the gradient that was ready after the stop is not pushed"


def test_a_gradient_that_waits_for_its_turn_is_pushed_though_training_has_ended() -> None:
    role = computing()
    feed(role, computed(0), computed(1), STOP)
    assert feed(role, delivered(G0)) == ["GRADIENT@0 to S [gradient 1]"]
    assert pushed(role, delivered(G1)) == (2, 2)


def test_it_leaves_when_the_weights_that_it_hands_on_are_there() -> None:
    role = computing()
    feed(role, weights(3, W1), STOP)
    assert feed(role, computed(0)) == []
    assert role.waiting_for == "learner 1 to take weights, learner 2 to take weights"
    assert feed(role, weights(5, W2)) == ["receive weights from S"], "nobody is to wait with weights for it"
    assert feed(role, *handed_on(W1, 1)) == []
    assert pushed(role, *handed_on(W1, 2)) == (0, 0)
    assert feed(role, weights(6, W0)) == ["receive weights 1 from S"]


@given(st.integers(0, 40), st.lists(st.integers(0, 10**6), min_size=40, max_size=40))
def test_whatever_comes_first(stop_at: int, choices: list[int]) -> None:
    """Any order of what can happen: deliveries, arrivals, gradients, and a stop at some moment."""
    world = World()
    for moment, choice in enumerate(choices):
        world.step(choice, stops=moment == stop_at)
    world.finish()


class World:
    """What is around a learner: whatever it has begun ends at any time. It checks what the learner asks for."""

    def __init__(self) -> None:
        self.role = new()
        self.now, self.root_timestamp = 0.0, 0
        self.posted: list[str] = []
        self.sending: list[Send] = []
        self.computing: Compute | None = None
        self.complete: dict[str, int] = {}  # buffer -> timestamp
        self.given = {SELF + 1: -1, SELF + 2: -1}
        self.steps: list[int] = []
        self.stopped = self.left = False
        for event in (Started(), weights(0, W0), HASHED, START):
            if isinstance(event, Received) and event.buffer:
                self.arrive()
            else:
                self.handle(event)

    def handle(self, event: Event) -> None:
        actions = self.role.handle(event, self.now)
        self.role.validate()
        for action in actions:
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case Receive(buffer):
                lent = {send.buffer for send in self.sending}
                assert buffer not in lent, "what is handed on is not overwritten"
                assert self.computing is None or buffer != self.computing.weights
                assert not self.posted, "one is open at a time"
                self.complete.pop(buffer, None)
                self.posted.append(buffer)
            case Compute(step, _, buffer, gradient):
                assert self.computing is None
                assert all(send.buffer != gradient for send in self.sending)
                assert self.complete[buffer] == max(self.complete.values()), "the newest that is complete"
                assert step == len(self.steps)
                self.computing = action
            case Send(to, message, buffer) if message.kind is MessageKind.WEIGHTS:
                assert self.complete[buffer] == message.timestamp == max(self.complete.values())
                assert message.timestamp > self.given[to], "nothing twice, and nothing older"
                assert all(send.to != to for send in self.sending), "one at a time on each edge"
                self.given[to] = message.timestamp
                self.sending.append(action)
            case Send(_, PushedGradient() as message):
                assert not any(send.message.kind is MessageKind.GRADIENT for send in self.sending)
                (pushed_,) = message.gradients
                assert pushed_.step == len(self.steps), "every gradient, in order"
                self.steps.append(pushed_.step)
                self.sending.append(action)
            case Send(_, ChildDone(pushed=pushed)):
                assert pushed == len(self.steps)
                assert not self.sending
                assert self.computing is None
                self.left = True

    def arrive(self) -> None:
        buffer = self.posted.pop()
        self.complete[buffer] = self.root_timestamp
        timestamp, self.root_timestamp = self.root_timestamp, self.root_timestamp + 1
        self.handle(weights(timestamp, buffer))

    def compute(self) -> None:
        step, self.computing = self.computing.step, None
        self.handle(computed(step))

    def deliver(self, place: int) -> None:
        send = self.sending.pop(place)
        self.handle(Sent(send.buffer or "", send.to))

    def stop(self) -> None:
        self.stopped = True
        self.handle(STOP)

    def step(self, choice: int, *, stops: bool) -> None:
        """One of the things that can happen."""
        self.now += 1.0
        if stops:
            self.stop()
        things = len(self.sending) + (self.computing is not None) + bool(self.posted)
        if not things:
            return
        place = choice % things
        if place < len(self.sending):
            self.deliver(place)
        elif self.computing is not None and place == len(self.sending):
            self.compute()
        else:
            self.arrive()

    def finish(self) -> None:
        """What is under way ends; then the learner has left."""
        if not self.stopped:
            self.stop()
        while self.computing is not None or self.sending:
            if self.computing is not None:
                self.compute()
            else:
                self.deliver(0)
        assert self.left
