"""Learners of compute groups: exact traces of two groups of two, and of replicas that two learners keep."""

from typing import Any

import pytest
from role_traces import (
    DIGEST,
    DONE,
    HASHED,
    SAMPLES,
    START,
    STOP,
    answer,
    brief,
    computed,
    feed,
    job,
    machine,
    names_of,
    rows_sent,
    sent_gradient,
    updated,
)

from rudra.core.actions import Reduce, Send
from rudra.core.events import Computed, Event, Received, Reduced, Sent, Started
from rudra.core.messages import (
    ChildDone,
    GroupFlags,
    MessageKind,
    Ready,
    ReportedRows,
    Shutdown,
    Stop,
    TrainingStarted,
    Weights,
)
from rudra.roles import Machine
from rudra.roles.group_learner import GroupLearner
from rudra.roles.learner import LearnerState
from rudra.roles.replica import Replica, ReplicaState

ROOT, STATISTICS, FIRST, SECOND = 0, 1, 2, 3
SENT = Sent("gradient", ROOT)
HANDED_ON = Sent("weights", SECOND)


def reduced(step: int, timestamp: int = 0) -> Reduced:
    return Reduced(
        step, tuple(sent_gradient(learner, step, timestamp) for learner in (0, 1)), (GroupFlags(), GroupFlags())
    )


def weights(timestamp: int, sender: int = ROOT) -> Received:
    return Received(Weights(sender, timestamp), "weights")


def new(role: int) -> GroupLearner:
    made = machine(role, job("async", 4, topology={"name": "groups", "options": {"groups": 2}}))
    assert isinstance(made, GroupLearner)
    return made


def leading() -> GroupLearner:
    """The first member of the first group; it computes."""
    role = new(FIRST)
    ready = Received(Ready(SECOND, DIGEST))
    feed(role, Started(), weights(0), HASHED, ready, HANDED_ON, START)
    assert role.state is LearnerState.COMPUTING
    return role


def following() -> GroupLearner:
    """The second; it computes, too."""
    role = new(SECOND)
    feed(role, Started(), weights(0, FIRST), HASHED, Received(TrainingStarted(FIRST, 0)))
    assert role.state is LearnerState.COMPUTING
    return role


# Start.


def test_the_first_member_receives_and_reports_for_all() -> None:
    role = new(FIRST)
    assert feed(role, Started()) == ["receive weights from S"]
    assert feed(role, weights(0)) == ["hash weights", "WEIGHTS@0 to L1 [weights]"]
    assert feed(role, HASHED) == []
    assert feed(role, Received(Ready(SECOND, DIGEST))) == ["READY@0 to S"]
    assert feed(role, HANDED_ON) == []
    assert feed(role, START) == ["START@0 to L1", "compute 0 weights gradient"]


def test_other_members_receive_from_it_and_report_to_it() -> None:
    role = new(SECOND)
    assert feed(role, Started()) == ["receive weights from L0"]
    assert feed(role, weights(0, FIRST), HASHED) == ["hash weights", "READY@0 to L0"]
    assert feed(role, Received(TrainingStarted(FIRST, 0))) == ["compute 0 weights gradient"]


def test_other_initial_weights_in_a_group_end_the_run() -> None:
    role = new(FIRST)
    feed(role, Started(), weights(0), Received(Ready(SECOND, 8)))
    assert feed(role, HASHED) == ["fail learners of compute group 0 received different initial weights"]


# One mini-batch.

REDUCE = ["reduce gradient of step 0 in group 0"]


def test_the_first_member_pushes_the_groups_average_and_hands_weights_on() -> None:
    role = leading()
    assert feed(role, computed(0)) == REDUCE
    (push,) = role.handle(reduced(0), 1.0)
    assert brief(push, names_of(role.plan)) == "GRADIENT@0 to S [gradient]"
    assert isinstance(push, Send)
    assert push.message.gradients == reduced(0).gradients
    assert push.message.held == 0, "it asks for newer weights than these"
    assert feed(role, SENT) == []
    assert feed(role, answer(2)) == ["TIMESTAMP@2 to L1", "receive weights from S"]
    assert feed(role, weights(2)) == ["WEIGHTS@2 to L1 [weights]"]
    assert feed(role, HANDED_ON) == ["compute 1 weights gradient"]
    assert role.timestamp == 2


def test_the_others_push_nothing_and_wait_for_what_is_handed_on() -> None:
    role = following()
    assert feed(role, computed(0)) == REDUCE
    assert feed(role, reduced(0)) == []
    assert role.waiting_for == "learner 0 to hand on weights"
    assert feed(role, answer(2, FIRST)) == ["receive weights from L0"]
    assert feed(role, weights(2, FIRST)) == ["compute 1 weights gradient"]


@pytest.mark.parametrize(
    ("timestamp", "wanted"), [(0, ["compute 1 weights gradient"]), (2, ["receive weights from L0"])]
)
def test_an_answer_may_come_before_the_reduction_has_ended_here(timestamp: int, wanted: list[str]) -> None:
    role = following()
    feed(role, computed(0))
    assert role.waiting_for == "the gradients of compute group 0"
    assert feed(role, answer(timestamp, FIRST)) == []
    assert feed(role, reduced(0)) == wanted


def test_weights_go_down_a_tree_of_the_group() -> None:
    """Of four: the first sends to two, and the second on to the fourth."""
    run = job("async", 8, topology={"name": "groups", "options": {"groups": 2}})
    role = machine(SECOND, run)
    assert feed(role, Started(), weights(0, FIRST)) == [
        "receive weights from L0",
        "hash weights",
        "WEIGHTS@0 to L3 [weights]",
    ]
    feed(role, HASHED, Sent("weights", 5), Received(TrainingStarted(FIRST, 0)), computed(0), reduced(0))
    assert feed(role, answer(1, FIRST)) == ["TIMESTAMP@1 to L3", "receive weights from L0"]
    assert feed(role, weights(1, FIRST)) == ["WEIGHTS@1 to L3 [weights]"]
    assert feed(role, Sent("weights", 5)) == ["compute 1 weights gradient"]


# Stop at every moment.

ROWS = ["MINIBATCHES@0 to T", "LEARNERS@0 to T"]
LEAVES = ["STOP@0 to L1", *ROWS, "CHILD_DONE@0 to S"]
ON = ["compute 1 weights gradient"]


@pytest.mark.parametrize(
    ("before", "after", "pushed"),
    [
        # What has happened when the stop comes; what follows, and what it leads to; gradients pushed.
        ([], [(computed(0), REDUCE), (reduced(0), LEAVES)], 0),
        ([computed(0)], [(reduced(0), LEAVES)], 0),
        ([computed(0), reduced(0)], [(SENT, LEAVES)], 1),
        ([computed(0), reduced(0), answer(0)], [(SENT, ON)], None),
        (
            [computed(0), reduced(0), SENT, answer(2)],
            [(weights(2), ["WEIGHTS@2 to L1 [weights]"]), (HANDED_ON, ON)],
            None,
        ),
        ([computed(0), reduced(0), SENT, answer(2), weights(2)], [(HANDED_ON, ON)], None),
        ([computed(0), reduced(0), answer(2), weights(2), HANDED_ON], [(SENT, ON)], None),
    ],
)
def test_when_the_first_member_is_told_to_stop(
    before: list[Event], after: list[tuple[Event, list[str]]], pushed: int | None
) -> None:
    """Whom it has told to go on, it goes on with: their next gradients are reduced, and not pushed."""
    role = leading()
    feed(role, *before)
    assert feed(role, STOP) == []
    if pushed is None:
        step = ["reduce gradient of step 1 in group 0"]
        after, pushed = [*after, (computed(1), step), (reduced(1), LEAVES)], 1
    actions: list[Any] = []
    for event, wanted in after:
        actions = role.handle(event, 1.0)
        role.validate()
        assert [brief(action, names_of(role.plan)) for action in actions] == wanted
    (row,) = rows_sent(actions, MessageKind.LEARNERS)
    assert (row["pushed"], row["samples"]) == (pushed, SAMPLES * pushed)
    messages = [a.message for a in actions if isinstance(a, Send) and not isinstance(a.message, ReportedRows)]
    assert messages == [Stop(FIRST, pushed), ChildDone(FIRST, 2 * pushed)], "for both members"
    assert feed(role, DONE) == ["halt"]


def test_a_stop_after_the_delivery_is_an_answer() -> None:
    role = leading()
    feed(role, computed(0), reduced(0), SENT)
    assert feed(role, STOP) == LEAVES


@pytest.mark.parametrize(
    ("before", "stop", "after", "pushed"),
    [
        ([computed(0)], 0, [(reduced(0), ROWS)], 0),  # the first member was told while they reduced: it did not push
        ([computed(0)], 1, [(reduced(0), ROWS)], 1),  # it did, and was told afterwards
        ([computed(0), reduced(0)], 0, ROWS, 0),
        ([computed(0), reduced(0)], 1, ROWS, 1),
        ([computed(0), reduced(0), answer(0, FIRST), computed(1), reduced(1)], 1, ROWS, 1),
        ([computed(0), reduced(0), answer(0, FIRST), computed(1)], 1, [(reduced(1), ROWS)], 1),
    ],
)
def test_when_the_others_are_told_to_stop(before: list[Event], stop: int, after: list[Any], pushed: int) -> None:
    role = following()
    feed(role, *before)
    actions = role.handle(Received(Stop(FIRST, stop)), 1.0)
    if after is not ROWS:
        assert actions == []
        ((event, after),) = after
        actions = role.handle(event, 1.0)
    assert [brief(action, names_of(role.plan)) for action in actions] == after
    (row,) = rows_sent(actions, MessageKind.LEARNERS)
    assert (row["pushed"], row["samples"]) == (pushed, SAMPLES * pushed)
    assert feed(role, DONE) == ["halt"]


# Replicas: one group, and no parameter server.

T, L0, L1 = 0, 1, 2


def replica(role: int, samples: int = 10**6, **tables: Any) -> Replica:
    training = {"epochs": 1}
    made = machine(role, job("hardsync", 2, topology={"name": "groups"}, training=training, **tables), samples)
    assert isinstance(made, Replica)
    return made


def training(role: int, samples: int = 10**6) -> Replica:
    made = replica(role, samples)
    events = [Received(Ready(L1, DIGEST))] if role == L0 else [Received(TrainingStarted(L0, 0))]
    feed(made, Started(), HASHED, *events)
    assert made.state is ReplicaState.COMPUTING
    return made


def averaged(step: int, *digests: int) -> Reduced:
    gradients = tuple(sent_gradient(learner, step, step) for learner in range(len(digests)))
    return Reduced(step, gradients, tuple(GroupFlags(digest) for digest in digests))


def test_replicas_compare_their_initial_weights_and_start() -> None:
    first, second = replica(L0), replica(L1)
    assert feed(first, Started()) == feed(second, Started()) == ["hash weights"]
    assert feed(first, HASHED) == []
    assert feed(second, HASHED) == ["READY@0 to L0"]
    assert feed(first, Received(Ready(L1, DIGEST))) == ["START@0 to T", "START@0 to L1", "compute 0 weights gradient"]
    assert feed(second, Received(TrainingStarted(L0, 0))) == ["compute 0 weights gradient"]


def test_replicas_of_different_initial_weights_end_the_run() -> None:
    first = replica(L0)
    feed(first, Started(), HASHED)
    assert feed(first, Received(Ready(L1, 8))) == ["fail learners hold different initial weights (digests differ)"]


@pytest.mark.parametrize("role", [L0, L1])
def test_every_replica_updates_by_the_same_average(role: int) -> None:
    made = training(role)
    assert feed(made, computed(0)) == ["reduce gradient of step 0 in group 0 to all"]
    (update,) = feed(made, averaged(0, 0, 0))
    assert update.startswith("update by gradient at ")
    assert feed(made, updated(1, digest=5)) == ["compute 1 weights gradient"]
    (reduce,) = made.handle(computed(1), 2.0)
    assert isinstance(reduce, Reduce)
    assert (reduce.word.digest, reduce.gradient.timestamp) == (5, 1), "a digest of the weights goes with the gradient"


@pytest.mark.parametrize("role", [L0, L1])
def test_weights_that_differ_end_the_run(role: int) -> None:
    made = training(role)
    feed(made, computed(0), averaged(0, 0, 0), updated(1, digest=2**63 + 5), computed(1))
    digests = (2**63 + 5, 5) if role == L0 else (5, 2**63 + 5)
    (fail,) = feed(made, averaged(1, *digests))
    other = 1 if role == L0 else 0
    assert fail == f"fail its weights at timestamp 1 differ from those of learner {other}, although they must not"


def test_the_first_replica_keeps_the_books() -> None:
    kinds = []
    for role in (L0, L1):
        made = training(role, 2 * SAMPLES)
        feed(made, computed(0))
        events = (averaged(0, 0, 0), updated(1, digest=5))
        actions: list[Machine] | list[Any] = [action for event in events for action in made.handle(event, 3.0)]
        made.validate()
        kinds.append({a.message.kind for a in actions if isinstance(a, Send)})
        assert made.state is ReplicaState.STOPPED
        (row,) = rows_sent(actions, MessageKind.LEARNERS)
        assert (row["learner"], row["pushed"], row["samples"]) == (role - L0, 1, SAMPLES)
        totals = [r.item()[:-1] for r in rows_sent(actions, MessageKind.TOTALS)]
        assert totals == ([(1, 2 * SAMPLES, 2, 2, 0, 0, 0)] if role == L0 else [])
        assert len(list(rows_sent(actions, MessageKind.GRADIENTS))) == (2 if role == L0 else 0)
        feed(made, *[Sent("weights", T)] * (role == L0))
        assert feed(made, Received(Shutdown(T, 0, apart=False))) == ["halt"]
    rows = {MessageKind.MINIBATCHES, MessageKind.LEARNERS}
    assert kinds == [
        rows | {MessageKind.GRADIENTS, MessageKind.UPDATES, MessageKind.SNAPSHOT, MessageKind.TOTALS},
        rows,
    ]


def test_a_replica_whose_loss_is_not_finite_stops() -> None:
    made = training(L1)
    told = feed(made, Computed(0, float("nan"), 1, SAMPLES))
    assert told[-1].startswith("fail the loss of mini-batch 0 is nan")
