"""The parameter server: exact traces of small cases with two learners."""

import math
from typing import Any

import pytest
from role_traces import (
    DIGEST,
    DONE,
    FIRST_LEARNER,
    HASHED,
    SAMPLES,
    SERVER,
    STATISTICS,
    brief,
    bye,
    feed,
    gradient,
    job,
    machine,
    returned,
    rows_sent,
    sent_gradient,
    updated,
)

from protocols import Clock, Protocol
from rudra.core.actions import Receive, Send, Update
from rudra.core.events import Event, Lost, Received, Sent, Started, Stopped
from rudra.core.messages import (
    GradientPart,
    MessageKind,
    PartTaken,
    PushedGradient,
    Ready,
    SnapshotCredit,
    TrainingStarted,
)
from rudra.core.schedule import Schedule
from rudra.job.tables import OptimizerTable
from rudra.roles.multi_owner import NUMBER
from rudra.roles.server import ParameterServer, ServerState

G0, G1 = "gradient 0", "gradient 1"
CREDIT = Received(SnapshotCredit(STATISTICS))


def ready(learner: int, digest: int = DIGEST) -> Received:
    return Received(Ready(FIRST_LEARNER + learner, digest))


def new(name: str, samples: int = 10**6, **tables: Any) -> ParameterServer:
    role = machine(SERVER, job(name, optimizer={"learning_rate": 1.0}, **tables), samples)
    assert isinstance(role, ParameterServer)
    return role


def training(name: str, samples: int = 10**6, **tables: Any) -> ParameterServer:
    role = new(name, samples, **tables)
    feed(role, Started(), HASHED, *returned(0, 1), ready(0), ready(1))
    assert role.state is ServerState.TRAINING
    return role


# Start.


def test_training_starts_when_all_hold_the_weights_and_have_said_so() -> None:
    role = new("hardsync")
    assert feed(role, Started()) == ["hash weights"]
    assert feed(role, HASHED) == ["WEIGHTS@0 to L0 [weights]", "WEIGHTS@0 to L1 [weights]"]
    assert feed(role, *returned(0), ready(1), ready(0)) == [], "the weights of learner 1 are still lent"
    assert feed(role, *returned(1)) == [
        "START@0 to T",
        "START@0 to L0",
        "START@0 to L1",
        "receive gradient 0 from L0",
        "receive gradient 1 from L1",
    ]


def test_everybody_is_told_the_moment_of_the_start_and_rows_count_from_it() -> None:
    role = new("async")
    feed(role, Started(), HASHED, *returned(0, 1), ready(0))
    started = [a.message for a in role.handle(ready(1), 100.25) if isinstance(a, Send)]
    assert started == [TrainingStarted(SERVER, 100_250_000_000)] * 3
    role.handle(gradient(0, 0, 0, G0), 103.25)
    role.handle(updated(1), 103.5)
    (row,) = rows_sent(role.ledger.outbox.flush(104.0), MessageKind.UPDATES)
    assert row["time_s"] == 3.0


def test_other_initial_weights_end_the_run() -> None:
    role = new("async")
    feed(role, Started(), HASHED, *returned(0, 1), ready(0))
    assert feed(role, ready(1, digest=8)) == [
        "fail learner 1 received other initial weights than were sent (digests differ)"
    ]


# Updates and answers: a gradient asks for newer weights.


def test_one_update_of_hardsync() -> None:
    role = training("hardsync", protocol={"reference_batch_size": 2 * SAMPLES})
    assert feed(role, gradient(0, 0, 0, G0)) == []
    assert feed(role, gradient(1, 0, 0, G1)) == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 1",
        "TIMESTAMP@1 to L0",
        "WEIGHTS@1 to L0 [weights]",
        "TIMESTAMP@1 to L1",
        "WEIGHTS@1 to L1 [weights]",
        "receive gradient 1 from L0",
        "receive gradient 0 from L1",
    ]


def test_hardsync_adds_in_learner_order_whoever_is_first() -> None:
    role = training("hardsync")
    assert feed(role, gradient(1, 0, 0, G1)) == [], "learner 1 waits in its buffer"
    assert role.pending == 1
    assert feed(role, gradient(0, 0, 0, G0))[:2] == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 0.25",
    ]


def test_one_softsync_counts_gradients_of_whomever() -> None:
    role = training("softsync")
    assert feed(role, gradient(0, 0, 0, G0)) == ["TIMESTAMP@0 to L0"], "nothing newer: answered at once, and no weights"
    assert feed(role, gradient(0, 1, 0, G1)) == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 1",
        "TIMESTAMP@1 to L0",
        "WEIGHTS@1 to L0 [weights]",
        "receive gradient 1",
        "receive gradient 0",
    ]


def test_async_updates_at_once() -> None:
    role = training("async")
    assert feed(role, gradient(1, 0, 0, G0)) == [
        "update by gradient 0 at 0.5",
        "TIMESTAMP@1 to L1",
        "WEIGHTS@1 to L1 [weights]",
        "receive gradient 0",
    ]


def test_an_update_names_the_timestamp_that_it_makes() -> None:
    role = training("async")
    actions = [a for step in range(3) for a in role.handle(gradient(0, step, step, G0), 0.0) + feed_back(role)]
    assert [a.timestamp for a in actions if isinstance(a, Update)] == [1, 2, 3]


def feed_back(role: ParameterServer) -> list[Any]:
    """The weights that went to learner 0 are back."""
    return role.handle(returned(0)[0], 0.0)


def test_an_update_waits_for_lent_weights_and_answers_wait_for_the_update() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0))  # the weights go to learner 0
    assert feed(role, gradient(1, 0, 0, G1)) == []
    assert feed(role, *returned(0)) == [
        "update by gradient 1 at 0.5",
        "TIMESTAMP@2 to L1",
        "WEIGHTS@2 to L1 [weights]",
        "receive gradient 1",
    ]


def test_gradients_that_arrive_while_the_weights_are_lent_are_handled_one_by_one() -> None:
    """Whose gradient made an update has its answer before the next gradient is looked at (rudra.txt §3.2)."""
    role = training("async")
    feed(role, gradient(0, 0, 0, G0))
    feed(role, gradient(1, 0, 0, G0))  # due: waits in the accumulator
    assert feed(role, gradient(0, 1, 1, G1)) == []
    assert role.pending == 2
    assert feed(role, *returned(0)) == [
        "update by gradient 0 at 0.5",
        "TIMESTAMP@2 to L1",
        "WEIGHTS@2 to L1 [weights]",
        "receive gradient 0",
    ]
    assert feed(role, *returned(1)) == [
        "update by gradient 1 at 0.5",
        "TIMESTAMP@3 to L0",
        "WEIGHTS@3 to L0 [weights]",
        "receive gradient 1",
    ]


def test_updates_while_one_of_two_transfers_is_under_way_wait_too() -> None:
    role = training("hardsync")
    feed(role, gradient(0, 0, 0, G0), gradient(1, 0, 0, G1))  # the new weights go to both
    assert feed(role, *returned(0), gradient(0, 1, 1, G1)) == []
    assert feed(role, gradient(1, 1, 1, G0)) == ["gradient 1 takes 0.5 of 1 * gradient 0", "receive gradient 0 from L0"]
    assert feed(role, *returned(1))[0] == "update by gradient 1 at 0.25"


class Turns(Protocol):
    """Nobody is answered before everybody has pushed as often."""

    def __init__(self, learners: int, gradients: int = 3) -> None:
        super().__init__(learners)
        self.gradients_per_update = gradients

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return clock.pushed[learner] <= min(clock.pushed)


class QuietTurns(Turns):
    grants_on_push = False


@pytest.mark.parametrize(
    ("rule", "answered"), [(Turns, ["TIMESTAMP@0 to L0", "TIMESTAMP@0 to L1"]), (QuietTurns, ["TIMESTAMP@0 to L1"])]
)
def test_a_gradient_without_an_update_may_release_others(rule: type[Protocol], answered: list[str]) -> None:
    role = training("async", protocol={"name": rule, "modulation": "none"})
    assert feed(role, gradient(0, 0, 0, G0)) == []
    told = feed(role, gradient(1, 0, 0, G1))
    assert [text for text in told if text.startswith("TIMESTAMP")] == answered


def test_who_is_not_answered_is_asked_about_again_after_each_update() -> None:
    role = training("async", protocol={"name": QuietTurns, "options": {"gradients": 1}, "modulation": "none"})
    feed(role, gradient(0, 0, 0, G0))
    told = feed(role, gradient(1, 0, 0, G0))
    assert [text for text in told if "to L" in text] == [
        "TIMESTAMP@2 to L0",
        "WEIGHTS@2 to L0 [weights]",
        "TIMESTAMP@2 to L1",
        "WEIGHTS@2 to L1 [weights]",
    ]


@pytest.mark.parametrize(
    ("modulation", "samples", "trace"),
    [
        ("none", SAMPLES, ["update by gradient 0 at 1"]),
        ("mean_staleness", SAMPLES, ["update by gradient 0 at 0.333333"]),
        ("gradient_staleness", SAMPLES, ["gradient 0 takes 1 of 0.333333 * gradient 0", "update by gradient 0 at 1"]),
        ("none", 2, ["update by gradient 0 at 1"]),
    ],
)
def test_weights_of_a_gradient_of_staleness_3(modulation: str, samples: int, trace: list[str]) -> None:
    role = training("async", protocol={"modulation": modulation})
    for step in range(3):
        feed(role, gradient(0, step, step, G0), *returned(0))
    told = feed(role, gradient(1, 0, 0, G0, samples))
    assert told == [*trace, "TIMESTAMP@4 to L1", "WEIGHTS@4 to L1 [weights]", "receive gradient 0"]


def test_gradients_are_averaged_by_their_samples() -> None:
    role = training("softsync")
    feed(role, gradient(0, 0, 0, G0, samples=6))
    assert feed(role, gradient(1, 0, 0, G1, samples=2))[:2] == [
        "gradient 0 takes 0.25 of 1 * gradient 1",
        "update by gradient 0 at 1",
    ]


# Rows.


def test_rows_say_what_went_into_the_updates() -> None:
    role = training("softsync", samples=4 * SAMPLES)
    arriving = [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 0)]
    actions = []
    for time, (learner, step, timestamp) in enumerate(arriving, start=1):
        actions += role.handle(gradient(learner, step, timestamp, (G1, G0)[time % 2]), float(time))
        if time % 2 == 0:
            actions += role.handle(updated(time // 2, digest=2**64 - time, seconds=0.125 * time), time + 0.5)
            actions += role.handle(returned(learner)[0], time + 0.5)
    actions += role.ledger.outbox.flush(9.0)
    gradients = list(rows_sent(actions, MessageKind.GRADIENTS))
    assert [(r["learner"], r["step"], r["timestamp"]) for r in gradients] == arriving
    assert [r["update"] for r in gradients] == [1, 1, 2, 2]
    assert [r["staleness"] for r in gradients] == [0, 0, 0, 1]
    assert [(r["samples"], r["scale"], r["loss"], r["errors"]) for r in gradients] == [(SAMPLES, 1.0, 0.5, 1)] * 4
    updates = [r.item() for r in rows_sent(actions, MessageKind.UPDATES)]
    assert updates == [(1, 1, 2, 8, 1.0, 0.0, 2.0, 0.25, 2**64 - 2), (2, 1, 2, 8, 1.0, 0.5, 4.0, 0.5, 2**64 - 4)]
    (epoch,) = (a.message.rows[0] for a in actions if getattr(a, "buffer", None) == "snapshot")  # type: ignore[union-attr]
    assert epoch.item()[:9] == (1, 0, 2, 16, 4.0, 0.25, 1.0, 0.5, 0.25)
    unknown = ("test_loss", "test_error", "validation_loss", "validation_error", "evaluation_began_s", "evaluation_s")
    assert all(math.isnan(epoch[name]) for name in unknown)
    assert epoch["weights_sha256"] == b""


def test_two_updates_may_begin_before_the_first_one_is_told_to_be_over() -> None:
    """An update is done before the next action, but its end is an event, and those wait their turn."""
    role = training("async")
    actions = role.handle(gradient(0, 0, 0, G0), 1.0) + role.handle(returned(0)[0], 1.0)
    actions += role.handle(gradient(1, 0, 1, G0), 2.0)
    assert not list(rows_sent(actions, MessageKind.UPDATES))
    feed(role, updated(1, 11, 0.1), updated(2, 22, 0.2))
    rows = rows_sent(role.ledger.outbox.flush(9.0), MessageKind.UPDATES)
    assert [(r["timestamp"], r["digest"], r["update_s"], r["time_s"]) for r in rows] == [
        (1, 11, 0.1, 1),
        (2, 22, 0.2, 2),
    ]


def test_an_aggregate_counts_as_the_gradients_that_it_stands_for() -> None:
    """Two gradients in one tensor, which a server between learners and root sent."""
    role = training("softsync", protocol={"modulation": "gradient_staleness"})
    for step in range(2):
        feed(role, gradient(0, 2 * step, step, G0), gradient(0, 2 * step + 1, step, G1), *returned(0))
    both = (sent_gradient(0, 4, 1, samples=3), sent_gradient(1, 0, 0, samples=5))
    event = Received(PushedGradient(FIRST_LEARNER, 1, 0, both), G0)
    told = feed(role, event)
    assert told[:1] == ["update by gradient 0 at 1"], "staleness 1 and 2; the whole has one weight, the first's"
    rows = list(rows_sent(role.ledger.outbox.flush(9.0), MessageKind.GRADIENTS))[-2:]
    assert [(r["learner"], r["samples"], r["staleness"], r["update"]) for r in rows] == [(0, 3, 1, 3), (1, 5, 2, 3)]
    assert (role.membership.pushed, role.received) == ([5, 1], 6)


def test_the_schedule_counts_completed_epochs() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 3}, protocol={"modulation": "none"})
    role.ledger.rules.schedule = Schedule.stepped(OptimizerTable(learning_rate=1.0), (1, 2))
    told = [text for step in range(2) for text in feed(role, gradient(0, step, step, G0), *returned(0))]
    told += feed(role, gradient(0, 2, 2, G0))
    rates = [text for text in told if "update" in text]
    assert [text.split()[-1] for text in rates] == ["1", "0.1", "0.01"]


# Epochs and the end.


def test_an_epoch_without_credit_is_skipped_and_the_last_waits_for_one() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 4})
    back = [*returned(0), Sent("snapshot", STATISTICS)]
    told = [feed(role, gradient(0, i, i, G0), updated(i + 1), *back) for i in range(3)]

    def update(timestamp: int, *epoch: str) -> list[str]:
        """Rows of an update are known when it is over, so they come with the next epoch's."""
        rows = ["GRADIENTS@0 to T"] if timestamp == 1 else ["UPDATES@0 to T", "GRADIENTS@0 to T"]
        answer = [f"TIMESTAMP@{timestamp} to L0", f"WEIGHTS@{timestamp} to L0 [weights]"]
        return ["update by gradient 0 at 0.5", *rows, *epoch, *answer, "receive gradient 0"]

    assert told[0] == update(1, "copy weights snapshot", "SNAPSHOT@1 to T [snapshot]")
    assert told[1] == update(2, "copy weights snapshot", "SNAPSHOT@2 to T [snapshot]")
    assert told[2] == update(3, "EPOCHS@0 to T")
    rows = ["UPDATES@0 to T", "GRADIENTS@0 to T"]
    stops = ["STOP@0 to L0", "STOP@0 to L1"]
    assert feed(role, gradient(0, 3, 3, G0)) == ["update by gradient 0 at 0.5", *rows, *stops, "receive gradient 0"]
    assert feed(role, CREDIT) == ["SNAPSHOT@4 to T [weights]"], "the weights themselves: they change no more"


def test_an_epoch_is_skipped_while_the_last_snapshot_is_still_lent() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 9})
    assert "SNAPSHOT@1 to T [snapshot]" in feed(role, gradient(0, 0, 0, G0), *returned(0))
    assert "EPOCHS@0 to T" in feed(role, gradient(0, 1, 1, G0), *returned(0))
    feed(role, Sent("snapshot", STATISTICS))
    assert "SNAPSHOT@3 to T [snapshot]" in feed(role, gradient(0, 2, 2, G0))


@pytest.mark.parametrize("evaluate", [False, True])
def test_snapshots_are_sent_whether_they_are_tested_or_not(evaluate: bool) -> None:
    """They are hashed in any case."""
    role = training("async", samples=SAMPLES, training={"epochs": 9, "evaluate": evaluate})
    assert "SNAPSHOT@1 to T [snapshot]" in feed(role, gradient(0, 0, 0, G0))


def test_overshoot_carries_over() -> None:
    """Epochs of 6 samples in gradients of 4: they end with gradients 2, 3 and 5."""
    role = training("async", samples=6, training={"epochs": 9})
    told = [feed(role, gradient(0, i, i, G0), *returned(0)) for i in range(5)]
    ends = [any("EPOCHS" in text or "SNAPSHOT" in text for text in texts) for texts in told]
    assert ends == [False, True, True, False, True]


def test_one_update_may_end_several_epochs() -> None:
    role = training("async", samples=1, training={"epochs": 3})
    told = feed(role, gradient(0, 0, 0, G0))
    assert [text for text in told if "EPOCHS" in text or "SNAPSHOT" in text] == [
        "SNAPSHOT@1 to T [snapshot]",
        "EPOCHS@0 to T",
        "SNAPSHOT@1 to T [weights]",
    ]


def test_the_end_waits_for_every_gradient_and_counts_it() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0), updated(1))
    assert role.state is ServerState.DRAINING
    assert feed(role, Sent("weights", STATISTICS), bye(1, 1), bye(0, 1)) == []
    actions = role.handle(gradient(1, 0, 0, G1), 5.0)
    role.validate()
    assert [brief(a) for a in actions] == ["receive gradient 1", "UPDATES@0 to T", "TOTALS@0 to T"]
    (totals,) = rows_sent(actions, MessageKind.TOTALS)
    assert totals.item()[:-1] == (1, SAMPLES, 2, 1, 0, 1, 0)
    assert feed(role, DONE) == ["halt"]


def test_a_gradient_that_comes_after_the_end_is_not_answered() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 1})
    assert not [text for text in feed(role, gradient(0, 0, 0, G0)) if "TIMESTAMP" in text], "a stop is the answer"
    assert feed(role, gradient(1, 0, 0, G1)) == ["receive gradient 1"]


@pytest.mark.parametrize("late", range(1, 4))
def test_the_account_waits_for_everybody_and_for_the_end_of_the_last_update(late: int) -> None:
    """Rows of all updates come before the totals, whichever of the events at the end is the last one."""
    role = training("async", samples=2 * SAMPLES, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0), *returned(0), gradient(0, 1, 1, G0))
    events = [updated(1, 11), updated(2, 22), bye(0, 2), bye(1, 0)]
    events.append(events.pop(late))
    assert feed(role, *events[:-1]) == []
    assert role.state is ServerState.DRAINING
    actions = role.handle(events[-1], 5.0)
    assert [brief(a) for a in actions] == ["UPDATES@0 to T", "TOTALS@0 to T"]
    assert [(r["timestamp"], r["digest"]) for r in rows_sent(actions, MessageKind.UPDATES)] == [(1, 11), (2, 22)]
    assert role.state is ServerState.CLOSING


def test_gradients_that_wait_when_the_last_epoch_ends_are_discarded() -> None:
    role = training("async", samples=2 * SAMPLES, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0))
    feed(role, gradient(1, 0, 0, G0), gradient(0, 1, 1, G1))  # the weights are lent: both wait
    told = feed(role, *returned(0))
    assert "STOP@0 to L0" in told
    assert (role.ledger.applied, role.discarded, role.pending) == (2, 1, 0)


def test_training_time_ends_with_the_last_update() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 1})
    role.handle(gradient(0, 0, 0, G0), 3.0)
    role.handle(updated(1, seconds=0.5), 3.5)
    role.handle(bye(0, 1), 7.0)
    (totals,) = rows_sent(role.handle(bye(1, 0), 9.0), MessageKind.TOTALS)
    assert totals["time_s"] == 3.0


def test_whom_the_server_waits_for() -> None:
    role = new("hardsync", samples=2 * SAMPLES, training={"epochs": 1})
    feed(role, Started(), HASHED, *returned(0, 1), ready(1))
    assert role.waiting_for == "learner 0"
    feed(role, ready(0), gradient(0, 0, 0, G0))
    assert role.waiting_for == "a gradient from learner 1"
    feed(role, gradient(1, 0, 0, G1), bye(1, 1))
    assert role.waiting_for == "learner 0"
    feed(role, bye(0, 1), updated(1))
    assert role.waiting_for == "the statistics server to finish"


# A tree for the weights alone: adv* on nodes of one learner each, so that all are children of the root in it.

R0, L0 = 2, 5


def downcasting() -> ParameterServer:
    """A root with tree servers 2 to 4, and learners 5 to 7 to whom it sends weights."""
    run = job("async", 3, topology={"name": "adv*", "options": {"weight_fan_out": 3}})
    role = machine(SERVER, run, nodes=[0, 1, 2])
    assert isinstance(role, ParameterServer)
    told = feed(role, Started(), HASHED)
    assert told == ["hash weights", *(f"WEIGHTS@0 to L{i} [weights]" for i in range(3))]
    readies = [Received(Ready(R0 + i, DIGEST)) for i in range(3)]
    told = feed(role, *(Sent("weights", L0 + i) for i in range(3)), *readies)
    assert told == ["START@0 to T", *(f"START@0 to R{i}" for i in range(3)), "receive gradient 0", "receive gradient 1"]
    return role


def unasking(sender: int, step: int) -> Received:
    """A gradient of learner 0, with which nobody asks for weights."""
    return Received(PushedGradient(sender, step, -1, (sent_gradient(0, step, step),)), G0)


def update(role: ParameterServer) -> list[str]:
    """The same learner's next gradient, and what is sent down after its update."""
    first, *others, last = feed(role, unasking(R0, role.ledger.timestamp))
    assert (first.split()[0], last) == ("update", "receive gradient 0")
    return others


def back(role: ParameterServer, learner: int, copy: int) -> list[str]:
    return feed(role, Sent(f"downcast {copy}", L0 + learner))


def test_an_update_sends_a_copy_down_every_edge() -> None:
    role = downcasting()
    assert update(role) == ["copy weights downcast 0", *(f"WEIGHTS@1 to L{i} [downcast 0]" for i in range(3))]


def test_the_latest_weights_win_on_each_edge_and_updates_do_not_wait() -> None:
    role = downcasting()
    update(role)
    assert update(role) == [], "every edge is busy"
    assert back(role, 0, 0) == ["copy weights downcast 1", "WEIGHTS@2 to L0 [downcast 1]"]
    assert back(role, 1, 0) == ["WEIGHTS@2 to L1 [downcast 1]"], "the same copy"
    assert update(role) + update(role) == []
    assert back(role, 2, 0) == ["copy weights downcast 0", "WEIGHTS@4 to L2 [downcast 0]"], "2 and 3 are skipped"
    assert back(role, 0, 1) == ["WEIGHTS@4 to L0 [downcast 0]"]
    assert back(role, 1, 1) + back(role, 2, 0) == ["WEIGHTS@4 to L1 [downcast 0]"], "nothing newer for learner 2"


def test_two_copies_are_enough_for_any_number_of_edges() -> None:
    """An idle edge waits while both are under way, and gets the newest weights then."""
    role = downcasting()
    update(role)
    update(role)
    back(role, 0, 0)
    update(role)
    assert back(role, 1, 0) == [], "downcast 0 goes to learner 2, downcast 1 to learner 0"
    assert update(role) == []
    assert back(role, 0, 1) == [
        "copy weights downcast 1",
        "WEIGHTS@4 to L0 [downcast 1]",
        "WEIGHTS@4 to L1 [downcast 1]",
    ]


def test_the_account_waits_for_weights_on_their_way_down() -> None:
    run = job("async", 3, topology={"name": "adv*"}, training={"epochs": 1})
    role = machine(SERVER, run, 2 * SAMPLES)
    assert isinstance(role, ParameterServer)
    ready_ = [ready(i) for i in range(3)]
    feed(role, Started(), HASHED, Sent("weights", FIRST_LEARNER), *ready_)
    feed(role, unasking(FIRST_LEARNER, 0), updated(1), unasking(FIRST_LEARNER, 1), updated(2))
    feed(role, Sent("weights", STATISTICS))
    assert role.state is ServerState.DRAINING
    assert feed(role, bye(0, 2), bye(1, 0), bye(2, 0)) == [], "learner 0 has not got the weights of update 1"
    assert feed(role, Sent("downcast 0", FIRST_LEARNER))[-1] == "TOTALS@0 to T"


# Losses.


def fails(learner: int) -> Lost:
    return Lost(FIRST_LEARNER + learner)


def test_a_run_that_is_stopped_while_an_update_waits_ends_without_it() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), updated(1))
    assert feed(role, gradient(1, 0, 0, G1), fails(0)) == [], "learner 0 is being sent weights"
    wanted = feed(role, Stopped())
    assert wanted[:2] == ["STOP@0 to L0", "STOP@0 to L1"]
    assert "warn learner 0 (rank 2) died; training had ended" in wanted
    feed(role, *returned(0))
    assert role.state is ServerState.DRAINING
    feed(role, bye(1, 1))
    assert role.state is ServerState.CLOSING


def test_when_training_has_ended_even_the_last_learner_may_die() -> None:
    role = training("hardsync", 2 * SAMPLES * 2, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0), gradient(1, 0, 0, G1), updated(1), *returned(0, 1))
    feed(role, gradient(0, 1, 1, G0), gradient(1, 1, 1, G1), updated(2))
    assert role.state is ServerState.DRAINING
    assert not any(text.startswith("fail") for text in feed(role, fails(0), fails(1)))
    assert role.state is ServerState.CLOSING
    assert feed(role, bye(1, 2)) == [], "it had said so before it died"


def test_who_stops_with_a_loss_lets_in_what_is_under_way() -> None:
    role = training("hardsync", fault_tolerance={"on_learner_loss": "stop"})
    assert feed(role, gradient(1, 0, 0, G1)) == []
    assert feed(role, fails(0)) == [
        "warn learner 0 (rank 2) died; 1 learner is left, 1 gradient makes an update",
        "STOP@0 to L1",
        "receive gradient 0",
        "receive gradient 1",
    ]


# Shards.


@pytest.mark.parametrize("died_first", [False, True])
def test_a_push_of_a_dead_learner_that_waits_for_a_buffer_is_let_in_by_no_shard(died_first: bool) -> None:
    """The two shards have four buffers for five learners; the next buffer is for a learner that is alive."""
    run = job("softsync", 5, protocol={"n": 1}, topology={"name": "sharded", "options": {"shards": 2}})
    plan = run.plan()
    role, learners, (_, other) = machine(SERVER, run), plan.learners, plan.owners

    def let_in(*events: Event) -> list[int | None]:
        """The learners whose parts the shards now let in."""
        actions = [action for event in events for action in role.handle(event, 0.0)]
        role.validate()
        own = [action.source for action in actions if isinstance(action, Receive)]
        assert own == [row["role"] for row in rows_sent(actions, MessageKind.LOG) if row["what"] == NUMBER[Receive]]
        return own

    def told(learner: int, step: int = 0) -> Received:
        gradients = (sent_gradient(learner, step, 0),)
        return Received(PushedGradient(learners[learner], 0, 0, gradients))

    def parts(learner: int) -> tuple[Received, Received]:
        part = Received(GradientPart(learners[learner]), f"gradient {learner}")
        return part, Received(PartTaken(other, learner + 1))

    ready = (Ready(learner, DIGEST) for learner in learners)
    let_in(Started(), HASHED, *(Sent("weights", learner) for learner in learners), *map(Received, ready))
    assert let_in(*map(told, range(4))) == list(learners[:4])
    end = Lost(learners[4]), told(4)
    assert let_in(*(end if died_first else reversed(end))) == []
    assert let_in(*parts(0), *parts(1)) == [], "the second of the two buffers is free again"
    assert let_in(told(0, 1)) == [learners[0]]
