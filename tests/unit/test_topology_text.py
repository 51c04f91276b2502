"""What `rudra topology` prints."""

from pathlib import Path

import pytest

from rudra.cli.main import main
from rudra.job.job import Job
from rudra.report.plan_tree import by_gradients, by_weights, lines
from rudra.report.topology import as_text, of_job, spans
from tests.unit.report_files import write_point
from tests.unit.results_files import write_run
from topologies import Plan, Role, load
from topologies.kinds import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER


def job(learners: int | None, topology: str, protocol: str = "softsync", **options: object) -> Job:
    return Job(
        topology={"name": topology, "options": options}, cluster={"learners": learners}, protocol={"name": protocol}
    )


BASE = """\
topology base, protocol 1-softsync

gradients go up, and weights come down:
  parameter server   rank 0, node 0
  ├─ learner 0       rank 2, node 0
  └─ learner 1       rank 3, node 0
  statistics server  rank 1, node 0

nodes:
  0  parameter server, statistics server, learners 0, 1

4 ranks: 1 parameter server, 1 statistics server, 2 learners (λ); 2 workers of the protocol
2 gradients per update (c); a message carries 1 gradient
shared memory: ranks 0 to 3 on node 0"""

STAR = """\
topology adv* (fan_out = 2), protocol async

gradients go up:
  parameter server   rank 0, node 0
  ├─ tree server 0   rank 2, node 0
  │  ├─ learner 0    rank 3, node 0
  │  └─ learner 1    rank 4, node 0
  └─ tree server 1   rank 5, node 1
     ├─ learner 2    rank 6, node 1
     └─ learner 3    rank 7, node 1
  statistics server  rank 1, node 0

weights come down, on each edge the newest:
  parameter server   rank 0, node 0
  ├─ learner 0       rank 3, node 0
  │  └─ learner 1    rank 4, node 0
  └─ learner 2       rank 6, node 1
     └─ learner 3    rank 7, node 1

nodes:
  0        parameter server, statistics server, tree server 0, learners 0, 1
  1        tree server 1, learners 2, 3
  no role  rank 8

8 ranks: 1 parameter server, 1 statistics server, 2 tree servers, 4 learners (λ); 4 workers of the protocol
1 gradient per update (c); a message to the parameter server carries the mean of at least 1 gradient
shared memory: ranks 0 to 4 on node 0; ranks 5 to 7 on node 1"""

GROUPS = """\
topology groups (groups = 2), protocol async

inside a group, which has a communicator of its own, gradients are added in group_rank order;
its first learner pushes and pulls for all:
  parameter server   rank 0, a node of its own
  ├─ group 0         2 learners
  │  ├─ learner 0    rank 2, node 0
  │  └─ learner 1    rank 3, node 0
  └─ group 1         3 learners
     ├─ learner 2    rank 4, node 0
     ├─ learner 3    rank 5, node 1
     └─ learner 4    rank 6, node 1
  statistics server  rank 1, a node of its own

nodes:
  of its own  parameter server, statistics server
  0           learners 0 to 2
  1           learners 3, 4

7 ranks: 1 parameter server, 1 statistics server, 5 learners (λ); 2 workers of the protocol, \
groups of 2 to 3 learners (k)
1 gradient per update (c); a message carries the mean over a group's 2 to 3 gradients
gradients: averaged during the backward pass unless they are small, in buckets chosen at the start of the run from \
the network's latency and bandwidth
shared memory: ranks 0, 1 on a node of its own; ranks 2 to 4 on node 0; ranks 5, 6 on node 1"""

ALLREDUCE = """\
topology groups (reduction = mpi), protocol hardsync

inside a group, which has a communicator of its own, gradients are added by a library's allreduce \
(not replayable);
every learner updates weights of its own:
  group 0            2 learners
  ├─ learner 0       rank 1, node 0
  └─ learner 1       rank 2, node 0
  statistics server  rank 0, node 0

nodes:
  0  statistics server, learners 0, 1

3 ranks: 1 statistics server, 2 learners (λ); 1 worker of the protocol, a group of 2 learners (k)
1 gradient per update (c); no gradient goes to a server
shared memory: ranks 0 to 2 on node 0"""


def test_base() -> None:
    assert as_text(of_job(job(2, "base"))) == BASE


def test_a_second_tree_of_the_weights_on_ranks_of_two_nodes() -> None:
    assert as_text(of_job(job(None, "adv*", "async", fan_out=2), None, [5, 4])) == STAR


def test_the_sums_of_nodes_are_named() -> None:
    added = "gradients are added in group_rank order on each node, and then the nodes' sums;"
    assert added in as_text(of_job(job(4, "groups", "hardsync", reduction="nodes")))


def test_groups_in_a_simulation() -> None:
    simulated = job(5, "groups", "async", groups=2).with_(simulation={"nodes": 2})
    assert as_text(of_job(simulated)) == GROUPS


def test_one_group_has_no_server() -> None:
    assert as_text(of_job(job(2, "groups", "hardsync", reduction="mpi"))) == ALLREDUCE


def test_learners_on_the_cpu_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = job(None, "groups", "hardsync").with_(cluster={"device": "cuda", "cpu_learners": 1})
    assert "\ndevices: learners on the CPU: 1, 4; the others on GPUs\ntransport: staged" in as_text(
        of_job(mixed, None, [3, 3])
    )
    assert "devices: " not in as_text(of_job(mixed.with_(cluster={"device": "cpu"}), None, [3, 3]))
    asked = ["--set", "topology.name=groups", "--set", "cluster.device=cuda", "--set", "cluster.cpu_learners=[0]"]
    assert main(["validate", "digits", "--syntax", *asked, "--learners", "3"]) == 0
    assert "devices        learners on the CPU: 0; the others on GPUs" in capsys.readouterr().out
    unused = "[cluster] cpu_learners = [0] has no effect with device = 'cpu'; use device = 'cuda', or remove it"
    assert main(["validate", "digits", "--syntax", *asked, "--set", "cluster.device=cpu", "--learners", "3"]) == 0
    assert f"devices        {unused}\n" in capsys.readouterr().out
    assert main(["validate", "digits", "--syntax", "--learners", "3"]) == 0
    assert "devices " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "on", "shared"),
    [
        ([6], False, "none, as [cluster] node_memory = false says"),
        ([1] * 6, True, "none, as each rank has its own node"),
        ([1, 3, 2], True, "ranks 1 to 3 on node 1; ranks 4, 5 on node 2"),
        ([2] * 5, True, "ranks 0, 1 on node 0; ranks 2, 3 on node 1; ranks 4, 5 on node 2; … ranks 8, 9 on node 4"),
        ([2] * 20, True, "ranks 0, 1 on node 0; ranks 2, 3 on node 1; ranks 4, 5 on node 2; … ranks 38, 39 on node 19"),
    ],
)
def test_who_shares_memory(sizes: list[int], on: bool, shared: str) -> None:
    placed = job(None, "base").with_(cluster={"node_memory": on})
    assert as_text(of_job(placed, None, sizes)).endswith(f"\nshared memory: {shared}")


def test_servers_of_a_simulation_may_be_on_the_first_node() -> None:
    simulated = job(2, "base").with_(simulation={"nodes": 2, "servers_on_first_node": True})
    assert "  0  parameter server, statistics server, learner 0\n  1  learner 1\n" in as_text(of_job(simulated))


@pytest.mark.parametrize("ranks", [4, 9])
def test_ranks_give_the_number_of_learners(ranks: int) -> None:
    assert len(of_job(job(None, "base"), ranks).plan.learners) == ranks - 2


@pytest.mark.parametrize("topology", ["base", "adv", "adv*", "groups"])
@pytest.mark.parametrize("learners", [64, 97, 4096])
def test_large_plans_are_short_and_count_everybody(topology: str, learners: int) -> None:
    options = {"adv": {"fan_out": 8}, "adv*": {"fan_out": [16, 2]}, "groups": {"groups": learners // 8}}
    plan = load(topology, options.get(topology, {})).plan(learners, [i // 8 for i in range(learners)])
    for tree in (by_gradients, by_weights):
        branches = tree(plan, 40)
        assert lines(branches) <= 41
        shown = [role for branch in branches for role in _everybody(branch)]
        assert len(shown) == len(set(shown))
        wanted = {i for i, role in enumerate(plan.roles) if tree is by_gradients or role.kind == LEARNER}
        assert wanted <= set(shown)
    assert lines(by_gradients(plan)) == len(plan.roles) + len(plan.groups)


def _everybody(branch: object) -> list[int]:
    below = [role for child in branch.below for role in _everybody(child)]  # type: ignore[attr-defined]
    own = [] if branch.groups and branch.below else branch.roles  # type: ignore[attr-defined]
    return [*own, *branch.hidden, *below]  # type: ignore[attr-defined]


def test_like_siblings_are_told_as_one() -> None:
    text = as_text(of_job(job(4096, "base")))
    assert "  ├─ learners 10 to 4094  ranks 12 to 4096, node 0\n  └─ learner 4095         rank 4097, node 0\n" in text
    assert "learners 10 to" not in as_text(of_job(job(4096, "base")), everything=True)


def test_a_run_of_servers_says_how_many_are_below() -> None:
    simulated = job(4096, "adv", fan_out=[8, 64]).with_(simulation={"nodes": 512})
    text = as_text(of_job(simulated))
    assert "tree servers 1 to 6" in text
    assert "with 384 tree servers, 3,072 learners" in text
    assert "\n  5 to 510    513 tree servers, 4,048 learners\n" in text
    assert text.count("\n") < 40


def test_a_chain_is_cut() -> None:
    plan = load("adv*", {"weight_fan_out": 1}).plan(4000)
    assert lines(by_weights(plan, 40)) <= 40
    assert by_weights(plan)  # however deep


def test_a_topology_of_the_users_own() -> None:
    roles = (
        Role(PARAMETER_SERVER, 0, 3),
        Role(STATISTICS_SERVER, 0, 3),
        Role(LEARNER, 0, 1, 0),
        Role(LEARNER, 1, 0, 0),
    )

    class Shuffled:
        @staticmethod
        def plan(nodes: list[int]) -> Plan:
            return Plan(roles)

    text = as_text(of_job(Job(topology={"name": Shuffled}, cluster={"learners": 2})))
    assert text.startswith("topology Shuffled, protocol 1-softsync\n")
    assert "  ├─ learner 0       rank 1, node 0\n  └─ learner 1       rank 0, node 0\n" in text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((4, 3), "3, 4"), ((1, 2, 3, 7), "1 to 3, 7"), (range(0, 20, 2), "0, 2, 4, … 18")],
)
def test_spans(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.h5"
    hosts = {"driver": "mpi", "hosts": ["a", "a", "a", "b", "a"]}
    write_point(file, protocol="softsync", n=2, mu=4, lam=2, epochs=1, **hosts)
    assert main(["topology", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: topology base, protocol 2-softsync\n")
    assert "  0 (a)    parameter server, statistics server, learner 0\n" in said
    assert "  1 (b)    learner 1\n  no role  rank 4\n" in said
    assert "shared memory: ranks 0 to 2 on node 0 (a)\n" in said
    write_run(tmp_path / "silent.h5", updates=1, epochs=0, staleness=0)
    assert main(["topology", str(tmp_path / "silent.h5")]) == 2
    assert "does not record the roles of ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("digits -n 4 --nodes 2,3", "--nodes 2,3: has 5 ranks, but -n is 4"),
        ("digits --nodes 2,x", "--nodes 2,x: must be whole numbers >= 1 between commas, such as 1,2,4"),
        ("digits -n 9", "4 learners with topology base need 6 ranks, but the launcher started 9"),
        ("digits -n 2", "2 ranks are too few for topology base; start 6"),
        ("digits --set topology.name=ring", "[topology] name: 'ring' is unknown"),
        ("digits --set topology.name=adv*", "[topology] name = 'adv*' is not supported with protocol"),
        (
            "digits --set topology.name=groups --set topology.options={groups=9}",
            "[topology] options.groups = 9 is not supported with 4 learners; use 1 to 4",
        ),
        ("gone.h5", "gone.h5: no such result file"),
        ("gone.h5 -n 3", "gone.h5: a result file shows its run; -n, --nodes, --learners and --set are for jobs"),
    ],
)
def test_mistakes(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    hardsync = ["--set", "protocol.name=hardsync"] if arguments.endswith("adv*") else []
    assert main(["topology", *arguments.split(), *hardsync]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert line in said.err


@pytest.mark.parametrize(
    ("learners", "keys", "line"),
    [
        (2, {"protocol.name": "async"}, "0.4 explicit, of 0.9: ⟨σ⟩ of about 1 acts like 0.5"),
        (30, {"protocol.n": "1"}, "0.4085 explicit, of 0.9: ⟨σ⟩ of about 0.967 acts like 0.492"),
        (8, {"protocol.n": "2"}, "0.2636 explicit, of 0.9: ⟨σ⟩ of about 1.75 acts like 0.636"),
        (4, {"protocol.name": "hardsync"}, "0.9, all of it explicit: nothing is stale"),
        (4, {"protocol.name": "async", "topology.name": "groups"}, "0.9, all of it explicit: nothing is stale"),
        (4, {"optimizer.momentum_correction": "none"}, "0.9, torch's form"),
        (4, {"optimizer.momentum_correction": "none", "optimizer.momentum_form": "caffe"}, "0.9, caffe's form"),
        (4, {"optimizer.momentum_correction": "none", "optimizer.name": "rmsprop"}, "0.9"),
    ],
)
def test_validate_says_what_is_left_of_the_momentum(
    learners: int, keys: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"optimizer.momentum": "0.9", "optimizer.momentum_correction": "implicit", **keys}
    asked = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert main(["validate", "digits", "--syntax", *asked, "--learners", str(learners)]) == 0
    said = capsys.readouterr()
    assert f"  momentum       {line}\n" in said.out
    assert said.err == ""


def test_validate_warns_where_nothing_is_left_of_the_momentum(capsys: pytest.CaptureFixture[str]) -> None:
    momentum = ["optimizer.momentum=0.9", "optimizer.momentum_correction=implicit", "protocol.name=async"]
    asked = [word for key in momentum for word in ("--set", key)]
    assert main(["validate", "digits", "--syntax", *asked, "--learners", "10"]) == 0
    said = capsys.readouterr()
    assert "roles          1 parameter server, 1 statistics server, 10 learners (λ); 10 workers" in said.out
    assert "momentum_correction: this asynchrony leaves no explicit momentum" in said.err


@pytest.mark.parametrize(
    ("learners", "keys", "line"),
    [
        (30, {"protocol.n": "16"}, "about 29 on average (⟨σ⟩), not n = 16: α0/n is 1.81 times α0/⟨σ⟩"),
        (5, {"protocol.n": "3"}, "about 4 on average (⟨σ⟩), not n = 3: α0/n is 1.33 times α0/⟨σ⟩"),
        (30, {"protocol.n": "11"}, "about 14.5 on average (⟨σ⟩), not n = 11: α0/n is 1.32 times α0/⟨σ⟩"),
        (30, {"protocol.n": "29"}, "about 29 on average (⟨σ⟩)"),
        (30, {"protocol.n": "2"}, "about 1.93 on average (⟨σ⟩)"),
        (30, {"protocol.name": "async"}, "about 29 on average (⟨σ⟩)"),
        (5, {"protocol.n": "3", "protocol.modulation": "mean_staleness"}, "about 4 on average (⟨σ⟩)"),
        (5, {"protocol.n": "3", "topology.name": "adv*"}, "more than 4 on average (⟨σ⟩), not n = 3: "),
        (8, {"protocol.n": "3", "topology.name": "groups", "topology.options.groups": "4"}, "about 3 on average (⟨σ⟩)"),
        (30, {"protocol.name": "hardsync"}, "0"),
    ],
)
def test_validate_says_how_stale_gradients_will_be(
    learners: int, keys: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert main(["validate", "digits", "--syntax", *asked, "--learners", str(learners)]) == 0
    (said,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("  staleness ")]
    assert said == f"  staleness      {line}" or (line.endswith(": ") and line in said)
