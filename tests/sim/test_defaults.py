"""Defaults follow the protocol: one key is changed, and the job is still one."""

from pathlib import Path
from typing import Any

import pytest

import protocols
import rudra
from rudra.errors import ConfigError
from rudra.job.job import Job

AVERAGED = {"average", "diloco", "easgd", "sma"}
SHORT = ("data.train_limit=64", "data.test_limit=16", "training.epochs=1", "cluster.learners=2")


@pytest.mark.parametrize("name", protocols.shipped())
def test_digits_with_another_protocol_runs(name: str, tmp_path: Path) -> None:
    job = Job.load("digits", [f"protocol.name={name}", *SHORT])
    assert job.topology.name == ("replicas" if name in AVERAGED else "base")
    with rudra.simulate(job, output=tmp_path / "out.h5", progress="quiet") as results:
        assert results.status == "finished"
        assert results.attributes["topology"] == job.topology.name
        assert len(results.updates)


@pytest.mark.parametrize("before", protocols.shipped())
@pytest.mark.parametrize("after", protocols.shipped())
def test_topology_auto_follows_a_changed_protocol(before: str, after: str) -> None:
    changed = Job(protocol={"name": before}, cluster={"learners": 4}).with_(protocol={"name": after})
    assert changed == Job(protocol={"name": after}, cluster={"learners": 4})


@pytest.mark.parametrize("name", protocols.shipped())
def test_topology_groups_is_one_group(name: str) -> None:
    if name in {*AVERAGED, "hogbatch"}:
        with pytest.raises(ConfigError, match="; use topology "):
            Job.load("digits", [f"protocol.name={name}", "topology.name=groups"])
    else:
        job = Job.load("digits", [f"protocol.name={name}", "topology.name=groups"])
        assert len(job.plan().groups) == 1


@pytest.mark.parametrize("name", ["sharded", "adv", "groups", "base", "auto"])
def test_topology_alone_may_change(name: str) -> None:
    Job.load("digits", [f"topology.name={name}"])


@pytest.mark.parametrize(("rule", "protocol"), [("merged", "softsync"), ("synchronous", "hardsync")])
def test_topology_auto_of_placed_layers_is_base(rule: str, protocol: str) -> None:
    job = Job.load("digits", ["placement.cut=2", f"placement.rule={rule}", f"protocol.name={protocol}"])
    assert job.topology.name == "base"
    assert job.plan().stage is not None


def test_topology_auto_keeps_its_options() -> None:
    tables: dict[str, Any] = {"protocol": {"name": "easgd"}, "topology": {"options": {"parameter_server": True}}}
    job = Job(**tables, cluster={"learners": 3})
    assert job.topology.name == "replicas"
    assert job.plan().served
    assert Job.load("digits", ["protocol.name=sma", "topology.name=auto"]).topology.name == "replicas"


def test_hogbatch_without_workers_has_one_small_worker_per_learner() -> None:
    job = Job(protocol={"name": "hogbatch"}, cluster={"learners": 3})
    assert [worker.kind for worker in job.hogbatch.team(3)] == ["small"] * 3
    assert job.scheduled


def test_own_protocol_that_averages_has_replicas() -> None:
    class Seldom(protocols.Averaging):
        PERIOD = 7

    job = Job(protocol={"name": Seldom}, cluster={"learners": 2})
    assert job.topology.name == "replicas"
    assert job.make_protocol().period == 7
