"""Tables `[[changes]]`: what they make of a job, and what they cannot."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rudra.cli.main import main
from rudra.core.phases import phase_at
from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError
from rudra.job.boundary import START, Boundary
from rudra.job.job import Job
from rudra.prepare.phases import phases_of
from topologies import Plan, adv, base

FILE = """
[training]
epochs = 5
minibatch_size = 8
[optimizer]
milestones = [3]
[protocol]
name = "hardsync"
[topology]
name = "groups"
options = { groups = 2, reduction = "ordered" }
[cluster]
learners = 4
[[changes]]
at_epoch = 1
protocol.name = "softsync"
protocol.n = 1
topology.options.groups = 4
[[changes]]
at_epoch = 3
training.minibatch_size = 32
optimizer.learning_rate = 0.5
protocol = { name = "async" }
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job.toml").write_text(FILE)
    return Job.load(tmp_path / "job.toml")


def test_each_part_is_a_job_of_its_own(job: Job) -> None:
    parts = [job.at(epoch) for epoch in range(6)]
    assert all(part.changes == () for part in parts)
    assert [part.protocol.name for part in parts] == ["hardsync", *["softsync"] * 2, *["async"] * 3]
    assert [part.protocol.n for part in parts] == [None, 1, 1, None, None, None]
    assert [part.training.minibatch_size for part in parts] == [8, 8, 8, 32, 32, 32]
    assert [part.topology.options for part in parts[:2]] == [
        {"groups": count, "reduction": "ordered"} for count in (2, 4)
    ]
    assert parts[4].topology.options["groups"] == 4
    assert Job(**json.loads(job.to_json())) == job


def test_plans_and_rates_are_those_of_the_part(job: Job) -> None:
    phases = phases_of(job, job.plan(), 100)
    assert [phase.start.number for phase in phases] == [0, 1, 3]
    assert [len(phase_at(phases, TrainingState(epoch=epoch)).plan.groups) for epoch in range(5)] == [2, 4, 4, 4, 4]
    assert {phase.plan.max_gradients_per_message for phase in phases} == {2}, "buffers have room for the largest"
    rates = [phase_at(phases, TrainingState(epoch=epoch)).schedule.rate(epoch, 9.0) for epoch in range(5)]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.05, 0.05]), "milestones count the epochs of the whole run"


def test_a_part_is_on_the_ranks_of_the_first(job: Job) -> None:
    plan = job.make_topology().fit([0, 1, 0, 1, 1, 0], 4)
    (_, second, _) = phases_of(job, plan, 100)
    assert [role.world_rank for role in second.plan.roles] == [role.world_rank for role in plan.roles]
    assert [role.node for role in second.plan.roles] == [role.node for role in plan.roles]


def test_parts_of_a_run_begin_at_its_changes(job: Job) -> None:
    plan = job.plan()
    found = [*job.parts(plan)]
    assert [(start, part) for start, part, _ in found] == [(Boundary(start), job.at(start)) for start in (0, 1, 3)]
    assert [len(its_plan.groups) for _, _, its_plan in found] == [2, 4, 4]
    assert [(start, part) for start, part, _ in job.at(0).parts(plan)] == [(START, job.at(0))]


class Sometimes:
    """A tree, if it is asked for, where there are several nodes."""

    @staticmethod
    def plan(nodes: Sequence[int], tree: bool = False) -> Plan:
        return adv.plan(nodes) if tree and len(set(nodes)) > 1 else base.plan(nodes)


def test_roles_must_stay_on_the_nodes_that_there_are(job: Job) -> None:
    tree = {"at_epoch": 1, "topology": {"options": {"tree": True}}}
    own = job.with_(topology={"name": Sometimes, "options": {}}, changes=[tree])
    assert own.plan([0] * 4) == base.plan([0] * 4)
    with pytest.raises(ConfigError, match=r"^\[topology\] options must not change roles or ranks; use options"):
        own.plan([0, 0, 1, 1])


TREE = {"topology": {"name": "adv", "options": {"fan_out": 2}}}
ASYNC = {"protocol": {"name": "async"}}
FASTER = {"optimizer": {"learning_rate": 0.5}}


@pytest.mark.parametrize(
    ("entries", "tables", "said"),
    [
        ([{"at_epoch": 1, "model": {"name": "mlp"}}], {}, "[changes] 0 model.name cannot change; use protocol.name, "),
        ([{"at_epoch": 1, "training": {"epochs": 9}}], {}, "training.epochs cannot change; use protocol.name, "),
        ([{"at_epoch": 1, "cluster": {"learners": 2}}], {}, "cluster.learners cannot change; use protocol.name, "),
        (
            [{"at_epoch": 1, "optimizer": {"weight_decay": 0.5}}],
            {},
            "optimizer.weight_decay cannot change; use protocol.name, ",
        ),
        (
            [{"at_epoch": 1, "optimizer": {"options": {"amsgrad": True}}}],
            {},
            "[changes] 0 optimizer.options.amsgrad cannot change; use optimizer.options.betas, ",
        ),
        (
            [{"at_epoch": 1, "averaging": {"outer": {"name": "adam"}}}],
            {},
            "averaging.outer.name cannot change; use averaging.outer.learning_rate, averaging.outer.momentum",
        ),
        (
            [{"at_epoch": 1, "averaging": {"period": 2}}],
            {},
            "[[changes]] at_epoch = 1: [averaging] period is not supported with protocol hardsync",
        ),
        ([{"at_epoch": 1, "topology": {"name": "adv"}}], {}, "topology.name cannot change; use protocol.name, "),
        ([{"at_epoch": 1, "protocol": "async"}], {}, "[changes] 0 protocol cannot change; use protocol.name, "),
        ([{"at_epoch": 1}], {}, "[changes] 0 changes no key; use protocol.name, protocol.n, "),
        ([{"epoch": 2, "protocol": {"n": 1}}], {}, "[changes] 0 epoch cannot change; use protocol.name, "),
        ([{"protocol": {"n": 1}}], {}, "[changes] 0 has no at_epoch; use one of at_epoch and at_update"),
        (
            [{"at_epoch": 1, "at_update": 3, "protocol": {"n": 1}}],
            {},
            "[changes] 0 has at_epoch and at_update; use one of at_epoch and at_update",
        ),
        (
            [{"at_update": 5, **ASYNC}, {"at_epoch": 1, **FASTER}, {"at_update": 5, **FASTER}],
            {},
            "[[changes]] at_update = 5: must be ascending",
        ),
        ([{"at_epoch": 0, "protocol": {"name": "async"}}], {}, "[changes] 0.at_epoch must be >= 1, not 0"),
        (
            [{"at_epoch": 4, "protocol": {"name": "async"}}],
            {},
            "[[changes]] at_epoch = 4: must be ascending, and less than [training] epochs = 4",
        ),
        (
            [{"at_epoch": 2, "protocol": {"name": "async"}}, {"at_epoch": 2, "training": {"minibatch_size": 3}}],
            {},
            "[[changes]] at_epoch = 2: must be ascending, and less than [training] epochs = 4",
        ),
        (
            [{"at_epoch": 1, "cluster": {"shares": "auto"}}],
            {},
            "[[changes]] at_epoch = 1: cluster.shares = 'auto' is not supported in [[changes]]; use a list",
        ),
        (
            [{"at_epoch": 1, "protocol": {"n": 2}}],
            {},
            "[[changes]] at_epoch = 1: [protocol] hardsync takes no n; leave it out",
        ),
        (
            [{"at_epoch": 1, "protocol": {"name": "softsync", "n": 5}}],
            {},
            "[[changes]] at_epoch = 1: [protocol] n = 5 is not supported with 4 learners; use 1 to 4",
        ),
        (
            [{"at_epoch": 1, "training": {"minibatch_size": "many"}}],
            {},
            "[[changes]] at_epoch = 1: [training] minibatch_size must be a whole number, not 'many'",
        ),
        (
            [{"at_epoch": 1, "cluster": {"shares": [1.0, 2.0]}}],
            {},
            "[[changes]] at_epoch = 1: [cluster] shares has 2 numbers for 4 learners; use one",
        ),
        (
            [{"at_epoch": 1, "topology": {"options": {"fan_out": 4}}}],
            TREE,
            "[[changes]] at_epoch = 1: [topology] options must not change roles or ranks; use options",
        ),
        (
            [{"at_epoch": 1, "topology": {"options": {"groups": 1}}}],
            {"topology": {"name": "groups", "options": {"groups": 2}}},
            "[[changes]] at_epoch = 1: [topology] options must not change roles or ranks; use options",
        ),
        (
            [{"at_epoch": 1, "training": {"minibatch_size": 3}}],
            {"topology": {"name": "groups", "options": {"groups": 2, "reduction": "mpi"}}},
            "[[changes]] at_epoch = 1: [topology] options.reduction = 'mpi' is not supported with "
            "[[changes]]; use 'ordered' or 'nodes'",
        ),
        (
            [{"at_epoch": 1, "topology": {"options": {"groups": 4}}}],
            {"simulation": {"batching": "big-batch"}, "topology": {"name": "groups", "options": {"groups": 2}}},
            "[simulation] batching = 'big-batch' is not supported with a change of groups; use batching = 'none'",
        ),
    ],
)
def test_what_cannot_change_is_one_line(entries: list[dict[str, Any]], tables: dict[str, Any], said: str) -> None:
    base: dict[str, Any] = {"protocol": {"name": "hardsync"}, "training": {"epochs": 4}, "cluster": {"learners": 4}}
    Job(**{**base, **tables})
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        Job(**{**base, **tables}, changes=entries)
    assert "\n" not in str(error.value)


def test_commands_tell_what_changes_when(tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "job.toml")
    assert main(["validate", path, "--syntax"]) == 0
    said = capsys.readouterr().out
    assert "  at epoch 1     protocol.name = 'softsync', protocol.n = 1, topology.options.groups = 4\n" in said
    assert main(["predict", path, "--set", "model.name=mlp", "--updates", "8"]) == 0
    said = capsys.readouterr().out
    assert "job: hardsync, μ = 8" in said
    assert "job after epoch 1: 1-softsync, μ = 8" in said
    assert "job after epoch 3: async, μ = 32" in said
    assert main(["predict", path, "--set", "model.name=mlp", "--updates", "8", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("at_epoch") for row in rows] == [None, 1, 3]
