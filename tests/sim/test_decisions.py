"""Changes of the job that a function decides during the run: recorded, replayed and resumed like planned ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuzzing import in_turn

import rudra
from rudra.errors import ConfigError, RudraError
from rudra.job.job import Job
from tests.selection import CAMPAIGN

ALONE = {"name": "groups", "options": {"groups": 1}}
SLOWER = {"optimizer": {"learning_rate": 0.05, "momentum": 0.25}}
LARGER = {"training": {"minibatch_size": 16}}
SLOWEST = {"optimizer": {"learning_rate": 0.02}}

FAMILIES: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "groups": {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
    "allreduce": {"protocol": {"name": "hardsync"}, "topology": ALONE},
    "sharded": {"protocol": {"name": "async"}, "topology": {"name": "sharded", "options": {"shards": 2}}},
    "sma": {"protocol": {"name": "sma"}},
    "diloco": {"protocol": {"name": "diloco"}, "averaging": {"period": 3}},
    "exchanged": {
        "protocol": {"name": "easgd"},
        "topology": {"name": "replicas", "options": {"parameter_server": True}},
    },
    "placed": {"protocol": {"name": "hardsync"}, "placement": {"cut": "3", "rule": "synchronous"}},
    "shared": {
        "protocol": {"name": "hogbatch"},
        "optimizer": {"learning_rate": 0.1, "momentum": 0.0},
        "hogbatch": {"weights": "shared", "locking": True, "workers": [{"kind": "small", "min": 8}]},
    },
    "hogbatch": {"protocol": {"name": "hogbatch"}, "hogbatch": {"workers": [{"kind": "small", "min": 8}]}},
}
NEVER = {("shared", "update")}
"""Workers update shared weights alone during an epoch."""

FROZEN = ["hardsync", "placed", "allreduce", "sma", "diloco"]
"""Families whose resumed runs are bitwise identical."""


class Decider:
    """Function that decides given changes, and keeps what it was asked."""

    def __init__(self, answers: Mapping[int, Any]) -> None:
        self.answers, self.asked = answers, list[rudra.Moment]()

    def __call__(self, moment: rudra.Moment, **options: Any) -> Any:
        self.asked.append(moment)
        return self.answers.get(moment.epoch or 0)


def job(family: str, call: Any, at: str = "epoch", **tables: Any) -> Job:
    """Five epochs of 192 samples for four learners."""
    about: dict[str, Any] = {
        "model": {"name": "mlp"},
        "data": {"train_limit": 192},
        "training": {"minibatch_size": 8, "epochs": 5, "seed": 5},
        "optimizer": {"learning_rate": 0.1, "momentum": 0.5},
        "cluster": {"learners": 4, "threads_per_rank": 1},
        "simulation": {"jitter": 0.5},
        "results": {"keep_checkpoints": "1 epochs"},
        "decisions": {} if call is None else {"call": call, "at": at},
    }
    return Job(**about | FAMILIES[family] | tables)


def two(family: str) -> Decider:
    """Decides twice. The batches of some families cannot change."""
    first = {"optimizer": {"learning_rate": 0.05}} if family == "shared" else SLOWER
    return Decider({1: first, 3: SLOWEST if family in ("hogbatch", "placed", "shared") else LARGER})


def simulated(job_: Job, path: Path, origin: Path | None = None, carry: Any = "all") -> rudra.Results:
    return rudra.simulate(job_, output=path, progress="quiet", from_=origin, carry=carry if origin else "weights")


def told(results: rudra.Results, *kinds: bytes) -> list[tuple[str, int]]:
    """Kinds and timestamps of events."""
    return [(row["kind"].decode(), int(row["timestamp"])) for row in results.events if row["kind"] in kinds]


def decided(results: rudra.Results) -> list[dict[str, Any]]:
    return [json.loads(row["text"]) for row in results.events if row["kind"] == b"decided"]


COVERING = ["groups", "allreduce", "sharded", "diloco", "shared", "hogbatch"]


@pytest.mark.parametrize(
    ("family", "at"),
    [
        pytest.param(*pair, marks=() if pair[0] in COVERING else CAMPAIGN)
        for pair in in_turn(FAMILIES, ["epoch", "update"], each=1)
        if pair not in NEVER
    ],
)
def test_decided_changes_do_what_planned_ones_do_and_are_replayed(tmp_path: Path, family: str, at: str) -> None:
    decider = two(family)
    job_ = job(family, decider, at)
    with simulated(job_, path := tmp_path / "run.h5") as results:
        whole, found = results.summary(), decided(results)
        ends = results.epochs["timestamp"].tolist()
        assert len(told(results, b"decision")) == len(told(results, b"change")) == len(found) == 2
        kinds = told(results, b"decided")
        assert whole["changes"][0].startswith("decided after ")
    assert [{key: each[key] for key in ("optimizer", "training") if key in each} for each in found] == [
        decider.answers[1],
        decider.answers[3],
    ]
    for (_, timestamp), after in zip(kinds, (1, 3), strict=True):
        assert timestamp == ends[after] if at == "epoch" else ends[after - 1] < timestamp <= ends[after]
    assert [moment.epoch for moment in decider.asked] == [1, 2, 3, 4, 5]
    assert [len(moment.history) for moment in decider.asked] == [1, 2, 3, 4, 5]
    assert decider.asked[1].history[0]["epoch"] == 1
    asked = len(decider.asked)
    replayed = rudra.replay(path, quiet=True)
    assert replayed.identical, replayed
    assert (replayed.updates, replayed.weights_sha256) == (whole["updates"], whole["weights_sha256"])
    assert len(decider.asked) == asked, "a replay calls no function"
    planned = [{key: value for key, value in each.items() if key != "place"} for each in found]
    with simulated(job(family, None, changes=planned), tmp_path / "planned.h5") as results:
        assert results.summary()["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "epoch"), in_turn(FROZEN, [1, 2, 3, 4]))
def test_a_run_continues_with_decided_changes_from_before_at_and_after_them(
    tmp_path: Path, family: str, epoch: int
) -> None:
    decider = two(family)
    job_ = job(family, decider)
    with simulated(job_, tmp_path / "run.h5") as results:
        whole, changes = results.summary(), told(results, b"decision", b"change")
    decider.asked.clear()
    with simulated(job_, path := tmp_path / "on.h5", tmp_path / f"run-{epoch}.ckpt") as results:
        assert results.summary()["weights_sha256"] == whole["weights_sha256"]
        assert sorted(told(results, b"decision", b"change")) == sorted(changes)
        assert len(decided(results)) == 2
    assert [moment.epoch for moment in decider.asked] == list(range(epoch + 1, 6))
    assert len(decider.asked[0].history) == epoch + 1, "also the epochs before the checkpoint"
    assert rudra.replay(path, quiet=True).identical


def test_an_asynchronous_run_continues_and_is_replayed_as_a_whole(tmp_path: Path) -> None:
    job_ = job("softsync", two("softsync"), "update")
    simulated(job_, tmp_path / "run.h5").close()
    for epoch in (1, 2, 4):
        with simulated(job_, path := tmp_path / f"on{epoch}.h5", tmp_path / f"run-{epoch}.ckpt") as results:
            assert len(decided(results)) == 2
        assert rudra.replay(path, quiet=True).identical
    with simulated(job_, tmp_path / "state.h5", tmp_path / "run-2.ckpt", "state") as results:
        assert set(results.updates["learning_rate"]) == {0.05 / 2}, "what was decided before remains"
        assert len(told(results, b"decided")) == 1


def test_a_branch_with_another_job_follows_its_own_keys(tmp_path: Path) -> None:
    simulated(job("hardsync", two("hardsync")), tmp_path / "run.h5").close()
    other = job("hardsync", None, optimizer={"learning_rate": 0.3, "momentum": 0.5})
    with simulated(other, tmp_path / "branch.h5", tmp_path / "run-4.ckpt") as results:
        last = results.updates[results.updates["epoch"] == 5]
        assert set(last["learning_rate"]) == {0.3 / 2}, "sqrt of μ λ / 128 = 1/4"
        assert set(last["samples"]) == {32}
        assert decided(results) == []
        assert "another job" in results.attributes["not_replayable"]


def test_decided_changes_come_between_planned_ones(tmp_path: Path) -> None:
    """A planned change at the same place comes first, and a later one after the decided one."""
    planned = [
        {"at_epoch": 2, "optimizer": {"learning_rate": 0.2}, **LARGER},
        {"at_epoch": 3, "optimizer": {"momentum": 0.0}},
    ]
    with simulated(job("hardsync", Decider({1: SLOWER}), changes=planned), path := tmp_path / "run.h5") as results:
        rates, samples = ([*dict.fromkeys(results.updates[key].tolist())] for key in ("learning_rate", "samples"))
        assert samples == [32, 64]
        assert rates == pytest.approx([0.1 * (32 / 128) ** 0.5, 0.05 * (64 / 128) ** 0.5])
        assert results.summary()["changes"] == [
            "decided after epoch 2: optimizer.learning_rate = 0.05, optimizer.momentum = 0.25, "
            "training.minibatch_size = 16",
            "after epoch 3: optimizer.momentum = 0.0",
        ]
    assert rudra.replay(path, quiet=True).identical


def test_a_decision_that_changes_nothing_is_ignored(tmp_path: Path) -> None:
    same = {"optimizer": {"learning_rate": 0.1}}
    answers = Decider({1: same, 2: {}, 3: {"optimizer": {}}, 4: SLOWER, 5: SLOWEST})
    with simulated(job("hardsync", answers), tmp_path / "run.h5") as results:
        assert told(results, b"decided", b"change") == []
        assert len(told(results, b"decision")) == 1, "the fifth epoch is the last one"


@pytest.mark.parametrize("family", ["hardsync", "allreduce", "sma"])
def test_decisions_outlive_learners(tmp_path: Path, family: str) -> None:
    """A learner dies while the first decision waits for the end of the epoch."""
    faults = {"faults": [{"learner": 3, "dies_at_s": 2.0}]}
    job_ = job(family, two(family)).with_(data={"train_limit": 384})
    job_ = job_.with_(simulation={"compute_s": 0.1, "jitter": 0.0, **faults})
    with simulated(job_, tmp_path / "run.h5") as results:
        kinds = [kind for kind, _ in told(results, b"decision", b"lost", b"decided")]
        assert kinds == ["decision", "lost", "decided", "decision", "decided"]
        assert set(results.updates["samples"][-5:]) == {3 * 16}


def simulate_bad(answer: Any, path: Path, **tables: Any) -> str:
    decider = answer if callable(answer) else Decider({2: answer})
    with pytest.raises(RudraError) as error:
        simulated(job("hardsync", decider, **tables), path)
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)
    return str(error.value)


def raise_error(moment: rudra.Moment) -> None:
    raise ZeroDivisionError("no reason")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1], "returned [1] at epoch 2; use None, or a table such as {'optimizer': {'learning_rate': 0.1}}"),
        ({"optimizer": 1}, "returned {'optimizer': 1} at epoch 2; use None, or a table"),
        ({"optimizer": {"momentum": object}}, "which is not plain at epoch 2; use None, or a table"),
        ({"optimizer": {"momentum": float("nan")}}, "which is not plain at epoch 2; use None, or a table"),
        (raise_error, "function raise_error, which is the user's own code, failed at epoch 1: ZeroDivisionError"),
        ({"model": {"name": "lenet"}}, "decided after epoch 2: model.name cannot change; use protocol.name, "),
        ({"optimizer": {"rate": 1.0}}, "decided after epoch 2: optimizer.rate cannot change; use protocol.name, "),
        ({"training": {"minibatch_size": "x"}}, "2: [training] minibatch_size must be a whole number, not 'x'"),
        ({"training": {"minibatch_size": 1000}}, "2: [training] minibatch_size = 1000 (μ) exceeds the training set"),
        ({"at_epoch": {}, **SLOWER}, "decided after epoch 2: at_epoch is not for the function to decide; leave it out"),
        ({"protocol": {"options": {"x": "y" * 4000}}}, "the change has 4,036 characters as JSON; use at most 3,072"),
    ],
)
def test_a_bad_decision_ends_the_run_with_one_line(tmp_path: Path, answer: Any, said: str) -> None:
    text = simulate_bad(answer, path := tmp_path / "run.h5")
    assert said in text
    with rudra.open_results(path) as results:
        assert results.status == "failed"
        assert said[:60] in results.state["reason"]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"decisions": {"call": "mine"}}, "[decisions] call 'mine' is unknown; valid: package.module:callable"),
        ({"decisions": {"at": "update"}}, "[decisions] at is not supported without call; set call, or remove at"),
        (
            {"optimizer": {"schedule": "cosine", "schedule_every": "update"}},
            "[decisions] is not supported with [optimizer] schedule_every = 'update'; use schedule_every = 'epoch'",
        ),
        (
            {
                **FAMILIES["shared"],
                "decisions": {"call": "a:b", "at": "update"},
            },
            "[hogbatch] weights = 'shared' is not supported with [decisions] at = 'update', as no server updates",
        ),
        (
            {**FAMILIES["placed"], "topology": ALONE},
            "[placement] cut is not supported with [decisions] on topology groups; use a topology with",
        ),
    ],
)
def test_what_the_table_refuses_is_one_line(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        job("hardsync", two("hardsync"), **tables)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        ("json:none", {}, "[decisions] call: "),
        (raise_error, {"patience": 3}, "[decisions] call: raise_error is called as function(moment, **options): "),
    ],
)
def test_a_function_that_does_not_exist_or_fit_is_refused(tmp_path: Path, call: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulated(job("hardsync", None, decisions={"call": call, "options": options}), tmp_path / "run.h5")
    assert str(error.value).startswith(said)


def test_without_tensors_there_is_nothing_to_decide(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[decisions\] call is not supported with \[simulation\] tensors = false"):
        simulated(job("hardsync", raise_error, simulation={"tensors": False}), tmp_path / "run.h5")


@pytest.mark.parametrize(
    ("family", "at"),
    in_turn(["hardsync", "allreduce", "sma", "sharded", "groups", "exchanged"], ["epoch", "update"], each=1),
)
def test_learners_join_and_leave_by_decisions(tmp_path: Path, family: str, at: str) -> None:
    """Also a change after learners have joined, which those must know, too."""
    decider = Decider({1: {"cluster": {"active_learners": 4}}, 2: SLOWER, 3: {"cluster": {"active_learners": 3}}})
    job_ = job(family, decider, at).with_(cluster={"active_learners": 2})
    with simulated(job_, path := tmp_path / "run.h5") as results:
        whole, gradients = results.summary(), results.gradients
        assert [row["kind"] for row in results.events if row["kind"] == b"change"] == [b"change"] * 3
        ends = [timestamp for _, timestamp in told(results, b"change")]
    for begin, end, learners in zip([0, ends[0], ends[2]], [ends[0], ends[2], 10**9], [2, 4, 3], strict=True):
        here = gradients[(gradients["update"] > begin) & (gradients["update"] <= end)]
        assert {*here["learner"]} == {*range(learners)}
    assert rudra.replay(path, quiet=True).identical
    for epoch in (1, 2, 3) if family in FROZEN and at == "epoch" else ():
        with simulated(job_, tmp_path / f"on-{epoch}.h5", tmp_path / f"run-{epoch}.ckpt") as results:
            assert results.summary()["weights_sha256"] == whole["weights_sha256"]
