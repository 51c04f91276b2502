"""Banks of learners on real ranks: the bits of a loop, fused banks as in virtual time, and what ends in between."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import point_data
import pytest
import runs_on_ranks
import small_models
from job_files import short_job as job_file
from processes import finish, mpirun, ours, ranks_of, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN, covering, selected

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

LEARNERS = 4


def make_job(rule: str, per_device: int, bank: str, **tables: Any) -> rudra.Job:
    many = {"learners_per_device": per_device, "bank": bank} if per_device > 1 else {}
    many |= {"streams": min(3, per_device)} if bank == "graphs" else {}
    return rudra.Job(
        name="bank",
        model={"name": small_models.everything},
        data={"name": point_data.hasty},
        training={"epochs": 1, "minibatch_size": 4, "seed": 3},
        optimizer={"learning_rate": 0.02, "momentum": 0.9},
        protocol={"name": rule, "reference_batch_size": 16, **tables.pop("protocol", {})},
        cluster={"learners": LEARNERS, "threads_per_rank": 1, **many, **tables.pop("cluster", {})},
        fault_tolerance={"stall_limit_s": 60.0},
        **tables,
    )


IN_STEP: dict[str, tuple[str, dict[str, Any]]] = {
    "hardsync": ("hardsync", {}),
    "one group": ("hardsync", {"topology": {"name": "groups"}}),
    "two groups": ("hardsync", {"topology": {"name": "groups", "options": {"groups": 2}}}),
    "sma": ("sma", {}),
    "average": ("average", {"averaging": {"period": 2}}),
    "diloco": ("diloco", {"averaging": {"period": 3}}),
    "dormant": (
        "sma",
        {"cluster": {"active_learners": 3}, "changes": [{"at_update": 6, "cluster": {"active_learners": 4}}]},
    ),
}
ASYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "async": ("async", {}),
    "softsync": ("softsync", {"protocol": {"n": 2}}),
    "elastic": ("easgd", {"topology": {"options": {"parameter_server": True}}}),
    "changed": ("softsync", {"changes": [{"at_update": 4, "protocol": {"name": "hardsync"}}]}),
}


FORMS = [(name, m) for name in IN_STEP for m in (2, 4) if not (m == 4 and name == "two groups")]  # within a group
FEW = [("hardsync", 4), ("one group", 4), ("two groups", 2), ("dormant", 4)]  # the last is sma, too
IN_LOOPS = ["hardsync", "one group", "dormant"]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, int, str], Path]:
    """Result files of one launch, by case, learners on a rank, and form."""
    forms = sorted({(*form, "fused")[:3] for form in selected(request, "form")})
    looped = selected(request, "name")
    alone = looped | {name for name, *_ in forms if name in IN_STEP}
    runs = {
        (name, m, "loop"): make_job(protocol, m, "loop", **tables)
        for name, (protocol, tables) in IN_STEP.items()
        for m, wanted in ((1, alone), (4, looped))
        if name in wanted
    }
    for name, m, bank in forms:
        protocol, tables = (IN_STEP | ASYNCHRONOUS)[name]
        runs[name, m, bank] = make_job(protocol, m, bank, **tables)
    directory = tmp_path_factory.mktemp("runs")
    paths = {case: directory / f"{place}.h5" for place, case in enumerate(runs)}
    jobs = {str(path): runs[case] for case, path in paths.items()}
    counts = on_ranks(runs_on_ranks.train_banks, LEARNERS + 2, jobs=jobs)
    for case, path in paths.items():  # their bits may be those of a loop, too
        assert (sum(count[str(path)] for count in counts) > 0) == (case[2] == "fused"), case
    return paths


def digest(path: Path) -> str:
    with rudra.open_results(path) as results:
        return str(results.summary()["weights_sha256"])


@pytest.mark.parametrize("name", covering(IN_LOOPS, [name for name in IN_STEP if name != "two groups"]))
def test_a_loop_of_learners_on_a_device_has_the_bits_of_ranks_with_one_learner(
    recorded: dict[tuple[str, int, str], Path], name: str
) -> None:
    assert digest(recorded[name, 4, "loop"]) == digest(recorded[name, 1, "loop"])
    assert replays(recorded[name, 4, "loop"])


@pytest.mark.parametrize(
    "form",
    covering(
        [("two groups", 2, "graphs"), ("dormant", 4, "graphs")],
        [(name, m, "graphs") for name, m in FORMS],
    ),
    ids=str,
)
def test_learners_that_compute_at_the_same_time_have_the_bits_of_ranks_with_one_learner(
    recorded: dict[tuple[str, int, str], Path], form: tuple[str, int, str]
) -> None:
    """Their models have dropout, and up to three of them compute at the same time."""
    assert digest(recorded[form]) == digest(recorded[form[0], 1, "loop"])
    with rudra.open_results(recorded[form]) as results:
        assert results.job["cluster"]["bank"] == "graphs"
        assert not results.attributes["not_replayable"]
    assert replays(recorded[form])


@pytest.mark.parametrize("form", covering(FEW, FORMS), ids=str)
def test_a_fused_bank_on_ranks_is_the_simulated_one(
    recorded: dict[tuple[str, int, str], Path], form: tuple[str, int], tmp_path: Path
) -> None:
    """Mini-batches are delayed at random, so learners of a bank become ready in any order."""
    name, m = form
    path, (protocol, tables) = recorded[name, m, "fused"], IN_STEP[name]
    with (
        rudra.open_results(path) as results,
        rudra.open_results(recorded[name, 1, "loop"]) as alone,
        rudra.simulate(make_job(protocol, m, "fused", **tables), output=tmp_path / "s.h5", progress="quiet") as virtual,
    ):
        assert results.job["cluster"]["bank"] == "fused"
        learners = results.roles[results.roles["kind"] == b"learner"]
        assert np.bincount(learners["world_rank"]).max() == m
        assert results.summary()["weights_sha256"] == virtual.summary()["weights_sha256"]
        columns = ["update", "learner", "samples", "step", "timestamp", "staleness"]
        assert np.array_equal(np.sort(results.gradients[columns]), np.sort(alone.gradients[columns]))
        assert results.weights is not None
        assert alone.weights is not None
        assert np.abs(results.weights - alone.weights).max() <= 1e-4
    with rudra.open_results(path) as results:
        replayable = not results.attributes["not_replayable"]
    assert replayable == (protocol != "hardsync" or name == "one group")
    assert not replayable or replays(path)


@pytest.mark.parametrize(
    "form",
    covering(
        [("async", 2, "fused"), ("elastic", 2, "fused"), ("changed", 4, "fused"), ("softsync", 4, "graphs")],
        [(name, m, bank) for name in ASYNCHRONOUS for m in (2, 4) for bank in ("fused", "graphs")],
    ),
    ids=str,
)
def test_asynchronous_learners_of_a_bank_do_not_wait_for_each_other(
    recorded: dict[tuple[str, int, str], Path], form: tuple[str, int, str]
) -> None:
    name, _, bank = form
    with rudra.open_results(recorded[form]) as results:
        totals, gradients = results.totals[0], results.gradients
        assert results.status == "finished"
        assert totals["pushed"] == totals["applied"] + totals["discarded"] == results.learners["pushed"].sum()
        for learner in range(LEARNERS):
            mine = gradients[gradients["learner"] == learner]
            assert name == "elastic" or list(mine["step"]) == list(range(len(mine)))
        assert ("computed together" in results.attributes["not_replayable"]) == (bank == "fused")
    assert bank == "fused" or replays(recorded[form])


SETTINGS = ["cluster.learners=6", "cluster.learners_per_device=2", "cluster.bank=fused", "cluster.threads_per_rank=1"]


def in_form(form: str) -> list[str]:
    more = ["cluster.streams=2"] if form == "graphs" else []
    return [key.replace("bank=fused", f"bank={form}") for key in SETTINGS] + more


def settings(keys: list[str]) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.parametrize(
    ("form", "protocol", "topology", "rank", "dead"),
    [
        pytest.param("fused", "softsync", 'name = "base"', 2, [0, 1], marks=CAMPAIGN),
        ("fused", "hardsync", 'name = "groups"', 3, [4, 5]),
        ("graphs", "softsync", 'name = "base"', 2, [0, 1]),
    ],
)
def test_a_rank_that_is_killed_takes_its_bank_along(
    tmp_path: Path, form: str, protocol: str, topology: str, rank: int, dead: list[int]
) -> None:
    job, output = job_file(tmp_path, protocol, epochs=4, topology=topology), tmp_path / "out.h5"
    process = start("run", job, "--output", output, *settings(in_form(form)))
    wait_for_updates(process, output, 10)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    wait_for_deaths(process, output, len(dead))
    code, _, err = finish(process)
    assert code == 0, err
    assert "4 learners are left" in ours(err)[-1]
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        totals = results.totals[0]
        assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))


STOPPED = [("fused", "average"), ("graphs", "sma")]
MORE = [("fused", "hardsync"), ("fused", "softsync"), ("graphs", "softsync")]


@pytest.mark.parametrize("case", covering(STOPPED, STOPPED + MORE), ids=str)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not(tmp_path: Path, case: tuple[str, str]) -> None:
    form, protocol = case
    job, output = job_file(tmp_path, protocol, epochs=4), tmp_path / "out.h5"
    process = start("run", job, "--output", output, *settings(in_form(form)))
    wait_for_updates(process, output, 10)
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 3, err
    code, _, err = mpirun(4 if protocol in ("average", "sma") else 5, "resume", str(output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert results.job["cluster"]["bank"] == form
    if protocol == "average" or form == "graphs":
        assert replays(output)
    if protocol == "softsync":
        return
    whole = rudra.Job.load(job, in_form(form))
    with rudra.simulate(whole, output=tmp_path / "whole.h5", progress="quiet") as expected:
        assert digest(output) == expected.summary()["weights_sha256"]


def test_the_form_is_measured_recorded_and_kept_by_a_resumed_run(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "average"), tmp_path / "out.h5"
    keys = [key for key in (*SETTINGS, "training.epochs=1") if not key.startswith("cluster.bank")]
    code, _, err = mpirun(4, "run", str(job), "--output", str(output), *settings(keys))
    assert code == 0, err
    (line,) = [line for line in ours(err) if "bank of 2 learners" in line]
    with rudra.open_results(output) as results:
        form = results.job["cluster"]["bank"]
    assert f"bank of 2 learners: {form} (a gradient takes: fused " in line
    code, _, err = mpirun(4, "resume", str(output), "--set", "training.epochs=2")
    assert code == 0, err
    assert "bank of" not in err
    with rudra.open_results(output) as results:
        assert results.job["cluster"]["bank"] == form
        assert results.summary()["epochs"] == 2
