"""Hooks: what a job may say of them, whose they are, and what a moment gives."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra import Moment
from rudra.core.hooks import hooks_of
from rudra.core.layout import Entry
from rudra.core.training_state import BEGINNING
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare.resume import job_of
from rudra.results.checkpoint import SavedState
from rudra.results.recorder import python_objects
from topologies import Plan


def hook(moment: Moment) -> None:
    """Can be found by its name."""


def with_file(moment: Moment, file: str) -> None:
    """Needs an option."""


CALL = {"call": "a.b:c"}
ALONE = {"name": "groups", "options": {"groups": 1}}
LEARNERS = "learner 0 to learner 3, learners"


def job(*hooks: Any, topology: dict[str, Any] | None = None, learners: int | None = 4) -> Job:
    protocol = {"name": "hardsync"} if topology == ALONE else {}
    return Job(hooks=hooks, topology=topology or {}, protocol=protocol, cluster={"learners": learners})


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (3, "hooks must be a list of tables, not 3"),
        ({"at": "end"}, "hooks must be a list of tables, not {'at': 'end'}"),
        ([3], "[hooks] 0 must be a table, not 3"),
        ([CALL], "[hooks] 0.at is missing: moment of the call: update, epoch or end"),
        (
            [{"at": "end"}],
            "[hooks] 0.call is missing: csv, tensorboard, or package.module:callable that takes a rudra.Moment",
        ),
        ([{"at": "end", "call": "rudra.hooks:csv"}], "[hooks] 0.call rudra.hooks:csv is now csv"),
        ([{"at": "start", **CALL}], "[hooks] 0.at must be 'update', 'epoch' or 'end', not 'start'"),
        ([{"at": "end", "call": 3}], "[hooks] 0.call must be a text, not 3"),
        (
            [{"at": "end", "call": "log"}],
            "[hooks] 0.call 'log' is unknown; valid: csv, tensorboard, package.module:callable",
        ),
        ([{"at": "end", **CALL, "role": 3}], "[hooks] 0.role must be a text, not 3"),
        ([{"at": "epoch", **CALL, "every": 0}], "[hooks] 0.every must be >= 1, not 0"),
        ([{"at": "end", **CALL, "every": 2}], "[hooks] 0.every = 2 is not supported with at = 'end'; use every = 1"),
        ([{"at": "end", **CALL, "options": []}], "[hooks] 0.options must be a table, not []"),
        (
            [{"at": "end", **CALL}, {"at": "end", **CALL, "rank": 1}],
            "[hooks.1] unknown key 'rank'; valid: at, call, role, every, options; an option is written options.rank",
        ),
    ],
)
def test_a_mistake_is_one_line(hooks: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Job(hooks=hooks)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("topology", "at", "role", "expected"),
    [
        (None, "update", None, ["parameter server"]),
        (None, "update", "parameter server", ["parameter server"]),
        (None, "update", "learner 3", ["learner 3"]),
        (None, "update", "learners", [f"learner {i}" for i in range(4)]),
        (None, "update", "learner 4", f"parameter server, {LEARNERS}"),
        (None, "update", "statistics server", f"parameter server, {LEARNERS}"),
        ({"name": "adv", "options": {"fan_out": 2}}, "update", "tree server 0", f"parameter server, {LEARNERS}"),
        (ALONE, "update", None, ["learner 0"]),
        (ALONE, "update", "parameter server", LEARNERS),
        (None, "epoch", None, ["statistics server"]),
        (None, "epoch", "parameter server", "statistics server"),
        (None, "epoch", "learners", "statistics server"),
        (None, "end", None, ["statistics server"]),
        (None, "end", "learners", [f"learner {i}" for i in range(4)]),
        ({"name": "adv", "options": {"fan_out": 2}}, "end", "tree server 1", ["tree server 1"]),
        (None, "end", "leaf server 0", f"parameter server, statistics server, {LEARNERS}"),
    ],
)
def test_whose_moments_there_are(topology: dict[str, Any] | None, at: str, role: str | None, expected: Any) -> None:
    made = {"at": at, "call": hook, "role": role}
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as raised:
            job(made, topology=topology)
        assert str(raised.value) == f"[hooks] 0.role = '{role}' has no moment '{at}'; use {expected}"
        return
    ours = job(made, topology=topology)
    plan = ours.plan()
    found = hooks_of(ours, plan, range(len(plan.roles)), ())
    assert [plan.roles[role].name for role in sorted(found)] == expected


def test_a_tree_server_counts_where_it_is_placed() -> None:
    """On one node there is none, on two there are; and a launch may bring other learners than the job has."""
    made = job({"at": "end", "call": hook, "role": "tree server 0"}, topology={"name": "adv"})
    assert made.plan([0, 0, 1, 1]).roles
    with pytest.raises(ConfigError, match=r"\[hooks\] 0.role = 'tree server 0' has no moment 'end'"):
        made.plan([0, 0, 0, 0])
    with pytest.raises(ConfigError, match="'learner 7' has no moment"):
        job({"at": "end", "call": hook, "role": "learner 7"}, learners=None).resolved(learners=4)


@pytest.mark.parametrize(
    ("call", "options", "said"),
    [
        ("no_such_module:log", {}, "no_such_module:log: no module 'no_such_module' on the Python path"),
        ("json:log", {}, "json:log: json has no attribute 'log'"),
        ("math:pi", {}, "math:pi is a float, and cannot be called"),
        (
            with_file,
            {},
            "with_file is called as hook(moment, **options): missing a required argument: 'file'; its parameters: file",
        ),
        (
            hook,
            {"a": 1},
            "hook is called as hook(moment, **options): got an unexpected keyword argument 'a'; its parameters: none",
        ),
        (
            "csv",
            {"fil": "a.csv"},
            "csv is called as hook(moment, **options): got an unexpected keyword argument 'fil'; its parameters: file;"
            " did you mean file?",
        ),
        ("json:dumpz", {}, "json:dumpz: json has no attribute 'dumpz'; did you mean dump?"),
    ],
)
def test_what_cannot_be_called_is_refused_where_it_would_be(call: Any, options: dict[str, Any], said: str) -> None:
    made = job({"at": "epoch", "call": call, "options": options})
    plan = made.plan()
    assert not hooks_of(made, plan, plan.learners, ())
    with pytest.raises(ConfigError) as raised:
        hooks_of(made, plan, [plan.statistics], ())
    assert str(raised.value) == f"[hooks] 0.call: {said}"


def test_weights_are_views_that_cannot_be_written() -> None:
    floats = np.arange(8, dtype=np.float32)
    layout = (Entry("a.weight", (2, 3), 0, 6, "parameter"), Entry("a.mean", (2,), 6, 2, "buffer"))
    moment = Moment("update", "learner 1", 3, "job", _layout=layout, _source=lambda: floats)
    weights = moment.weights()
    assert {name: array.tolist() for name, array in weights.items()} == {
        "a.weight": [[0, 1, 2], [3, 4, 5]],
        "a.mean": [6, 7],
    }
    floats[0] = 9
    assert weights["a.weight"][0, 0] == 9
    for array in weights.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        moment.loss = 1.0  # type: ignore[misc]
    assert Moment("end", "learner 1", 3, "job").weights() == {}


@pytest.mark.parametrize(
    ("call", "options", "expected"),
    [
        (hook, {}, ""),
        ("a.b:c", {"a": [1, "b"]}, ""),
        (lambda moment: None, {}, "hooks.1.call"),
        (partial(hook), {"a": object()}, "hooks.1.call, hooks.1.options"),
    ],
)
def test_hooks_that_a_file_cannot_hold_are_listed(call: Any, options: dict[str, Any], expected: str) -> None:
    made = job({"at": "end", "call": hook}, {"at": "end", "call": call, "options": options})
    assert ", ".join(python_objects(made)) == expected
    told = SavedState(Path("a.ckpt"), BEGINNING, json.loads(made.to_json()), {"python_objects": expected})
    if expected:
        with pytest.raises(ConfigError, match=r"hooks\.1\.call.* was given as a Python object"):
            job_of(told)
    else:
        assert job_of(told, trust=True).hooks[0].call == f"{__name__}:hook"


def test_hooks_are_replaced_as_a_whole() -> None:
    made = job({"at": "end", "call": hook})
    assert made.with_(training={"epochs": 1}).hooks == made.hooks
    assert made.with_(hooks=()).hooks == ()
    assert [h.at for h in made.with_(hooks=[{"at": "epoch", "call": hook}]).hooks] == ["epoch"]


def test_planned_roles_are_found_among_those_of_one_process() -> None:
    made = job({"at": "update", "call": hook, "role": "learners"})
    plan: Plan = made.plan()
    assert list(hooks_of(made, plan, plan.learners[1:2], ())) == [plan.learners[1]]
