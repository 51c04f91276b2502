"""All roles: what a state does not allow raises and changes nothing; and the learner's exact traces."""

import copy
import math
import pickle
from enum import Enum
from typing import Any, get_args

import numpy as np
import pytest
from role_traces import (
    DIGEST,
    DONE,
    FIRST_LEARNER,
    HASHED,
    SERVER,
    START,
    STATISTICS,
    STOP,
    answer,
    any_message,
    brief,
    bye,
    computed,
    feed,
    gradient,
    job,
    machine,
    rows_sent,
    sent_gradient,
    updated,
)

from rudra.core import records
from rudra.core.actions import Action, Fail, Send
from rudra.core.events import (
    ActivationsReady,
    Committed,
    Computed,
    Decided,
    Evaluated,
    EvaluationPartComputed,
    Event,
    Hashed,
    Lost,
    MemoryExhausted,
    NormsComputed,
    ReceiveCancelled,
    Received,
    Reduced,
    ReplicaStepped,
    Saved,
    Sent,
    SharedRead,
    Started,
    Stopped,
    Tick,
    TrainedInPlace,
    Updated,
    UpdatesFound,
)
from rudra.core.messages import (
    DESCRIBED,
    ROWS,
    AssignWork,
    EvaluatePart,
    GroupFlags,
    LearnerRows,
    Message,
    MessageKind,
    Ready,
    Snapshot,
    TotalsRows,
    TrainingStarted,
    Weights,
)
from rudra.errors import ProtocolError
from rudra.job.job import Job
from rudra.job.tables import FaultToleranceTable
from rudra.roles import Machine
from rudra.roles import averaging as averaging_
from rudra.roles import group_learner as group_
from rudra.roles import learner as learner_
from rudra.roles import overlapped as overlapped_
from rudra.roles import replica as replica_
from rudra.roles import server as server_
from rudra.roles import sharded as sharded_
from rudra.roles import stage_server as stages_
from rudra.roles import statistics as statistics_
from rudra.roles import tree as tree_
from rudra.roles.machine import short_digest

READY = [Received(Ready(FIRST_LEARNER + i, DIGEST)) for i in range(2)]
SENT = Sent("gradient", SERVER)


def weights(timestamp: int) -> Received:
    return Received(Weights(SERVER, timestamp), "weights")


def computing(**faults: Any) -> Machine:
    """A learner that computes its first gradient since time 0."""
    role = machine(FIRST_LEARNER, job("async", fault_tolerance=FaultToleranceTable(**faults).model_dump()))
    feed(role, Started(), weights(0), HASHED, START)
    return role


def message(action: Action) -> Message:
    assert isinstance(action, Send)
    return action.message


def exchanging() -> Machine:
    role = computing()
    feed(role, computed(0), now=1.0)
    return role


# The learner.


def test_learner_until_its_first_gradient() -> None:
    role = machine(FIRST_LEARNER, job("async"))
    assert feed(role, Started()) == ["receive weights from S"]
    assert feed(role, weights(0)) == ["hash weights"]
    (ready,) = role.handle(HASHED, 0.0)
    assert (brief(ready), message(ready).digest) == ("READY@0 to S", 0x0123456789ABCDEF >> 1)
    assert feed(role, START) == ["compute 0 weights gradient"]
    (push,) = role.handle(computed(0), 1.0)
    assert brief(push) == "GRADIENT@0 to S [gradient]"
    assert message(push).gradients == (sent_gradient(0, 0, 0),)


NEXT = ["compute 1 weights gradient"]
PULL = ["receive weights from S"]
LEAVE = ["MINIBATCHES@0 to T", "LEARNERS@0 to T", "CHILD_DONE@0 to S"]


@pytest.mark.parametrize(
    "steps",
    [
        [(SENT, []), (answer(0), NEXT)],  # nothing newer: no pull
        [(answer(0), []), (SENT, NEXT)],
        [(SENT, []), (answer(3), PULL), (weights(3), NEXT)],
        [(answer(3), PULL), (SENT, []), (weights(3), NEXT)],
        [(answer(3), PULL), (weights(3), []), (SENT, NEXT)],
        [(SENT, []), (STOP, LEAVE)],
        [(STOP, []), (SENT, LEAVE)],
        [(answer(3), PULL), (STOP, []), (weights(3), []), (SENT, LEAVE)],
        [(SENT, []), (answer(3), PULL), (STOP, []), (weights(3), LEAVE)],
        [(answer(3), PULL), (SENT, []), (STOP, []), (weights(3), LEAVE)],
        [(answer(0), []), (STOP, []), (SENT, LEAVE)],
    ],
)
def test_learner_goes_on_or_leaves_when_no_transfer_is_under_way(steps: list[tuple[Event, list[str]]]) -> None:
    role = exchanging()
    for event, expected in steps:
        assert feed(role, event) == expected


def test_learner_computes_at_the_weights_it_pulled() -> None:
    role = exchanging()
    feed(role, SENT, answer(5), weights(5))
    (push,) = role.handle(computed(1), 2.0)
    assert brief(push) == "GRADIENT@5 to S [gradient]"
    assert (message(push).timestamp, message(push).gradients[0].timestamp) == (5, 5)


def test_learner_told_to_stop_while_computing_pushes_no_more() -> None:
    role = computing()
    assert feed(role, STOP) == []
    actions = role.handle(computed(0), 1.0)
    assert [brief(a) for a in actions] == LEAVE
    assert message(actions[-1]).pushed == 0
    assert feed(role, DONE) == ["halt"]


def times(role: Machine, last: Event, now: float) -> dict[str, float]:
    (row,) = rows_sent(role.handle(last, now), MessageKind.LEARNERS)
    return {name: float(row[name]) for name in ("compute_s", "push_s", "wait_s", "pull_s")}


def test_learner_accounts_for_its_time() -> None:
    role = exchanging()  # computed from 0 to 1
    for event, now in ((SENT, 3.0), (answer(1), 6.0), (weights(1), 10.0), (computed(1), 15.0), (SENT, 16.0)):
        role.handle(event, now)
    assert times(role, STOP, 19.0) == {"compute_s": 1 + 5, "push_s": 2 + 1, "wait_s": 3 + 3, "pull_s": 4}


def test_answers_before_the_delivery_cost_no_waiting() -> None:
    role = exchanging()
    role.handle(answer(0), 2.0)
    role.handle(SENT, 4.0)
    role.handle(STOP, 5.0)
    assert times(role, computed(1), 6.0) == {"compute_s": 1 + 2, "push_s": 3, "wait_s": 0, "pull_s": 0}


def reported(now_and_events: list[tuple[float, Event]], start_s: float = 0.0) -> list[np.void]:
    """Rows of the mini-batches of a learner that lives through this; it reports each as soon as it is over."""
    role = machine(FIRST_LEARNER, job("async").with_(results={"report_s": 0.0}))
    feed(role, Started(), weights(0), HASHED)
    role.handle(Received(TrainingStarted(SERVER, round(start_s * 1e9))), start_s)
    actions = [action for now, event in now_and_events for action in role.handle(event, start_s + now)]
    return list(rows_sent(actions, MessageKind.MINIBATCHES))


@pytest.mark.parametrize(
    ("events", "times"),
    [
        ([(1.0, computed(0)), (3.0, SENT), (6.0, answer(1)), (10.0, weights(1))], (1, 1, 2, 3, 4)),
        ([(1.0, computed(0)), (3.0, SENT), (6.0, answer(0))], (1, 1, 2, 3, 0)),
        ([(1.0, computed(0)), (3.0, answer(1)), (6.0, SENT), (10.0, weights(1))], (1, 1, 5, 0, 4)),
        ([(1.0, computed(0)), (3.0, answer(1)), (4.0, weights(1)), (6.0, SENT)], (1, 1, 5, 0, 0)),
        ([(1.0, computed(0)), (3.0, SENT), (6.0, STOP)], (1, 1, 2, 3, 0)),
        ([(0.5, STOP), (1.0, computed(0))], (1, 1, 0, 0, 0)),
    ],
)
def test_times_of_a_minibatch_follow_each_other_since_the_common_start(
    events: list[tuple[float, Event]], times: tuple[float, ...]
) -> None:
    """Columns: ready, computing, pushing, waiting, pulling."""
    (row,) = reported(events, start_s=100.0)
    assert [row[name] for name in ("time_s", "compute_s", "push_s", "wait_s", "pull_s")] == pytest.approx(list(times))
    assert [row[name] for name in ("learner", "samples", "step", "timestamp", "loss", "errors")] == [0, 4, 0, 0, 0.5, 1]


def test_the_next_minibatch_begins_where_the_last_exchange_ended() -> None:
    first = [(1.0, computed(0)), (3.0, SENT), (6.0, answer(1)), (10.0, weights(1))]
    one, two = reported([*first, (15.0, computed(1)), (16.0, SENT), (17.0, answer(1))])
    assert one["time_s"] + one["push_s"] + one["wait_s"] + one["pull_s"] == two["time_s"] - two["compute_s"] == 10.0
    assert (two["timestamp"], two["step"]) == (1, 1)


def test_learner_counts_pulls_and_gradients() -> None:
    role = exchanging()
    feed(role, SENT, answer(0), computed(1), SENT, answer(2), weights(2), computed(2), SENT, answer(2), STOP)
    (row,) = rows_sent(role.handle(computed(3), 9.0), MessageKind.LEARNERS)
    assert [row[k] for k in ("learner", "world_rank", "pushed", "samples", "pulls", "skipped_pulls")] == [
        0,
        2,
        3,
        12,
        1,
        2,
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("timestamp", "hint"),
    [(0, "at the initial weights; do model, loss and data fit?"), (3, "a smaller learning_rate may help")],
)
def test_non_finite_loss_stops(loss: float, timestamp: int, hint: str) -> None:
    role = computing()
    feed(role, computed(0), SENT, answer(0), now=0.5)
    role.timestamp = timestamp
    actions = role.handle(computed(1, loss), 1.0)
    assert [brief(a) for a in actions[:-1]] == ["MINIBATCHES@0 to T"], "what was measured so far is kept"
    assert actions[-1] == Fail(f"the loss of mini-batch 1 is {loss}: {hint}")
    before, last = rows_sent(actions, MessageKind.MINIBATCHES)
    assert (before["step"], before["loss"]) == (0, 0.5)
    assert (last["step"], str(last["loss"]), last["compute_s"], last["push_s"]) == (1, str(loss), 0.5, 0.0)


def test_non_finite_loss_warns_once() -> None:
    role = computing(non_finite_loss="warn")
    wanted = feed(role, computed(0, math.nan), SENT, answer(0), computed(1, math.nan))
    assert [text for text in wanted if text.startswith("warn the loss of mini-batch 0 is nan")]
    assert sum(text.startswith("warn") for text in wanted) == 1
    assert sum(text.startswith("GRADIENT") for text in wanted) == 2


# Every state of every role, and what it does not allow.


def row(kind: MessageKind) -> np.ndarray:
    return np.zeros(1, ROWS[kind])


def account(learner: int) -> np.ndarray:
    rows = row(MessageKind.LEARNERS)
    rows["learner"] = learner
    return rows


def snapshot(epoch: int) -> Received:
    rows = row(MessageKind.SNAPSHOT)
    rows["epoch"] = epoch
    return Received(Snapshot(SERVER, 0, epoch, rows), "snapshot 0")


PLAIN = job("async", training={"epochs": 1})
DEALT = job("hogbatch", hogbatch={"workers": [{"kind": "large"}]}, training={"epochs": 1, "evaluate": "workers"})
WORK = Received(AssignWork(SERVER, 0, 0, 0.0, np.array([(0, 4)], records.WORK)))
NOTHING = np.empty(0, records.SUM)
STAGED = job("async").with_(placement={"cut": 1}, training={"epochs": 1})
STAGE = 2 + STAGED.learners
TREE = job("async", 4, topology={"name": "adv", "options": {"fan_out": 2}})
OVERLAPPED = job("async", topology={"name": "adv*", "options": {"outstanding": 2}})
GROUPS = job("async", 4, topology={"name": "groups", "options": {"groups": 2}})
TESTED = {"epochs": 2, "evaluate": "always"}
REPLICAS = job("async", topology={"name": "groups"}, training=TESTED).with_(cluster={"learners": 3})
OVERLAPS = {learner_.LearnerState.HELD, learner_.LearnerState.LEAVING}
AVERAGES = {learner_.LearnerState.STEPPING}
TESTS = {learner_.LearnerState.TESTING}
"""Of a learner that overlaps alone, of one that averages alone, and of one that tests."""


def from_(sender: int, kind: MessageKind, buffer: str | None = None, **more: Any) -> Received:
    fields = {"gradients": (sent_gradient(0, 0, 0),)} if kind in DESCRIBED else {}
    return Received(any_message(kind, sender, **fields, **more), buffer)


def reduced(*learners: int) -> Reduced:
    return Reduced(0, tuple(sent_gradient(learner, 0, 0) for learner in learners), (GroupFlags(),) * len(learners))


LIVES: dict[str, tuple[Job, int, set[Any], list[Event]]] = {
    "learner": (
        PLAIN,
        FIRST_LEARNER,
        {*learner_.LearnerState} - TESTS - OVERLAPS - AVERAGES,
        [Started(), weights(0), HASHED, START, computed(0), SENT, STOP, DONE],
    ),
    "worker": (
        DEALT,
        FIRST_LEARNER,
        {*learner_.LearnerState} - OVERLAPS - AVERAGES,
        [
            *(Started(), weights(0), HASHED, START, WORK, computed(0), SENT),
            *(Received(EvaluatePart(SERVER, 1, 0)), weights(1), EvaluationPartComputed(0, NOTHING), STOP, DONE),
        ],
    ),
    "learner of the first layers": (
        STAGED,
        FIRST_LEARNER,
        {*learner_.LearnerState} - TESTS - OVERLAPS - AVERAGES,
        [
            *(Started(), weights(0), HASHED, START, ActivationsReady(0), Sent("activations", STAGE)),
            *(from_(STAGE, MessageKind.ACTIVATION_GRADIENT, "returned"), computed(0), SENT, STOP, DONE),
        ],
    ),
    "stage server": (
        STAGED,
        STAGE,
        {*sharded_.ShardState},
        [
            Started(),
            START,
            from_(FIRST_LEARNER, MessageKind.ACTIVATIONS, "activations 2"),
            computed(0),
            updated(1),
            DONE,
        ],
    ),
    "overlapped learner": (
        OVERLAPPED,
        FIRST_LEARNER,
        {*learner_.LearnerState} - TESTS - AVERAGES,
        [
            *(Started(), weights(0), HASHED, START, computed(0), computed(1), Sent("gradient 0", SERVER), STOP),
            *(Sent("gradient 1", SERVER), Sent("weights", FIRST_LEARNER + 1), DONE),
        ],
    ),
    "group learner": (
        GROUPS,
        FIRST_LEARNER,
        {*learner_.LearnerState} - TESTS - OVERLAPS - AVERAGES,
        [
            *(Started(), weights(0), HASHED, from_(FIRST_LEARNER + 1, MessageKind.READY, digest=DIGEST)),
            *(Sent("weights", FIRST_LEARNER + 1), START, computed(0), reduced(0, 1), SENT, STOP, DONE),
        ],
    ),
    "replica": (
        REPLICAS,
        1,
        {*replica_.ReplicaState} - {*replica_.AVERAGING, replica_.ReplicaState.POOLING},
        [
            *(Started(), HASHED, *(from_(i, MessageKind.READY, digest=DIGEST) for i in (2, 3))),
            *(Lost(3), Saved(0), from_(0, MessageKind.ROWS_FLUSHED), Committed(0), Started(), HASHED),
            *(from_(2, MessageKind.READY, digest=DIGEST), computed(0), reduced(0, 1), updated(1)),
            *(computed(1), reduced(0, 1), Sent("snapshot", 0), updated(2), Sent("weights", 0), DONE),
        ],
    ),
    "tree server": (
        TREE,
        2,
        {*tree_.TreeServerState},
        [
            *(Started(), Received(Weights(SERVER, 0), "weights 0"), HASHED),
            *(Sent("weights 0", 4), Sent("weights 0", 5)),
            *(from_(child, MessageKind.READY, digest=DIGEST) for child in (4, 5)),
            *(START, from_(4, MessageKind.GRADIENT, "gradient 0"), STOP, Sent("gradient 0", SERVER)),
            *(from_(4, MessageKind.CHILD_DONE, pushed=1), from_(5, MessageKind.CHILD_DONE), DONE),
        ],
    ),
    "server": (
        PLAIN,
        SERVER,
        {*server_.ServerState},
        [
            Started(),
            HASHED,
            *READY,
            *(Sent("weights", FIRST_LEARNER + i) for i in range(2)),
            gradient(0, 0, 0, "gradient 0"),
            Sent("weights", FIRST_LEARNER),
            updated(1),
            gradient(1, 0, 0, "gradient 1"),
            bye(0, 1),
            bye(1, 1),
            updated(2),
            DONE,
        ],
    ),
    "statistics": (
        PLAIN,
        STATISTICS,
        {*statistics_.StatisticsState},
        [
            Started(),
            START,
            snapshot(1),
            HASHED,
            Evaluated("snapshot 0", (), 0.0),
            Received(TotalsRows(SERVER, row(MessageKind.TOTALS))),
            *(Received(LearnerRows(2 + i, account(i))) for i in range(2)),
        ],
    ),
}


def states(run: Job, role: int, events: list[Event]) -> dict[Enum, Machine]:
    """A machine in each state that the events lead through, as late in that state as they do."""
    living = machine(role, run, training_samples=5)
    seen = {living.state: copy.deepcopy(living)}
    for event in events:
        feed(living, event)
        seen[living.state] = copy.deepcopy(living)
    return seen


def test_a_role_that_refuses_an_event_shows_those_before_it() -> None:
    role = computing()
    with pytest.raises(ProtocolError) as error:
        role.handle(weights(1), 2.5)
    line, title, *events = error.value.report.splitlines()
    assert line == "rudra: learner 0 cannot take WEIGHTS while COMPUTING"
    assert title == "The last events of learner 0:"
    assert [event.split()[2:] for event in events] == [
        ["WAITING", "Started"],
        ["WAITING", "WEIGHTS", "from", "parameter", "server"],
        ["HASHING", "Hashed"],
        ["READY", "START", "from", "parameter", "server"],
    ]


def test_a_role_that_fails_shows_its_last_fifty_events() -> None:
    role = computing()
    for step in range(30):
        role.handle(computed(step), step)
        feed(role, SENT, answer(0))
    with pytest.raises(TypeError) as error:
        role.handle(Computed(30, None, 0, 0), 1.0)  # type: ignore[arg-type]
    (story,) = error.value.__notes__
    assert len(story.splitlines()) == 51
    assert story.splitlines()[-1].split()[2:] == ["COMPUTING", "Computed"]


def any_event(trigger: Any) -> Event:
    if isinstance(trigger, MessageKind):
        fields: dict[str, Any] = {"rows": row(trigger)} if trigger in ROWS else {}
        fields |= {"gradients": (sent_gradient(0, 0, 0),)} if trigger is MessageKind.GRADIENT else {}
        return Received(any_message(trigger, FIRST_LEARNER, **fields), "gradient 0")
    return {
        Started: Started(),
        Sent: Sent("weights", FIRST_LEARNER),
        Hashed: HASHED,
        Updated: updated(1),
        Computed: computed(0),
        ActivationsReady: ActivationsReady(0),
        ReplicaStepped: ReplicaStepped(0.0),
        NormsComputed: NormsComputed(bytes(4)),
        Reduced: reduced(0),
        TrainedInPlace: TrainedInPlace(()),
        SharedRead: SharedRead(1.0),
        UpdatesFound: UpdatesFound(FIRST_LEARNER, ()),
        Evaluated: Evaluated("snapshot 0", (), 0.0),
        Decided: Decided(1, 0, 0.0, ""),
        EvaluationPartComputed: EvaluationPartComputed(0, NOTHING),
        ReceiveCancelled: ReceiveCancelled("gradient 0"),
        Saved: Saved(0),
        Committed: Committed(0),
        Stopped: Stopped(),
        Tick: Tick(),
    }[trigger]


EVENTS = [event for event in get_args(Event) if event not in {Received[Message], Lost, MemoryExhausted}]
TRIGGERS = [*MessageKind, *EVENTS]


@pytest.mark.parametrize(("run", "role", "all_states", "events"), LIVES.values(), ids=LIVES)
def test_what_a_state_does_not_allow_raises_and_changes_nothing(
    run: Job, role: int, all_states: set[Any], events: list[Event]
) -> None:
    seen = states(run, role, events)
    assert set(seen) == all_states, "the life above leads through every state"
    for state, living in seen.items():
        for trigger in TRIGGERS:
            if (state, trigger) in living.TRANSITIONS or (trigger is MessageKind.SHUTDOWN and living._dead):
                continue
            before = pickle.dumps(living)
            with pytest.raises(ProtocolError) as error:
                living.handle(any_event(trigger), 1.0)
            name = trigger.name if isinstance(trigger, MessageKind) else trigger.__name__
            assert str(error.value) == f"{living.name} cannot take {name} while {state.name}"
            assert pickle.dumps(living) == before


@pytest.mark.parametrize(
    "kind",
    [
        learner_.Learner,
        overlapped_.OverlappedLearner,
        group_.GroupLearner,
        replica_.Replica,
        averaging_.Averager,
        server_.ParameterServer,
        sharded_.FirstShard,
        sharded_.ShardedLearner,
        tree_.TreeServer,
        stages_.StageServer,
        statistics_.StatisticsServer,
    ],
)
def test_transitions_name_methods_and_triggers_that_exist(kind: type[Machine]) -> None:
    for (_, trigger), to in kind.TRANSITIONS.items():
        assert trigger in {*TRIGGERS, Lost, MemoryExhausted}
        assert callable(getattr(kind, to.method))


@pytest.mark.parametrize(
    ("digest", "number"), [("", 0), ("f" * 64, 2**63 - 1), ("0123456789abcdef" + "f" * 48, 0x0123456789ABCDEF >> 1)]
)
def test_short_digests_fit_into_a_message(digest: str, number: int) -> None:
    assert short_digest(digest) == number


# Rows on their way.


def exchanged(role: Machine, step: int, now: float) -> list[np.void]:
    """Rows of mini-batches that a learner sends in the course of one more of them."""
    events = (computed(step), SENT, answer(0))
    return [row for event in events for row in rows_sent(role.handle(event, now), MessageKind.MINIBATCHES)]


def test_minibatch_rows_are_sent_by_time_or_number() -> None:
    role = machine(FIRST_LEARNER, job("async").with_(results={"report_s": 2.0}))
    feed(role, Started(), weights(0), HASHED, START)
    assert [len(exchanged(role, step, step + 1.0)) for step in range(4)] == [0, 2, 0, 2]
    role = computing()
    sent = [r for step in range(100) for r in exchanged(role, step, 1.0)]
    assert [r["step"] for r in sent] == list(range(96))
    assert sent[0].dtype == records.MINIBATCH


def test_minibatches_are_not_reported_if_the_job_says_so() -> None:
    role = machine(FIRST_LEARNER, job("async").with_(results={"minibatches": False, "report_s": 0.0}))
    feed(role, Started(), weights(0), HASHED, START)
    assert not [r for step in range(60) for r in exchanged(role, step, step + 1.0)]
    feed(role, computed(60), SENT)
    assert [brief(a) for a in role.handle(STOP, 99.0)] == ["LEARNERS@0 to T", "CHILD_DONE@0 to S"]


@pytest.mark.parametrize(
    "event", [ActivationsReady(0), Received(any_message(MessageKind.ACTIVATION_GRADIENT, SERVER)), SENT]
)
def test_activations_at_a_learner_with_all_layers_raise(event: Event) -> None:
    role = computing()
    with pytest.raises(ProtocolError, match="a learner with all layers cannot take"):
        role.handle(event, 1.0)
