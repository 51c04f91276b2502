"""The statistics server: exact traces of small cases with two learners."""

import numpy as np
from role_traces import FIRST_LEARNER, SERVER, STATISTICS, feed, job, machine

from rudra import records
from rudra.events import Evaluated, Received, Record, Started
from rudra.messages import Kind, Message
from rudra.roles import Machine

RECORD, CREDIT = "record epochs", "CREDIT@0 to S"
END = ["DONE@0 to S", "DONE@0 to L0", "DONE@0 to L1", "halt"]


def started(epochs: int = 3, evaluate: bool = True) -> Machine:
    role = machine(STATISTICS, job("async", training={"epochs": epochs, "evaluate": evaluate}))
    feed(role, Started(), Received(Message(Kind.START, SERVER)))
    return role


def epoch(number: int, buffer: str | None = None) -> Received:
    """An epoch's row, with the weights if a buffer holds them."""
    rows = np.zeros(1, records.EPOCH)
    rows["epoch"] = number
    kind = Kind.EPOCHS if buffer is None else Kind.SNAPSHOT
    return Received(Message(kind, SERVER, rows=rows), buffer)


def evaluated(buffer: str, error: float = 0.5) -> Evaluated:
    return Evaluated(buffer, 1.5, error, 0.1, 2.0)


def accounts() -> list[Received]:
    totals = Received(Message(Kind.TOTALS, SERVER, rows=np.zeros(1, records.TOTALS)))
    rows = np.zeros(2, records.LEARNER)
    rows["learner"] = 1, 0
    return [totals, *(Received(Message(Kind.LEARNERS, FIRST_LEARNER, rows=rows[i : i + 1])) for i in range(2))]


def test_it_lets_two_snapshots_in() -> None:
    role = machine(STATISTICS, job("async"))
    assert feed(role, Started()) == ["receive snapshot 0 from S", "receive snapshot 1 from S"]


def test_one_snapshot_is_tested_while_another_waits() -> None:
    role = started()
    assert feed(role, epoch(1, "snapshot 0")) == ["evaluate snapshot 0"]
    assert feed(role, epoch(2, "snapshot 1")) == []
    again = ["receive snapshot 0 from S", CREDIT, "evaluate snapshot 1", RECORD]
    assert feed(role, evaluated("snapshot 0")) == again


def test_epochs_are_recorded_in_order_though_the_skipped_are_known_first() -> None:
    role = started(4)
    assert feed(role, epoch(1, "snapshot 0"), epoch(2)) == ["evaluate snapshot 0"]
    actions = role.handle(evaluated("snapshot 0", 0.25), 0.0)
    rows = [a.rows for a in actions if isinstance(a, Record)]
    assert [int(r[0]["epoch"]) for r in rows] == [1, 2]
    assert [int(r[0]["evaluated"]) for r in rows] == [1, 0]
    assert rows[0][["test_loss", "test_error", "test_error_top5", "evaluation_s"]].item() == (1.5, 0.25, 0.1, 2.0)


def test_the_end_waits_for_the_last_test_and_for_every_account() -> None:
    for late in range(4):
        role = started(1)
        events = [*accounts(), evaluated("snapshot 1")]
        assert feed(role, epoch(1, "snapshot 1")) == ["evaluate snapshot 1"]
        last = events.pop(late)
        assert not set(feed(role, *events)) & set(END)
        recorded = [RECORD] if isinstance(last, Evaluated) else []
        assert feed(role, last) == [*recorded, "finish snapshot 1", *END], (
            "the last snapshot is kept: it holds the final weights"
        )


def test_without_tests_the_final_weights_still_come() -> None:
    role = started(2, evaluate=False)
    assert feed(role, epoch(1), *accounts()) == [RECORD]
    assert role.waiting_for == "the weights of epoch 2"
    assert feed(role, epoch(2, "snapshot 0")) == [RECORD, "finish snapshot 0", *END]


def test_mini_batches_are_recorded_if_the_job_says_so() -> None:
    rows = Received(Message(Kind.MINIBATCHES, FIRST_LEARNER, rows=np.zeros(1, records.MINIBATCH)))
    assert feed(started(), rows) == ["record minibatches"]
    quiet = job("async").with_(results={"minibatches": False})
    assert feed(machine(STATISTICS, quiet), rows) == []
