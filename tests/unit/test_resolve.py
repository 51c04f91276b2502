"""A written job becomes one that leaves nothing open: where ranks are started, on ranks, and in virtual time."""

from typing import Any

import pytest
import torch

from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import DeviceKind
from rudra.errors import ConfigError, RudraError, TopologyError
from rudra.job.boundary import START, Boundary
from rudra.job.job import Job
from rudra.job.transports import Transports
from rudra.prepare.nodes import nodes_of
from rudra.prepare.phases import phases_of
from rudra.prepare.resolve import RankFacts, choose_devices, fit, resolve, resolve_virtual, settle

AUTO = Job(cluster={"device": "auto"})
RULE = {"data": {"name": "digits"}, "model": {"name": "lenet"}, "protocol": {"name": "hardsync"}}


def ranks(*nodes: int, cores: int = 8, **about: Any) -> list[RankFacts]:
    return [RankFacts(node, f"host{node}", cores, **about) for node in nodes]


@pytest.mark.parametrize(
    ("cluster", "cores", "learners", "threads"),
    [
        ({}, 1, 4, 1),
        ({}, 8, 4, 2),
        ({"learners": 3}, 8, 3, 2),
        ({"learners": 4, "learners_per_rank": 2}, 8, 4, 4),
        ({"threads_per_rank": 5}, 8, 4, 5),
    ],
)
def test_resolve_open_counts_follow_the_cores(cluster: dict[str, Any], cores: int, learners: int, threads: int) -> None:
    job, plan = resolve(Job(cluster=cluster), {}, cores=cores)
    assert (job.learners, job.cluster.threads_per_rank) == (learners, threads)
    assert plan == job.plan()


def test_resolve_decided_keys_win_over_what_the_machine_offers() -> None:
    decided = {"cluster": {"learners": 2, "threads_per_rank": 3}, "training": {"warm_start": None}}
    job, plan = resolve(Job(), decided, cores=64)
    assert (len(plan.learners), job.cluster.threads_per_rank) == (2, 3)


class Gpus(DeviceKind):
    """Devices that only their number is known of."""

    def __init__(self, count: int) -> None:
        self._count = count

    def count(self) -> int:
        return self._count


@pytest.mark.parametrize(
    ("cluster", "tables", "gpus", "started"),
    [
        ({"device": "cuda"}, {}, 1, 1),
        ({"device": "auto"}, {}, 1, 1),
        ({"device": "cuda"}, {"topology": {"name": "groups"}}, 1, 1),
        ({"device": "cuda"}, {"protocol": {"name": "sma"}}, 1, 1),
        ({"device": "auto"}, {}, 0, 6),
        ({"device": "cuda"}, {}, 2, 6),
        ({"device": "cpu"}, {}, 1, 6),
        ({"device": "cuda", "one_rank": False}, {}, 1, 6),
        ({"device": "cuda", "learners_per_rank": 2}, {}, 1, 4),
        ({"device": "cuda"}, {"protocol": {"name": "async"}, "topology": {"name": "adv*"}}, 1, 6),
    ],
)
def test_resolve_learners_share_a_rank_if_they_share_the_only_gpu(
    cluster: dict[str, Any], tables: dict[str, Any], gpus: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Gpus(gpus))
    job, plan = resolve(Job(cluster=cluster, **tables), {}, cores=8)
    assert plan.ranks == started
    assert job.cluster.threads_per_rank == {1: 8, 4: 4}.get(started, 2)


def test_fit_all_ranks_without_a_server_are_learners() -> None:
    job, plan = fit(Job(), {}, ranks(0, 0, 0, 1, 1))
    assert (job.learners, plan.ranks) == (3, 5)
    assert [plan.roles[role].node for role in plan.learners] == [0, 1, 1]


def test_fit_threads_are_those_of_the_fullest_node() -> None:
    assert fit(Job(), {}, ranks(0, 0, 0, 1, 1, 1)).job.cluster.threads_per_rank == 2, "node 1 has three learners"
    assert fit(Job(), {}, ranks(0, 0, 0, 1, 1, 1, cores=1)).job.cluster.threads_per_rank == 1


@pytest.mark.parametrize(
    ("cluster", "nodes", "cores", "threads"),
    [
        ({"cpu_learners": 1}, (0, 0, 0, 0), 8, 6),  # two GPUs take a core each
        ({"cpu_learners": 1}, (0, 0, 0, 0), 2, 1),
        ({"cpu_learners": 1}, (0, 0, 0, 1, 1), 8, 7),
        ({"cpu_learners": [0]}, (0, 0, 0, 1, 1), 8, 4),  # node 1 has GPUs only
        ({"cpu_learners": 1, "threads_per_rank": 3}, (0, 0, 0, 0), 8, 3),
        ({"cpu_learners": 1, "device": "cpu"}, (0, 0, 0, 0), 8, 2),
    ],
)
def test_fit_learners_on_the_cpu_have_the_cores_that_gpus_leave(
    cluster: dict[str, Any], nodes: tuple[int, ...], cores: int, threads: int
) -> None:
    job = Job(topology={"name": "groups"}, protocol={"name": "hardsync"}, cluster={"device": "cuda", **cluster})
    given = ranks(*nodes, cores=cores, gpus=2)
    resolved = fit(job, {}, given)
    assert resolved.job.cluster.threads_per_rank == threads
    devices = [choose_devices(resolved, given, rank) for rank in range(len(nodes))]
    on_cpu = {job.plan.roles[i].world_rank for job in [resolved] for i in job.job.learners_on_cpu(job.plan)}
    if job.cluster.accelerated:
        assert [device.type == "cpu" for _, device, _ in devices] == [rank in on_cpu for rank in range(len(nodes))]
        assert {transports for *_, transports in devices} == {Transports("staged", "staged")}


def test_resolve_learners_on_the_cpu_have_ranks_and_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Gpus(1))
    job, plan = resolve(Job(cluster={"learners": 3, "device": "cuda", "cpu_learners": 1}), {}, cores=8)
    assert (len(plan.ranks_with_learners), job.cluster.threads_per_rank) == (3, 6)
    workers = [{"learners": [0], "kind": "small", "device": "cpu"}, {"kind": "large"}]
    job = Job(protocol={"name": "hogbatch"}, hogbatch={"workers": workers}, cluster={"device": "cuda", "learners": 2})
    job, plan = resolve(job, {}, cores=8)
    assert (len(plan.ranks_with_learners), job.cluster.threads_per_rank) == (2, 7)


def test_fit_ranks_for_stage_servers_are_left_over_where_none_pays() -> None:
    job = Job(placement={"cut": "ralp"}, cluster={"learners": 3}, **RULE)
    placed = fit(job, {"placement": {"cut": "4"}}, ranks(*[0] * 6))
    assert (placed.plan.ranks, len(placed.plan.stages)) == (6, 1)
    assert fit(job, {"placement": {"cut": None}}, ranks(*[0] * 6)).plan.ranks == 5


@pytest.mark.parametrize(
    ("job", "given", "said"),
    [
        (Job(), ranks(0, 0), "2 ranks are too few for topology base"),
        (
            Job(topology={"name": "adv*"}),
            ranks(*[0] * 6, threaded=False),
            r"'adv\*' is not supported without MPI_THREAD_MULTIPLE, which .*; use topology adv, or another MPI library",
        ),
    ],
)
def test_fit_unsuited_ranks_are_refused(job: Job, given: list[RankFacts], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        fit(job, {}, given)


def test_fit_a_protocol_that_does_not_work_on_the_plan_is_refused() -> None:
    job = Job(protocol={"name": "softsync", "n": 4})
    with pytest.raises(RudraError, match="n"):
        fit(job, {}, ranks(0, 0, 0, 0))


def test_choose_devices_learners_of_a_node_take_its_gpus_in_turn() -> None:
    given = ranks(0, 0, 0, 0, gpus=2)
    resolved = fit(AUTO, {}, given)
    chosen = [choose_devices(resolved, given, number) for number in range(4)]
    assert {job.cluster.device for (job, _), *_ in chosen} == {"cuda"}
    assert {transports for *_, transports in chosen} == {Transports("ipc", "staged")}
    of_learners = [chosen[resolved.plan.roles[role].world_rank][1] for role in resolved.plan.learners]
    assert of_learners == [torch.device("cuda", 0), torch.device("cuda", 1)]
    server = resolved.plan.roles[resolved.plan.server].world_rank
    assert chosen[server][1] == torch.device("cuda", 1), "the statistics server has the first one, in turn"
    staged = fit(AUTO.with_(cluster={"transport": "staged"}), {}, given)
    assert choose_devices(staged, given, server)[1].type == "cpu"


def test_choose_devices_one_learner_without_a_gpu_keeps_all_on_the_cpu() -> None:
    given = [*ranks(0, 0, 0, gpus=2), *ranks(1)]
    (job, _), device, transports = choose_devices(fit(AUTO, {}, given), given, 2)
    assert (job.cluster.device, device.type, transports) == ("cpu", "cpu", None)
    wanted = Job(cluster={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"torch sees no GPU for learner 1 \(rank 3\) on host1; valid there: cpu"):
        choose_devices(fit(wanted, {}, given), given, 0)


def test_choose_devices_a_library_that_knows_no_gpus_is_named() -> None:
    given = [*ranks(0, 0, 0, gpus=1, gpu_aware=True), *ranks(1, gpus=1)]
    job = Job(cluster={"transport": "mpi", "device": "cuda"})
    with pytest.raises(ConfigError, match=r"the MPI library of rank 3 on host1, .*; use transport = 'auto' or"):
        choose_devices(fit(job, {}, given), given, 0)


@pytest.mark.parametrize("transport", ["ipc", "mpi", "staged"])
def test_choose_devices_a_transport_is_refused_if_learners_fall_back_to_the_cpu(transport: str) -> None:
    given = [*ranks(0, 0, 0, gpus=1, gpu_aware=True), *ranks(0)]
    resolved = fit(Job(cluster={"transport": transport, "device": "auto"}), {}, given)
    with pytest.raises(ConfigError, match=f"transport = '{transport}' is for GPUs, but a learner has none; use trans"):
        choose_devices(resolved, given, 0)


def test_fit_ipc_between_nodes_is_refused() -> None:
    job = Job(cluster={"transport": "ipc", "device": "cuda"})
    assert fit(job, {}, ranks(0, 0, 0, gpus=1)).job.cluster.transport == "ipc"
    with pytest.raises(ConfigError, match=r"^\[cluster\] transport = 'ipc' is not supported between nodes; use tran"):
        fit(job, {}, ranks(0, 0, 0, 1, gpus=1))


def test_resolve_virtual_learners_are_on_the_nodes_of_the_costs() -> None:
    job, plan = resolve_virtual(Job(cluster={"learners": 5}, simulation={"nodes": 2}), device="cpu")
    assert nodes_of(job) == [plan.roles[role].node for role in plan.learners] == [0, 0, 0, 1, 1]
    assert job.cluster.device == "cpu"


def test_settle_fills_in_what_is_measured() -> None:
    job = Job(cluster={"learners": 2, "shares": "auto"}, protocol={"name": "hardsync"})
    assert settle(job, gradients="direct").cluster.shares == "auto"
    settled = settle(job, gradients="direct", shares=(1.0, 2.0))
    assert (settled.training.gradients, settled.cluster.shares) == ("direct", (1.0, 2.0))


def test_phases_of_a_job_with_changes_keep_the_places_of_the_roles() -> None:
    job = Job(training={"epochs": 4}, changes=[{"at_epoch": 2, "training": {"minibatch_size": 8}}])
    resolved = fit(job, {}, ranks(0, 0, 1, 1))
    first, second = phases_of(*resolved, training_samples=100)
    assert (first.start, second.start) == (START, Boundary(epochs=2))
    assert [role.world_rank for role in first.plan.roles] == [role.world_rank for role in second.plan.roles]
    assert second.job.training.minibatch_size == 8
