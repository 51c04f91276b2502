"""Bursts: a rank makes several rounds before it asks its learners, with the bits and rows of single steps.

Each job runs three times: its learners are asked for each step, or its rank makes bursts, or a device makes recorded
bursts and does all work as late as it may, in any order that its streams and lanes allow.
"""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from burst_runs import batchnorm, burst_runs
from processes import finish, replays, run_until, start

import rudra
from rudra.bench.ranks import on_ranks
from rudra.errors import EXIT_STOPPED
from tests.selection import covering, selected

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ASKED = "asked"
SEEDS = 250
"""Adverse orders of each job in a campaign."""

LOCAL_SEEDS = 40
"""Adverse orders of each job on two ranks."""


def make_job(name: str = "sma", learners: int = 4, *, ranks: int = 1, **tables: Any) -> rudra.Job:
    """Returns a job. One epoch has 40 updates of four learners with μ = 4.

    Args:
        name: Name of the protocol.
        learners: Number of learners.
        ranks: Number of ranks with learners. 1: this rank has the other roles too.
        tables: Tables of the job.
    """
    cluster = {"learners": learners, "learners_per_device": learners // ranks, "threads_per_rank": 1}
    cluster |= {"one_rank": True} if ranks == 1 else {}
    own = tables.pop("cluster", {})
    return rudra.Job(
        name="bursts",
        model=tables.pop("model", {"name": "mlp"}),
        data={"name": "digits", "train_limit": 640},
        training={"epochs": 2, "minibatch_size": 4, "seed": 5, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.05, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"name": name},
        cluster=cluster | {"bank": "loop"} | own,
        **tables,
    )


def make_hardsync(**tables: Any) -> rudra.Job:
    """Returns a job without replicas and without a parameter server."""
    return make_job("hardsync", topology={"name": "groups"}, **tables)


WHOLE_LINES = {"hidden": [34]}
"""Options of a model with 2,560 parameters, as many as 160 cache lines of a CPU hold. Torch's fused optimiser, which
steps all of them, reads its rate in memory, as it does on a GPU."""

JOBS = {
    "sma": make_job(),
    "sma, period 3": make_job(averaging={"period": 3}),
    "average, period 2": make_job("average", averaging={"period": 2}),
    "diloco, period 3": make_job("diloco", averaging={"period": 3}),
    "one learner": make_job(learners=1, cluster={"learners_per_device": None, "bank": "auto"}),
    "streams": make_job(cluster={"bank": "graphs", "streams": 2}),
    "fused": make_job(cluster={"bank": "fused"}),
    "three, fused": make_job(learners=3, cluster={"bank": "fused"}),
    "BatchNorm": make_job(model={"name": batchnorm}, cluster={"bank": "graphs"}),
    "dropout": make_job(model={"name": small_models.normed_digits}),
    "adam": make_job(optimizer={"name": "adam", "learning_rate": 0.01, "momentum": 0.0}),
    "checkpoints": make_job(results={"checkpoint_every": "4 updates", "keep_checkpoints": "7 updates"}),
    "rates by update": make_job(
        model={"name": "mlp", "options": WHOLE_LINES}, optimizer={"schedule": "cosine", "schedule_every": "update"}
    ),
    "restart": make_job(optimizer={"schedule": "step", "milestones": [1]}, averaging={"restart": True}),
    "changes": make_job(
        changes=[
            {"at_update": 19, "optimizer": {"learning_rate": 0.01}},
            {"at_epoch": 1, "averaging": {"period": 2}},
        ]
    ),
    "momentum": make_job(changes=[{"at_update": 19, "optimizer": {"momentum": 0.5}}]),
    "dormant": make_job(cluster={"active_learners": 2}, changes=[{"at_update": 31, "cluster": {"active_learners": 4}}]),
    "hardsync": make_hardsync(),
    "hardsync, one learner": make_hardsync(learners=1, cluster={"learners_per_device": None, "bank": "auto"}),
    "hardsync, streams": make_hardsync(cluster={"bank": "graphs", "streams": 2}),
    "hardsync, fused": make_hardsync(learners=6, cluster={"bank": "fused"}),
    "hardsync, BatchNorm": make_hardsync(model={"name": batchnorm}, cluster={"bank": "graphs"}),
    "hardsync, BatchNorm, fused": make_hardsync(model={"name": batchnorm}, cluster={"bank": "fused"}),
    "hardsync, dropout": make_hardsync(model={"name": small_models.normed_digits}),
    "hardsync, adam": make_hardsync(optimizer={"name": "adam", "learning_rate": 0.01, "momentum": 0.0}),
    "hardsync, microbatches": make_hardsync(training={"microbatches": 2}, optimizer={"clip_norm": 0.5}),
    "hardsync, shares": make_hardsync(cluster={"shares": [1, 2, 3, 2]}, optimizer={"momentum": 0.0}),
    "hardsync, checkpoints": make_hardsync(
        optimizer={"schedule": "step", "milestones": [1]},
        results={"checkpoint_every": "4 updates", "keep_checkpoints": "7 updates"},
    ),
    "hardsync, rates by update": make_hardsync(
        model={"name": "mlp", "options": WHOLE_LINES}, optimizer={"schedule": "cosine", "schedule_every": "update"}
    ),
    "hardsync, changes": make_hardsync(
        changes=[
            {"at_update": 19, "optimizer": {"momentum": 0.5}},
            {"at_epoch": 1, "optimizer": {"learning_rate": 0.01}},
        ]
    ),
    "hardsync, dormant": make_hardsync(
        cluster={"active_learners": 2}, changes=[{"at_update": 31, "cluster": {"active_learners": 4}}]
    ),
}
LOCAL = {
    "sma, period 5": make_job(ranks=2, averaging={"period": 5}),
    "average, period 5": make_job("average", ranks=2, averaging={"period": 5}),
    "diloco, period 5": make_job("diloco", ranks=2, averaging={"period": 5}),
    "one learner a rank": make_job("average", 2, ranks=2, averaging={"period": 20}),
    "long period": make_job("diloco", 8, ranks=2, averaging={"period": 10}),
    "streams": make_job(ranks=2, averaging={"period": 5}, cluster={"bank": "graphs", "streams": 2}),
    "fused": make_job("average", ranks=2, averaging={"period": 5}, cluster={"bank": "fused"}),
    "BatchNorm": make_job(ranks=2, model={"name": batchnorm}, averaging={"period": 5}, cluster={"bank": "graphs"}),
    "dropout": make_job("diloco", ranks=2, model={"name": small_models.normed_digits}, averaging={"period": 5}),
    "adam": make_job(
        "average",
        ranks=2,
        averaging={"period": 5},
        optimizer={"name": "adam", "learning_rate": 0.01, "momentum": 0.0},
    ),
    "checkpoints": make_job(ranks=2, averaging={"period": 5}, results={"checkpoint_every": "3 updates"}),
    "warm-up": make_job(
        "average",
        ranks=2,
        averaging={"period": 5},
        model={"name": "mlp", "options": WHOLE_LINES},
        optimizer={"schedule": "cosine", "warm_up": 0.7},
    ),
    "changes": make_job(
        "average",
        ranks=2,
        averaging={"period": 5},
        changes=[
            {"at_update": 3, "optimizer": {"learning_rate": 0.01, "momentum": 0.5}},
            {"at_epoch": 1, "averaging": {"period": 8}},
        ],
    ),
    "dormant": make_job(
        ranks=2,
        averaging={"period": 4},
        cluster={"active_learners": 2},
        changes=[{"at_update": 7, "cluster": {"active_learners": 4}}],
    ),
}
"""Jobs whose learners are on two ranks, with an averaging period that has local steps."""

LOCKSTEP = {
    "sma, period 1": make_job(ranks=2),
    "sma, period 2": make_job(learners=6, ranks=2, averaging={"period": 2}),
    "average, period 1": make_job("average", ranks=2, cluster={"bank": "graphs"}),
    "diloco, period 2": make_job("diloco", ranks=2, averaging={"period": 2}),
    "elastic, fused": make_job("average", ranks=2, averaging={"elasticity": 0.2}, cluster={"bank": "fused"}),
    "dropout, period 1": make_job(ranks=2, model={"name": small_models.normed_digits}),
    "restart": make_job(ranks=2, optimizer={"schedule": "step", "milestones": [1]}, averaging={"restart": True}),
    "checkpoints, period 1": make_job(ranks=2, results={"checkpoint_every": "3 updates"}),
    "changes, period 1": make_job(
        ranks=2,
        changes=[
            {"at_update": 13, "optimizer": {"learning_rate": 0.01, "momentum": 0.5}},
            {"at_epoch": 1, "averaging": {"period": 3}},
        ],
    ),
    "blocks": make_job(ranks=2, topology={"name": "hierarchical", "options": {"blocks": 2}}),
    "blocks of two ranks": make_job(
        ranks=2, averaging={"period": 3}, topology={"name": "hierarchical", "options": {"blocks": 1}}
    ),
    "blocks, fused": make_job(
        "easgd",
        learners=6,
        ranks=2,
        averaging={"period": 2},
        topology={"name": "hierarchical", "options": {"blocks": 2}},
        cluster={"bank": "fused"},
    ),
    "dormant, period 1": make_job(
        learners=6,
        ranks=2,
        cluster={"active_learners": 4},
        changes=[{"at_update": 7, "cluster": {"active_learners": 6}}],
    ),
    "hardsync, two ranks": make_hardsync(ranks=2),
    "hardsync, two ranks, fused": make_hardsync(learners=6, ranks=2, cluster={"bank": "fused"}),
    "hardsync, two ranks, BatchNorm": make_hardsync(ranks=2, model={"name": batchnorm}, cluster={"bank": "graphs"}),
    "hardsync, two ranks, dropout": make_hardsync(ranks=2, model={"name": small_models.normed_digits}),
    "hardsync, two ranks, adam": make_hardsync(
        ranks=2,
        optimizer={"name": "adam", "learning_rate": 0.01, "momentum": 0.0},
        results={"checkpoint_every": "3 updates"},
    ),
    "hardsync, two ranks, changes": make_hardsync(
        ranks=2,
        changes=[
            {"at_update": 13, "optimizer": {"learning_rate": 0.01, "momentum": 0.5}},
            {"at_epoch": 1, "training": {"minibatch_size": 2}},
        ],
    ),
    "hardsync, two ranks, dormant": make_hardsync(
        learners=6,
        ranks=2,
        cluster={"active_learners": 4},
        changes=[{"at_update": 7, "cluster": {"active_learners": 6}}],
    ),
}
"""Jobs whose learners are on two ranks, and average after almost every mini-batch."""

WITHOUT_REASONS = {"sma, period 1", "elastic, fused", "blocks", "hardsync, two ranks", "hardsync, two ranks, fused"}
"""Jobs whose lockstep only ends with the training. It goes on when an epoch ends and its weights are evaluated."""

DRAWS = "the model draws random numbers"
NOT_RECORDED = {"dropout": DRAWS, "dropout, period 1": DRAWS, "adam": None}
NOT_RECORDED |= {f"hardsync, {name}": text for name, text in {**NOT_RECORDED, "microbatches": None}.items()}
NOT_RECORDED |= {"hardsync, two ranks, dropout": DRAWS, "hardsync, two ranks, adam": None}
"""Jobs that a device does not record, and what it says."""


def rounded(name: str) -> set[str]:
    """Tables that a fused bank rounds differently if it is recorded: one operation computes all norms."""
    return {"averages"} if name.endswith("fused") else set()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the runs of the selected jobs gave, by job and way."""
    jobs = {name: JOBS[name] for name in sorted(selected(request, "name"))}
    made = on_ranks(burst_runs, jobs=jobs, ways=(ASKED, "bursts", "recorded 1"))
    return {key: value for rank in made for key, value in rank.items()}


SOME = ["sma, period 3", "average, period 2", "streams", "fused", "dropout", "rates by update", "momentum", "dormant"]
SOME += [f"hardsync, {name}" for name in ("streams", "fused", "BatchNorm", "checkpoints", "changes", "dormant")]


@pytest.fixture(scope="module")
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the selected runs on two ranks with learners gave, by job and way."""
    jobs = {name: (LOCAL | LOCKSTEP)[name] for name in sorted(selected(request, "of_ranks"))}
    statistics, *learners = on_ranks(burst_runs, jobs=jobs, ways=(ASKED, "bursts", "recorded 1"), together=True)
    of_each = ("local steps", "in lockstep", "ends")
    return {key: learners[0][key] | {of: [rank[key][of] for rank in learners] for of in of_each} for key in statistics}


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Tables whose content differs."""
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


@pytest.mark.parametrize("name", covering(SOME, list(JOBS)))
def test_bursts_give_the_content_of_a_run_whose_learners_are_asked(found: dict[str, Any], name: str) -> None:
    asked, bursts = found[f"{name}: {ASKED}"], found[f"{name}: bursts"]
    assert asked["updates"] == 0 < bursts["updates"]
    # Learners make the update that ends an epoch by themselves, except for its local steps.
    assert bool(bursts["local steps"]) == ("period" in name or name == "changes")
    assert bursts["content"] == asked["content"]


@pytest.mark.parametrize("name", covering(SOME, list(JOBS)))
def test_recorded_bursts_give_the_content_of_a_run_whose_learners_are_asked(found: dict[str, Any], name: str) -> None:
    recorded, asked = found[f"{name}: recorded 1"], found[f"{name}: {ASKED}"]
    assert recorded["updates"] > 0
    # Learners are asked as long as a checkpoint is written. Then only the first bursts may be left, which are as usual.
    few = recorded["updates"] <= 16 and "checkpoints" in name
    assert few or (recorded["recorded"] > recorded["updates"] / 2) == (name not in NOT_RECORDED)
    assert differing(recorded["content"], asked["content"]) <= rounded(name)
    assert recorded["refusal"] == NOT_RECORDED.get(name, "")


SOME_LOCAL = ["sma, period 5", "average, period 5", "diloco, period 5", "streams", "fused", "changes", "dormant"]


@pytest.mark.parametrize("of_ranks", covering(SOME_LOCAL, list(LOCAL)))
def test_bursts_of_local_steps_give_the_content_of_a_run_whose_learners_are_asked(
    local: dict[str, Any], of_ranks: str
) -> None:
    asked, bursts = local[f"{of_ranks}: {ASKED}"], local[f"{of_ranks}: bursts"]
    assert asked["local steps"] == [0, 0]
    assert all(bursts["local steps"])
    assert bursts["updates"] == 0
    assert bursts["content"] == asked["content"]


@pytest.mark.parametrize("of_ranks", covering(SOME_LOCAL, list(LOCAL)))
def test_recorded_local_steps_give_the_content_of_a_run_whose_learners_are_asked(
    local: dict[str, Any], of_ranks: str
) -> None:
    recorded, asked = local[f"{of_ranks}: recorded 1"], local[f"{of_ranks}: {ASKED}"]
    assert all(recorded["local steps"])
    assert (recorded["recorded"] > recorded["local steps"][0] / 2) == (of_ranks not in NOT_RECORDED)
    assert differing(recorded["content"], asked["content"]) <= rounded(of_ranks)
    assert recorded["refusal"] == NOT_RECORDED.get(of_ranks, "")


SOME_LOCKSTEP = ["sma, period 1", "diloco, period 2", "elastic, fused", "changes, period 1"]
SOME_LOCKSTEP += ["blocks", "hardsync, two ranks, fused"]


@pytest.mark.parametrize("of_ranks", covering(SOME_LOCKSTEP, list(LOCKSTEP)))
def test_learners_in_lockstep_give_the_content_of_a_run_whose_learners_are_asked(
    local: dict[str, Any], of_ranks: str
) -> None:
    asked, lockstep, recorded = (local[f"{of_ranks}: {way}"] for way in (ASKED, "bursts", "recorded 1"))
    assert asked["in lockstep"] == [0, 0]
    for run in (lockstep, recorded):
        assert all(count > 5 for count in run["in lockstep"])
        assert of_ranks not in WITHOUT_REASONS or run["ends"] == [1, 1]
    assert lockstep["content"] == asked["content"]
    assert differing(recorded["content"], asked["content"]) <= rounded(of_ranks)
    for action in ("gradients",) if "hardsync" in of_ranks else ("gradients", "steps"):
        assert (recorded[action] > recorded["in lockstep"][0] / 2) == (of_ranks not in NOT_RECORDED)


def test_a_block_on_one_rank_proceeds_in_lockstep() -> None:
    job = make_job(averaging={"period": 2}, topology={"name": "hierarchical", "options": {"blocks": 1}})
    runs, *_ = on_ranks(burst_runs, jobs={"block": job}, ways=(ASKED, "bursts", "recorded 1"))
    for way in ("bursts", "recorded 1"):
        assert runs[f"block: {way}"]["in lockstep"] > 5
        assert runs[f"block: {way}"]["content"] == runs[f"block: {ASKED}"]["content"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["sma", "hardsync", "hardsync, streams"])
def test_learners_compute_by_themselves_what_finds_too_little_memory_in_a_burst(name: str) -> None:
    runs, *_ = on_ranks(burst_runs, jobs={name: JOBS[name]}, ways=(ASKED, "scarce"))
    scarce = runs[f"{name}: scarce"]
    assert scarce["scarce"] > 1
    assert scarce["updates"] > 0
    assert scarce["content"] == runs[f"{name}: {ASKED}"]["content"]


@pytest.mark.parametrize(("protocol", "topology"), [("hardsync", "groups"), ("average", "replicas")])
@pytest.mark.parametrize("reduction", ["ordered", "mpi"])
def test_updates_of_the_only_rank_with_learners_are_in_bursts_unless_mpi_adds(
    protocol: str, topology: str, reduction: str
) -> None:
    """MPI adds in an order of its own."""
    own: dict[str, Any] = {"topology": {"name": topology, "options": {"reduction": reduction}}}
    job = make_job(protocol, 3, training={"minibatch_size": 5}, cluster={"one_rank": False}, **own)
    _, runs = on_ranks(burst_runs, learners=0, jobs={"job": job}, ways=(ASKED, "bursts"), together=True)
    assert (runs["job: bursts"]["updates"] > 0) == (reduction == "ordered")
    assert runs["job: bursts"]["content"] == runs[f"job: {ASKED}"]["content"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["fused", "streams"])
def test_a_bank_continues_if_one_learner_did_not_wait_for_a_burst(name: str) -> None:
    """Messages may reach the learners of a rank apart. A fused bank then waits for a request that is held back."""
    _, runs, _ = on_ranks(burst_runs, jobs={name: LOCAL[name]}, ways=(ASKED, "early"), together=True)
    assert runs[f"{name}: early"]["local steps"] > 0
    assert runs[f"{name}: early"]["content"] == runs[f"{name}: {ASKED}"]["content"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", ["streams", "fused", "sma, period 3", "BatchNorm", "hardsync, streams", "hardsync, fused"]
)
def test_all_adverse_orders_give_one_result(name: str) -> None:
    ways = [ASKED, *(f"recorded {seed}" for seed in range(SEEDS))]
    made = on_ranks(burst_runs, jobs={name: JOBS[name]}, ways=ways)
    runs = {key: value for rank in made for key, value in rank.items()}
    asked = runs.pop(f"{name}: {ASKED}")["content"]
    assert len(runs) == SEEDS
    assert all(run["updates"] and not run["refusal"] for run in runs.values())
    assert set().union(*(differing(run["content"], asked) for run in runs.values())) <= rounded(name)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name",
    [
        *("streams", "fused", "sma, period 5", "sma, period 1", "elastic, fused", "blocks"),
        *("hardsync, two ranks", "hardsync, two ranks, fused"),
    ],
)
def test_all_adverse_orders_of_local_steps_give_one_result(name: str) -> None:
    ways = [ASKED, *(f"recorded {seed}" for seed in range(LOCAL_SEEDS))]
    _, runs, _ = on_ranks(burst_runs, jobs={name: (LOCAL | LOCKSTEP)[name]}, ways=ways, together=True)
    asked = runs.pop(f"{name}: {ASKED}")["content"]
    assert len(runs) == LOCAL_SEEDS
    way = "in lockstep" if name in LOCKSTEP else "local steps"
    assert all(run[way] and not run["refusal"] for run in runs.values())
    assert set().union(*(differing(run["content"], asked) for run in runs.values())) <= rounded(name)


JOB = """
[model]
name = "mlp"
[data]
name = "digits"
[training]
epochs = {epochs}
minibatch_size = 4
[optimizer]
learning_rate = {rate}
[protocol]
name = "{protocol}"
{rule}
[cluster]
learners = 4
learners_per_device = {each}
one_rank = {alone}
bank = "loop"
[results]
flush_s = 0.1
report_s = 0.05
checkpoint_every = "{every} updates"
"""


def job_text(epochs: int, rate: float, ranks: int = 1, protocol: str = "sma") -> str:
    """Text of a job with this number of ranks with learners. On two ranks `sma` has bursts of local steps."""
    period, alone, every = (1, "true", 100) if ranks == 1 else (5, "false", 20)
    every = 100 if protocol == "hardsync" else every
    rule = '[topology]\nname = "groups"' if protocol == "hardsync" else f"[averaging]\nperiod = {period}"
    about = {"protocol": protocol, "rule": rule, "alone": alone, "every": every}
    return JOB.format(epochs=epochs, rate=rate, each=4 // ranks, **about)


@pytest.mark.parametrize(
    ("ranks", "update", "protocol"), [(1, 100, "sma"), (2, 20, "sma"), (1, 100, "hardsync"), (2, 100, "hardsync")]
)
def test_a_run_that_is_stopped_in_a_burst_can_be_resumed_and_replayed(
    tmp_path: Path, ranks: int, update: int, protocol: str
) -> None:
    job, output, straight = tmp_path / "job.toml", tmp_path / "out.h5", tmp_path / "straight.h5"
    job.write_text(job_text(8, 0.02, ranks, protocol))
    code, err = run_until(job, output, update=update, number=signal.SIGINT)
    assert code == EXIT_STOPPED, err
    assert finish(start("resume", output))[0] == 0
    assert replays(output)
    assert finish(start("run", job, "--output", straight))[0] == 0
    with rudra.open_results(output) as one, rudra.open_results(straight) as other:
        assert one.summary()["weights_sha256"] == other.summary()["weights_sha256"]


ASKS = "import rudra.mpi.bursts; rudra.mpi.bursts.makes_bursts = lambda *_: False"
"""Line of Python after which ranks ask their learners for each step."""


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", ["sma", "hardsync"])
@pytest.mark.parametrize(("ranks", "bank"), [(1, "loop"), (1, "graphs"), (2, "loop"), (2, "graphs")])
def test_recorded_bursts_and_lockstep_on_a_gpu_give_the_weights_of_a_run_whose_learners_are_asked(
    tmp_path: Path, ranks: int, bank: str, protocol: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    job, found = tmp_path / "job.toml", set()
    text = job_text(3, 0.02, ranks, protocol).replace('bank = "loop"', f'bank = "{bank}"\ndevice = "cuda"')
    job.write_text(text)
    for name, before in (("bursts", "pass"), ("asked", ASKS)):
        code, _, err = finish(start("run", job, "--output", tmp_path / f"{name}.h5", before=before))
        assert code == 0, err
        with rudra.open_results(tmp_path / f"{name}.h5") as results:
            found.add(results.summary()["weights_sha256"])
    assert len(found) == 1


@pytest.mark.parametrize(("ranks", "protocol"), [(1, "sma"), (2, "sma"), (1, "hardsync"), (2, "hardsync")])
def test_a_loss_that_is_not_finite_in_a_burst_names_learner_and_minibatch(
    tmp_path: Path, ranks: int, protocol: str
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(job_text(2, 1e9, ranks, protocol))
    code, _, err = finish(start("run", job, "--output", tmp_path / "out.h5"))
    assert code == 1
    assert re.search(r"learner \d.*the loss of mini-batch \d+ is nan: a smaller learning_rate may help", err), err
