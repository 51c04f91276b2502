"""The statistics server: exact traces of small cases with two learners."""

from typing import Any

import numpy as np
import pytest
from role_traces import FIRST_LEARNER, HASHED, SERVER, START, STATISTICS, feed, job, machine

from rudra.core import records
from rudra.core.actions import Finish, Record, Send
from rudra.core.events import Evaluated, Event, Hashed, Received, SplitMetrics, Started
from rudra.core.messages import (
    MESSAGES,
    ROWS,
    EpochEvaluated,
    EpochRows,
    EventRows,
    LearnerRows,
    MessageKind,
    PlateauReached,
    RunStopped,
    Snapshot,
    TotalsRows,
    TrainingStarted,
)
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.roles.statistics import StatisticsServer

RECORD, CREDIT = "record epochs", "SNAPSHOT_CREDIT@0 to S"
END = ["SHUTDOWN@0 to S", "SHUTDOWN@0 to L0", "SHUTDOWN@0 to L1", "halt"]


def started(epochs: int = 3, evaluate: bool = True, **results: int) -> Machine:
    asked = job("async", training={"epochs": epochs, "evaluate": evaluate}).with_(results=results)
    role = machine(STATISTICS, asked)
    feed(role, Started(), START)
    return role


def epoch(number: int, buffer: str | None = None, of: int = 3) -> Received:
    """An epoch's row, one of so many, with the weights if a buffer holds them."""
    rows = np.zeros(1, records.EPOCH)
    rows["epoch"] = number
    return Received(EpochRows(SERVER, rows) if buffer is None else Snapshot(SERVER, 0, of, rows), buffer)


def evaluated(buffer: str, error: float = 0.5) -> Evaluated:
    return Evaluated(buffer, (SplitMetrics("test", 1.5, error, (("top5_error", 0.1),)),), 2.0)


def accounts() -> list[Received]:
    totals = Received(TotalsRows(SERVER, np.zeros(1, records.TOTALS)))
    rows = np.zeros(2, records.LEARNER)
    rows["learner"] = 1, 0
    return [totals, *(Received(LearnerRows(FIRST_LEARNER, rows[i : i + 1])) for i in range(2))]


def test_it_lets_two_snapshots_in() -> None:
    role = machine(STATISTICS, job("async"))
    assert feed(role, Started()) == ["receive snapshot 0 from S", "receive snapshot 1 from S"]


def recorded(role: Machine, *events: Event, now: float = 0.0) -> list[np.void]:
    """Rows of epochs that are recorded after these events."""
    actions = [action for event in events for action in role.handle(event, now)]
    return [row for a in actions if isinstance(a, Record) and a.table == "epochs" for row in a.rows]


def test_one_snapshot_is_worked_on_while_another_waits() -> None:
    role = started()
    assert feed(role, epoch(1, "snapshot 0")) == ["hash snapshot 0"]
    assert feed(role, epoch(2, "snapshot 1")) == []
    assert feed(role, HASHED) == ["evaluate snapshot 0"]
    again = ["record metrics", RECORD, "receive snapshot 0 from S", CREDIT, "hash snapshot 1"]
    assert feed(role, evaluated("snapshot 0")) == again


def test_without_tests_snapshots_are_hashed_all_the_same() -> None:
    role = started(evaluate=False)
    assert feed(role, epoch(1, "snapshot 0"), epoch(2, "snapshot 1")) == ["hash snapshot 0"]
    again = [RECORD, "receive snapshot 0 from S", CREDIT, "hash snapshot 1"]
    assert feed(role, HASHED) == again


def test_epochs_are_recorded_in_order_though_the_skipped_are_known_first() -> None:
    role = started(4)
    assert feed(role, epoch(1, "snapshot 0", 4), epoch(2)) == ["hash snapshot 0"]
    feed(role, HASHED)
    rows = recorded(role, evaluated("snapshot 0", 0.25))
    assert [int(r["epoch"]) for r in rows] == [1, 2]
    assert [int(r["evaluated"]) for r in rows] == [1, 0]
    assert rows[0][["test_loss", "test_error", "evaluation_s"]].item() == (1.5, 0.25, 2.0)
    assert [r["weights_sha256"].decode() for r in rows] == [HASHED.digest, ""], "none where none was looked at"


def test_run_that_a_death_stopped_says_so_though_only_the_owner_noticed_it() -> None:
    role = machine(STATISTICS, job("async", fault_tolerance={"on_learner_loss": "stop"}))
    rows = np.zeros(1, records.EVENT)
    rows["kind"], rows["role"] = b"lost", FIRST_LEARNER
    feed(role, Started(), Received(EventRows(SERVER, rows)), *accounts())
    (finish, *_) = role.handle(Received(RunStopped(SERVER, 5, 0)), 0.0)
    assert isinstance(finish, Finish)
    assert finish.reason == "a learner died"


@pytest.mark.parametrize("evaluate", [True, False])
def test_every_epoch_has_the_hash_of_its_own_weights(evaluate: bool) -> None:
    role = started(3, evaluate)
    rows = []
    for number in range(1, 4):
        snapshot = f"snapshot {number % 2}"
        tested = [evaluated(snapshot)] if evaluate else []
        rows += recorded(role, epoch(number, snapshot), Hashed(f"{number:064x}"), *tested)
    assert [int(r["weights_sha256"], 16) for r in rows] == [1, 2, 3]
    assert [int(r["evaluated"]) for r in rows] == [evaluate] * 3


def test_a_test_begins_after_the_hash_on_the_clock_of_training() -> None:
    role = machine(STATISTICS, job("async", training={"epochs": 3}))
    feed(role, Started(), Received(TrainingStarted(SERVER, 100 * 10**9)), epoch(1, "snapshot 0"))
    assert not recorded(role, HASHED, now=107.5)
    (row,) = recorded(role, evaluated("snapshot 0"), now=109.5)
    assert (row["evaluation_began_s"], row["evaluation_s"]) == (7.5, 2.0)


def test_the_end_waits_for_the_last_test_and_for_every_account() -> None:
    for late in range(4):
        role = started(1)
        events = [*accounts(), evaluated("snapshot 1")]
        assert feed(role, epoch(1, "snapshot 1", 1), HASHED) == ["hash snapshot 1", "evaluate snapshot 1"]
        last = events.pop(late)
        assert not set(feed(role, *events)) & set(END)
        recorded = ["record metrics", RECORD] if isinstance(last, Evaluated) else []
        assert feed(role, last) == [*recorded, "finish snapshot 1", *END], (
            "the last snapshot is kept: it holds the final weights"
        )


def test_without_tests_the_final_weights_still_come() -> None:
    role = started(2, evaluate=False)
    assert feed(role, epoch(1), *accounts()) == [RECORD]
    assert role.waiting_for == "the weights of epoch 2"
    assert feed(role, epoch(2, "snapshot 0", 2)) == ["hash snapshot 0"]
    assert feed(role, HASHED) == [RECORD, "finish snapshot 0", *END]


@pytest.mark.parametrize("evaluate", [True, False])
def test_every_second_epoch_is_kept_but_the_last_which_is_final(evaluate: bool) -> None:
    role = started(4, evaluate, keep_every=2)
    wanted: list[str] = []
    for number in range(1, 5):
        snapshot = f"snapshot {number % 2}"
        tested = [evaluated(snapshot)] if evaluate else []
        wanted += feed(role, epoch(number, snapshot, 4), HASHED, *tested)
    written = [action for action in wanted if action.startswith(("keep", RECORD))]
    assert written == [RECORD, "keep snapshot 0 2", RECORD, RECORD, RECORD]


def test_the_best_epoch_is_kept_instead_of_the_best_before() -> None:
    role = started(6, keep_best=True)
    wanted: list[str] = []
    for number, error in enumerate((0.5, 0.6, 0.4, 0.4, 0.3, 0.1), 1):
        snapshot = f"snapshot {number % 2}"
        wanted += feed(role, epoch(number, snapshot, 6), HASHED, evaluated(snapshot, error))
    assert [action for action in wanted if action.startswith("keep")] == [
        "keep snapshot 1 1",
        "keep snapshot 1 3 (1,)",
        "keep snapshot 1 5 (3,)",
    ], "the last is final"


def test_the_best_epoch_is_not_kept_twice() -> None:
    role = started(5, keep_best=True, keep_every=2)
    wanted: list[str] = []
    for number, error in enumerate((0.5, 0.4, 0.3, 0.2, 0.1), 1):
        snapshot = f"snapshot {number % 2}"
        wanted += feed(role, epoch(number, snapshot, 5), HASHED, evaluated(snapshot, error))
    kept = [action for action in wanted if action.startswith("keep")]
    assert kept == ["keep snapshot 1 1", "keep snapshot 0 2", "keep snapshot 1 3 (1,)", "keep snapshot 0 4"]


def test_after_a_resume_the_best_of_what_is_kept_counts() -> None:
    role = machine(STATISTICS, job("async", training={"epochs": 9}).with_(results={"keep_best": True}), epoch=3)
    assert isinstance(role, StatisticsServer)
    role.recall({1: {"error": 0.1}, 2: {"error": 0.5}, 3: {"error": 0.6}}, (2, 3))
    feed(role, Started(), START)
    worse = feed(role, epoch(4, "snapshot 0", 9), HASHED, evaluated("snapshot 0", 0.55))
    better = feed(role, epoch(5, "snapshot 1", 9), HASHED, evaluated("snapshot 1", 0.45))
    assert not [action for action in worse if action.startswith("keep")]
    assert [action for action in better if action.startswith("keep")] == ["keep snapshot 1 5 (2,)"]


def test_patience_ends_the_training_once() -> None:
    run = job("async", training={"epochs": 9, "patience": 2})
    role = machine(STATISTICS, run)
    feed(role, Started(), START)
    wanted: list[list[str]] = []
    for number, error in enumerate((0.5, 0.6, 0.4, 0.4, 0.7, 0.6), 1):
        snapshot = f"snapshot {number % 2}"
        wanted.append(feed(role, epoch(number, snapshot, 9), HASHED, evaluated(snapshot, error)))
    assert [number for number, actions in enumerate(wanted, 1) if "TARGET_REACHED@0 to S" in actions] == [5]
    assert "record events" in wanted[4]


def test_at_a_plateau_the_rate_is_lowered_again_and_again() -> None:
    run = job("async", training={"epochs": 9})
    run = run.with_(optimizer={"schedule": "plateau", "schedule_options": {"patience": 2}})
    role = machine(STATISTICS, run)
    feed(role, Started(), START)
    told: list[tuple[int, int]] = []
    for number, error in enumerate((0.5, 0.6, 0.5, 0.6, 0.55, 0.4, 0.4, 0.4), 1):
        snapshot = f"snapshot {number % 2}"
        events = (epoch(number, snapshot, 9), HASHED, evaluated(snapshot, error))
        actions = [action for event in events for action in role.handle(event, 0.0)]
        sent = [a.message for a in actions if isinstance(a, Send)]
        told += [(number, message.times) for message in sent if isinstance(message, PlateauReached)]
    assert told == [(3, 1), (5, 2), (8, 3)], "counted anew after each time, and after progress"


def test_after_a_resume_a_plateau_is_told_again() -> None:
    run = job("async", training={"epochs": 9})
    role = machine(STATISTICS, run.with_(optimizer={"schedule": "plateau", "schedule_options": {"patience": 1}}))
    assert isinstance(role, StatisticsServer)
    role.recall({1: {"error": 0.4}, 2: {"error": 0.5}, 3: {"error": 0.5}}, ())
    feed(role, Started())
    (again,) = role.handle(START, 0.0)
    assert isinstance(again, Send)
    assert (again.to, again.message) == (SERVER, PlateauReached(STATISTICS, 2))


def test_patience_counts_the_tests_before_a_resume() -> None:
    tests = {1: {"error": 0.4}, 2: {"error": 0.5}}
    for before, after in ((tests, 0.6), (tests | {3: {"error": 0.45}}, None)):
        role = machine(STATISTICS, job("async", training={"epochs": 9, "patience": 2}), epoch=len(before))
        assert isinstance(role, StatisticsServer)
        role.recall(before, ())
        begun = feed(role, Started(), START)
        assert ("TARGET_REACHED@0 to S" in begun) == (after is None)
        if after is not None:
            then = feed(role, epoch(3, "snapshot 0", 9), HASHED, evaluated("snapshot 0", after))
            assert "TARGET_REACHED@0 to S" in then


def test_an_evaluation_by_workers_is_added_up_once_though_the_next_is_here_first() -> None:
    """The workers evaluate epoch 2 while the statistics server adds up their results of epoch 1."""
    tables: dict[str, Any] = {"protocol": {"name": "hogbatch"}, "cluster": {"learners": 2}}
    role = machine(STATISTICS, Job(**tables, training={"epochs": 3, "evaluate": "workers"}).resolved())
    feed(role, Started(), START)

    def assessed(number: int) -> Received:
        rows = np.zeros(1, records.SUM)
        return Received(EpochEvaluated(SERVER, number, number / 4, last=True, rows=rows))

    assert feed(role, epoch(1, "snapshot 0"), assessed(1)) == ["hash snapshot 0"]
    assert feed(role, HASHED) == ["sum snapshot 0"]
    assert feed(role, epoch(2, "snapshot 1"), assessed(2)) == []
    (first,) = recorded(role, evaluated("snapshot 0", 0.5))
    assert feed(role, HASHED) == ["sum snapshot 1"]
    (second,) = recorded(role, evaluated("snapshot 1", 0.25))
    names = ["epoch", "test_error", "evaluation_s"]
    assert [row[names].item() for row in (first, second)] == [(1, 0.5, 0.25), (2, 0.25, 0.5)]


def test_an_epoch_whose_weights_never_came_is_not_kept() -> None:
    wanted = feed(started(3, keep_every=1), epoch(1), epoch(2, "snapshot 0"), HASHED)
    assert wanted == [RECORD, "hash snapshot 0", "keep snapshot 0 2", "evaluate snapshot 0"]


@pytest.mark.parametrize(
    ("kind", "table"),
    [(MessageKind.MINIBATCHES, "minibatches"), (MessageKind.GRADIENTS, "gradients"), (MessageKind.UPDATES, "updates")],
)
def test_rows_are_recorded_as_they_come(kind: MessageKind, table: str) -> None:
    rows = Received(MESSAGES[kind](FIRST_LEARNER, np.zeros(1, ROWS[kind])))
    assert feed(started(), rows) == [f"record {table}"]
