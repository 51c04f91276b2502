"""The RALP paper's cluster and networks for simulations: sizes, times, and what its studies compare."""

import pytest
import torch

from rudra.compute.models import build
from rudra.data.load import DataInfo
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.jobfiles import PAPER, read_toml, shipped_jobs
from rudra.job.tables import ModelTable
from rudra.prepare import cost_files
from rudra.prepare.points import at
from rudra.simulation.predict import outline, predict
from rudra.studies import standins, sweep
from rudra.studies.standins import STAND_INS
from tests.unit.convnets import NAMES, timed

INFO = DataInfo("noise", 100, 10, (1,), 1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_stand_in_has_the_sizes_and_times_that_follow_from_shapes(name: str) -> None:
    layers, _, cut = timed(name)
    front, back = (sum(layer.parameters_bytes for layer in part) // 4 for part in (layers[:cut], layers[cut:]))
    share = sum(layer.seconds for layer in layers[:cut]) / sum(layer.seconds for layer in layers)
    assert STAND_INS[name] == (front, layers[cut - 1].output_bytes // 4, back, round(share * 1e6))
    assert [*STAND_INS] == [*NAMES]


@pytest.mark.parametrize("name", STAND_INS)
def test_the_preset_has_the_times_of_a_stand_in(name: str) -> None:
    layers, size, cut = timed(name)
    keys = read_toml(cost_files.find("ralp"))["models"][f"rudra.studies.standins:{name}"]
    assert list(keys) == ["compute_s"]
    ((minibatch, seconds),) = keys["compute_s"].items()
    assert int(minibatch) == size
    assert seconds == pytest.approx(sum(layer.seconds for layer in layers), rel=1e-3)
    assert layers[cut].name == "linear1"


@pytest.mark.parametrize(("name", "millions"), [("VGG11", 132.86), ("LeNet", 2.17), ("ResNet50_22k", 68.2)])
def test_a_stand_in_has_the_size_of_its_network_and_can_be_cut(name: str, millions: float) -> None:
    job = Job(
        model={"name": f"rudra.studies.standins:{name}"},
        data={"name": "rudra.data.noise:noise", "options": {"shape": [1]}, "classes": 1000},
        training={"minibatch_size": 64},
        protocol={"name": "hardsync"},
        placement={"cut": "back", "rule": "synchronous"},
        cluster={"learners": 3, "threads_per_rank": 1},
        simulation={"tensors": False},
    )
    layers, _, cut = timed(name)
    size, front = (sum(layer.parameters_bytes for layer in part) for part in (layers, layers[:cut]))
    found = outline(job)
    assert size / 4e6 == pytest.approx(millions, abs=0.05)
    assert found.size_bytes == pytest.approx(size, abs=1000)
    assert found.placed.front == pytest.approx(front / size)
    assert found.placed.crossing == pytest.approx(64 * layers[cut - 1].output_bytes / size)
    back_s, whole_s = (sum(layer.seconds for layer in part) for part in (layers[cut:], layers))
    assert found.placed.back == pytest.approx(back_s / whole_s, abs=1e-3)


def test_there_is_no_other_stand_in() -> None:
    with pytest.raises(ConfigError, match="has no attribute 'VGG12'; did you mean VGG1"):
        build(ModelTable(name="rudra.studies.standins:VGG12"), INFO, 0)
    assert set(STAND_INS) <= set(dir(standins))
    model = build(ModelTable(name="rudra.studies.standins:LeNet"), INFO, 0)
    assert model(torch.zeros(2, 1)).shape == (2, 1000)


@pytest.mark.parametrize("row", range(2))
def test_communication_takes_what_figure_2_says(row: int) -> None:
    """Its share of a step, the mean of the eight networks, with as many servers as workers."""
    printed = read_toml(shipped_jobs()["ralp/table3"].with_name(PAPER))["figure2"]["rows"][row]
    workers, shares = printed["workers"], []
    for name in STAND_INS:
        if name.endswith("_22k"):
            continue
        job = Job(
            model={"name": f"rudra.studies.standins:{name}"},
            data={"name": "rudra.data.noise:noise", "options": {"shape": [1]}, "classes": 1000},
            training={"minibatch_size": timed(name)[1]},
            protocol={"name": "hardsync"},
            topology={"name": "sharded", "options": {"shards": workers, "servers_on_own_nodes": True}},
            cluster={"learners": workers},
            simulation={"costs": "ralp", "tensors": False},
        )
        found = predict(job, samples=10**6, updates=40)
        # A forward pass that begins while weights arrive counts as waiting in the shares, but is no communication.
        table, size = found.job.simulation, job.training.minibatch_size
        shares.append(1 - at(table.compute_s, size) * found.samples_per_s / (workers * size))
    assert sum(shares) / len(shares) == pytest.approx(printed["communication"], abs=0.1)


@pytest.mark.parametrize(
    ("name", "rows", "against"),
    [("figure3", 1, 1), ("figure7", 2, 2), ("figure8", 1, 1), ("figure9", 1, 1), ("table3", 8, 4), ("table4", 4, 4)],
)
def test_a_study_has_the_runs_that_the_paper_prints(name: str, rows: int, against: int) -> None:
    study = sweep.plan(f"ralp/{name}")
    jobs = {point.file: point.job for point in study.points}
    assert len({point.label for point in study.points}) == len(study.points)
    assert len(study.paper) == rows
    assert sum("against" in row for row in study.paper) == against
    for row in study.paper:
        job = jobs[row["file"]]
        assert str(job.model.name).endswith(f":{row['model']}")
        assert job.placement.given == row.get("merged", False)
        assert job.simulation.sharing == "equal"
        if "against" in row:
            other = jobs[row["against"]]
            assert other is not job
            assert other.model == job.model
            assert not other.placement.given
        if name.startswith("table"):
            assert len(job.simulation.background_jobs) == 7


def test_eight_jobs_have_every_gpu_once() -> None:
    """Four to a machine: a server and three workers, in every mix."""
    for name in ("table3", "table4"):
        for point in sweep.plan(f"ralp/{name}").points:
            table = point.job.simulation
            places = [table.machines, *(keys["simulation.machines"] for keys in table.background_jobs)]
            taken = [machine for machines in places for machine in machines[:4]]
            assert sorted(taken) == sorted([*range(8)] * 4)
            assert all(machines[3] == machines[-1] for machines in places), "the stage server is the server's neighbour"
