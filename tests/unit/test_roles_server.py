"""The parameter server: exact traces of small cases with two learners."""

from typing import Any

import pytest
from role_traces import (
    FIRST_LEARNER,
    SAMPLES,
    SERVER,
    STATISTICS,
    brief,
    bye,
    feed,
    gradient,
    job,
    machine,
    pull,
    returned,
    rows_sent,
)

from rudra.events import Hashed, Received, Sent, Started
from rudra.messages import Kind, Message
from rudra.roles import ParameterServer
from rudra.roles.server import State

G0, G1 = "gradient 0", "gradient 1"
CREDIT = Received(Message(Kind.CREDIT, STATISTICS))
DONE = Received(Message(Kind.DONE, STATISTICS))


def ready(learner: int, digest: int = 7) -> Received:
    return Received(Message(Kind.READY, FIRST_LEARNER + learner, value=digest))


def new(name: str, samples: int = 10**6, **tables: Any) -> ParameterServer:
    role = machine(SERVER, job(name, optimizer={"learning_rate": 1.0}, **tables), samples)
    assert isinstance(role, ParameterServer)
    return role


def training(name: str, samples: int = 10**6, **tables: Any) -> ParameterServer:
    role = new(name, samples, **tables)
    feed(role, Started(), Hashed(7), *returned(0, 1), ready(0), ready(1))
    assert role.state is State.TRAINING
    return role


# Start.


def test_training_starts_when_all_hold_the_weights_and_have_said_so() -> None:
    role = new("hardsync")
    assert feed(role, Started()) == ["hash weights"]
    assert feed(role, Hashed(7)) == ["WEIGHTS@0 to L0 [weights]", "WEIGHTS@0 to L1 [weights]"]
    assert feed(role, *returned(0), ready(1), ready(0)) == [], "the weights of learner 1 are still lent"
    assert feed(role, *returned(1)) == [
        "START@0 to T",
        "START@0 to L0",
        "START@0 to L1",
        "receive gradient 0 from L0",
        "receive gradient 1 from L1",
    ]


def test_other_initial_weights_end_the_run() -> None:
    role = new("async")
    feed(role, Started(), Hashed(7), *returned(0, 1), ready(0))
    assert feed(role, ready(1, digest=8)) == [
        "fail learner 1 received other initial weights than were sent (digests differ)"
    ]


# Updates and pulls.


def test_one_update_of_hardsync() -> None:
    role = training("hardsync", protocol={"reference_batch_size": 2 * SAMPLES})
    assert feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1)) == []
    assert feed(role, gradient(1, 0, 0, G1)) == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 1",
        "TIMESTAMP@1 to L0",
        "WEIGHTS@1 to L0 [weights]",
        "receive gradient 1 from L0",
        "receive gradient 0 from L1",
    ]
    assert feed(role, pull(1, 0, 1)) == ["TIMESTAMP@1 to L1", "WEIGHTS@1 to L1 [weights]"]


def test_hardsync_adds_in_learner_order_whoever_is_first() -> None:
    role = training("hardsync")
    assert feed(role, gradient(1, 0, 0, G1), pull(1, 0, 1)) == [], "learner 1 waits in its buffer"
    assert feed(role, gradient(0, 0, 0, G0))[:2] == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 0.25",
    ]


def test_one_softsync_counts_gradients_of_whomever() -> None:
    role = training("softsync")
    assert feed(role, gradient(0, 0, 0, G0)) == []
    assert feed(role, pull(0, 0, 1)) == ["TIMESTAMP@0 to L0"], "nothing newer: answered at once, and no weights"
    assert feed(role, gradient(0, 1, 0, G1), pull(0, 0, 2)) == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "update by gradient 0 at 1",
        "receive gradient 1",
        "receive gradient 0",
        "TIMESTAMP@1 to L0",
        "WEIGHTS@1 to L0 [weights]",
    ]


def test_async_updates_at_once() -> None:
    role = training("async")
    assert feed(role, gradient(1, 0, 0, G0), pull(1, 0, 1)) == [
        "update by gradient 0 at 0.5",
        "receive gradient 0",
        "TIMESTAMP@1 to L1",
        "WEIGHTS@1 to L1 [weights]",
    ]


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_a_pull_waits_for_the_gradient_that_was_pushed_before_it(protocol: str) -> None:
    """The control message overtakes the tensor; answered early, it would miss its own update."""
    role = training(protocol)
    assert feed(role, pull(0, 0, 1)) == []
    answered = [text for text in feed(role, gradient(0, 0, 0, G0)) if "L0" in text and "receive" not in text]
    assert (
        answered
        == {
            "hardsync": [],
            "softsync": ["TIMESTAMP@0 to L0"],
            "async": ["TIMESTAMP@1 to L0", "WEIGHTS@1 to L0 [weights]"],
        }[protocol]
    )


def test_an_update_waits_for_lent_weights_and_answers_wait_for_the_update() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1))  # the weights go to learner 0
    assert feed(role, gradient(1, 0, 0, G1), pull(1, 0, 1)) == []
    assert feed(role, *returned(0)) == [
        "update by gradient 1 at 0.5",
        "TIMESTAMP@2 to L1",
        "WEIGHTS@2 to L1 [weights]",
        "receive gradient 1",
    ]


def test_gradients_that_arrive_while_the_weights_are_lent_are_handled_in_order() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1))
    feed(role, gradient(1, 0, 0, G0), pull(1, 0, 1))  # due: waits in the accumulator
    assert feed(role, gradient(0, 1, 1, G1), pull(0, 1, 2)) == []
    assert role.pending == 2
    assert feed(role, *returned(0)) == [
        "update by gradient 0 at 0.5",
        "update by gradient 1 at 0.5",
        "TIMESTAMP@3 to L1",
        "WEIGHTS@3 to L1 [weights]",
        "TIMESTAMP@3 to L0",
        "WEIGHTS@3 to L0 [weights]",
        "receive gradient 0",
        "receive gradient 1",
    ]


def test_updates_while_one_of_two_transfers_is_under_way_wait_too() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1), pull(1, 0, 0))
    assert feed(role, gradient(1, 0, 0, G0), *returned(0)) == []
    assert feed(role, *returned(1))[0] == "update by gradient 0 at 0.5"


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
        feed(role, gradient(0, step, step, G0))
    assert feed(role, gradient(1, 0, 0, G0, samples))[:-1] == trace


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
    for time, (learner, step, timestamp) in enumerate(arriving):
        actions += role.handle(gradient(learner, step, timestamp, (G0, G1)[time % 2]), time + 1.0)
    gradients = list(rows_sent(actions, Kind.GRADIENTS))
    assert [(r["learner"], r["step"], r["timestamp"]) for r in gradients] == arriving
    assert [r["update"] for r in gradients] == [1, 1, 2, 2]
    assert [r["staleness"] for r in gradients] == [0, 0, 0, 1]
    updates = [r.item() for r in rows_sent(actions, Kind.UPDATES)]
    assert updates == [(1, 0, 2, 8, 1.0, 0.0, 2.0), (2, 0, 2, 8, 1.0, 0.5, 4.0)]
    (epoch,) = (a.message.rows[0] for a in actions if getattr(a, "buffer", None) == "snapshot")  # type: ignore[union-attr]
    assert epoch.item()[:9] == (1, 0, 2, 16, 4.0, 0.25, 1.0, 0.5, 0.25)


def test_the_schedule_counts_completed_epochs() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 3}, protocol={"modulation": "none"})
    role.optimizer = role.optimizer.model_copy(update={"milestones": (1, 2)})
    rates = [text for step in range(3) for text in feed(role, gradient(0, step, step, G0)) if "update" in text]
    assert [text.split()[-1] for text in rates] == ["1", "0.1", "0.01"]


# Epochs and the end.


def test_an_epoch_without_credit_is_skipped_and_the_last_waits_for_one() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 4})
    rows = ["GRADIENTS@0 to T", "UPDATES@0 to T"]
    tested = ["copy weights snapshot", "SNAPSHOT@{} to T [snapshot]"]
    told = [feed(role, gradient(0, i, i, G0), Sent("snapshot", STATISTICS)) for i in range(3)]
    receive = ["receive gradient 0"]
    assert told[0] == ["update by gradient 0 at 0.5", *rows, tested[0], tested[1].format(1), *receive]
    assert told[1] == ["update by gradient 0 at 0.5", *rows, tested[0], tested[1].format(2), *receive]
    assert told[2] == ["update by gradient 0 at 0.5", *rows, "EPOCHS@3 to T", *receive]
    stops = ["STOP@0 to L0", "STOP@0 to L1"]
    assert feed(role, gradient(0, 3, 3, G0)) == ["update by gradient 0 at 0.5", *rows, *stops, *receive]
    assert feed(role, CREDIT) == ["SNAPSHOT@4 to T [weights]"], "the weights themselves: they change no more"


def test_an_epoch_is_skipped_while_the_last_snapshot_is_still_lent() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 9})
    assert "SNAPSHOT@1 to T [snapshot]" in feed(role, gradient(0, 0, 0, G0))
    assert "EPOCHS@2 to T" in feed(role, gradient(0, 1, 1, G0))
    feed(role, Sent("snapshot", STATISTICS))
    assert "SNAPSHOT@3 to T [snapshot]" in feed(role, gradient(0, 2, 2, G0))


def test_overshoot_carries_over() -> None:
    """Epochs of 6 samples in gradients of 4: they end with gradients 2, 3 and 5."""
    role = training("async", samples=6, training={"epochs": 9, "evaluate": False})
    ends = [any("EPOCHS" in text for text in feed(role, gradient(0, i, i, G0))) for i in range(5)]
    assert ends == [False, True, True, False, True]


def test_one_update_may_end_several_epochs() -> None:
    role = training("async", samples=1, training={"epochs": 3, "evaluate": False})
    told = feed(role, gradient(0, 0, 0, G0))
    assert [text for text in told if "EPOCHS" in text or "SNAPSHOT" in text] == [
        "EPOCHS@1 to T",
        "EPOCHS@1 to T",
        "SNAPSHOT@1 to T [weights]",
    ]


def test_the_end_waits_for_every_gradient_and_counts_it() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1))
    assert role.state is State.DRAINING
    assert feed(role, Sent("weights", STATISTICS), pull(1, 0, 1), bye(1, 1), bye(0, 1)) == []
    actions = role.handle(gradient(1, 0, 0, G1), 5.0)
    role.validate()
    assert [brief(a) for a in actions] == ["receive gradient 1", "TOTALS@0 to T"]
    (totals,) = rows_sent(actions, Kind.TOTALS)
    assert totals.item()[:-1] == (1, SAMPLES, 2, 1, 0, 1, 0)
    assert feed(role, DONE) == ["halt"]


def test_gradients_that_wait_when_the_last_epoch_ends_are_discarded() -> None:
    role = training("async", samples=2 * SAMPLES, training={"epochs": 1})
    feed(role, gradient(0, 0, 0, G0), pull(0, 0, 1))
    feed(role, gradient(1, 0, 0, G0), gradient(0, 1, 1, G1))  # the weights are lent: both wait
    told = feed(role, *returned(0))
    assert "STOP@0 to L0" in told
    assert (role.applied, role.discarded, role.pending) == (2, 1, 0)


def test_training_time_ends_with_the_last_update() -> None:
    role = training("async", samples=SAMPLES, training={"epochs": 1})
    role.handle(gradient(0, 0, 0, G0), 3.0)
    role.handle(bye(0, 1), 7.0)
    (totals,) = rows_sent(role.handle(bye(1, 0), 9.0), Kind.TOTALS)
    assert totals["time_s"] == 3.0


def test_whom_the_server_waits_for() -> None:
    role = new("hardsync", samples=2 * SAMPLES, training={"epochs": 1})
    feed(role, Started(), Hashed(7), *returned(0, 1), ready(1))
    assert role.waiting_for == "learner 0"
    feed(role, ready(0), gradient(0, 0, 0, G0))
    assert role.waiting_for == "a gradient from learner 1"
    feed(role, gradient(1, 0, 0, G1), bye(1, 1))
    assert role.waiting_for == "learner 0"
    feed(role, bye(0, 1))
    assert role.waiting_for == "the statistics server to finish"
