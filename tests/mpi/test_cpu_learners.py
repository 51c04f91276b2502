"""A learner on a device and a learner on the CPU in one group: the same weights, and shares by measured speed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from processes import finish, start

import rudra
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import CPU
from rudra.compute.memory_plan import planned
from rudra.data.load import load
from rudra.results.reader import Results
from rudra.simulation import replay
from topologies import Plan

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

JOB = """
[model]
name = "small_models:dropping"
[data]
name = "point_data:unlike"
[training]
epochs = 3
minibatch_size = 8
seed = 7
[optimizer]
learning_rate = 0.05
momentum = 0.9
[protocol]
name = "hardsync"
[topology]
name = "groups"
[cluster]
learners = 2
threads_per_rank = 1
device = "cuda"
cpu_learners = 1
shares = "auto"
"""
LARGE = """
[[hogbatch.workers]]
kind = "large"
min = 16
max = 16
"""


def train(path: Path, job: Path, *overrides: str, resume: bool = False, free: int | None = None, code: int = 0) -> str:
    """Trains with learner 0 on a late device with this memory, and returns what the command says."""
    rank = rudra.Job.load(job).plan().ranks - 2
    before = f"import late_devices; late_devices.launch_beside_a_cpu({rank}, {free})"
    sets = [word for override in overrides for word in ("--set", override)]
    ended, _, err = finish(start("run", job, "--output", path, *sets, *["--resume"] * resume, before=before))
    assert ended == code, err
    return err


def samples_per_s(results: Results) -> float:
    """Samples per second of the updates after the first."""
    updates = results.updates
    return float(updates["samples"][1:].sum() / (updates["time_s"][-1] - updates["time_s"][0]))


def test_a_batch_is_divided_between_a_device_and_the_cpu_by_measured_speed(tmp_path: Path) -> None:
    """The learner on the CPU takes four times as long for a sample."""
    job, equal, output = tmp_path / "job.toml", tmp_path / "equal.h5", tmp_path / "out.h5"
    job.write_text(JOB)
    train(equal, job, "cluster.shares=[1,1]")
    told = train(output, job)
    assert "when all compute, learners take" in told
    with rudra.open_results(equal) as before, rudra.open_results(output) as results:
        about = results.attributes
        assert (about["device"], about["cpu_learners"], about["transport"]) == ("cuda", "1", "staged")
        share, of_cpu = results.job["cluster"]["shares"]
        assert of_cpu == 1.0
        assert 2.5 < share < 5.5
        assert_divided(results)
        assert samples_per_s(results) > 1.5 * samples_per_s(before)


def assert_divided(results: Results) -> None:
    """Each sample of a pass was drawn once, and the learner on the CPU, learner 1, had the smaller part of a batch."""
    rows = np.sort(results.gradients, order="first")
    assert (rows["first"][1:] == rows["first"][:-1] + rows["samples"][:-1]).all()
    assert rows["samples"][rows["learner"] == 1].max() < rows["samples"][rows["learner"] == 0].min()


@pytest.mark.parametrize("topology", ["groups", "base"])
def test_a_device_and_the_cpu_train_what_two_cpus_do(
    tmp_path: Path, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run stops and is resumed. A replay computes each gradient on the kind of device of its learner."""
    job, output = tmp_path / "job.toml", tmp_path / "out.h5"
    job.write_text(JOB.replace('"groups"', f'"{topology}"').replace('"auto"', "[3, 1]"))
    how = ["cluster.deterministic=true", "data.name=point_data:prompt", "training.minibatch_size=10"]
    train(output, job, *how, "training.epochs=1")
    train(output, job, *how, resume=True)
    given = rudra.Job.load(job, [*how, "cluster.device=cpu"])
    with rudra.open_results(output) as results:
        sha256 = results.summary()["weights_sha256"]
        assert (results.events["kind"] == b"restart").sum() == 1
        assert_divided(results)
    with rudra.simulate(given, output=tmp_path / "cpu.h5", progress="quiet") as results:
        assert results.summary()["weights_sha256"] == sha256
        assert results.attributes["cpu_learners"] == ""
    made: list[tuple[int, ...]] = []
    make = replay.make_executors

    def note(job: rudra.Job, plan: Plan, roles: tuple[int, ...], *about: Any, **more: Any) -> Any:
        made.append(roles)
        return make(job, plan, roles, *about, **more)

    monkeypatch.setattr(replay, "make_executors", note)
    replayed = rudra.replay(output, quiet=True)
    assert replayed.identical
    assert replayed.weights_sha256 == sha256
    assert len(made) == 2
    assert made[1] == (max(made[0]) + 1,), "learner 1, which is last"


def test_a_measured_part_that_does_not_fit_on_the_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mini-batch fits there, and the part of a device that is four times as fast does not."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("epochs = 3", "evaluation_batch_size = 1"))
    monkeypatch.setitem(DEVICES, "cpu", AdverseDevice(0))
    job = rudra.Job.load(path).resolved()
    found = planned(job, job.plan(), load(job.data, seed=7), CPU)
    assert found is not None
    assert found.total(8) < found.total(9) < found.total(10)
    told = train(tmp_path / "out.h5", path, free=found.total(9), code=2)
    assert "when all compute, learners take" in told
    assert told.count("[training] minibatch_size = 8 (μ): a learner takes") == 1
    assert "Traceback" not in told


def test_hogbatch_workers_on_a_device_and_the_cpu_are_repeated_bit_for_bit(tmp_path: Path) -> None:
    job, output = tmp_path / "job.toml", tmp_path / "out.h5"
    text = (
        JOB.replace("dropping", "regular")
        .replace("hardsync", "hogbatch")
        .replace("groups", "base")
        .replace("0.9", "0.0")
    )
    text = text.replace("cpu_learners = 1\n", "").replace('shares = "auto"', "deterministic = true")
    job.write_text(f"{text}[[hogbatch.workers]]\nlearners = [1]\nkind = 'small'\ndevice = 'cpu'\n{LARGE}")
    train(output, job)
    with rudra.open_results(output) as results:
        assert results.attributes["cpu_learners"] == "1"
        assert {*results.gradients["learner"]} == {0, 1}
    assert rudra.replay(output, quiet=True).identical


# With a GPU.


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_divide_a_batch_by_measured_speed(gpu: torch.device, tmp_path: Path) -> None:
    """The model is large enough for a GPU to be faster than a thread of the processor."""
    job = rudra.Job.load("digits").with_(
        protocol={"name": "hardsync", "n": None},
        topology={"name": "groups"},
        model={"name": small_models.broad_digits},
        optimizer={"learning_rate": 0.05, "momentum": 0.9, "milestones": []},
        cluster={"learners": 2, "device": "cuda", "cpu_learners": 1, "threads_per_rank": 1, "shares": "auto"},
        training={"epochs": 4, "minibatch_size": 64},
    )
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        about = results.attributes
        assert (about["device"], about["cpu_learners"], about["transport"]) == ("cuda", "1", "staged")
        assert about["device_model"] == torch.cuda.get_device_name(gpu)
        assert_divided(results)
        losses = results.epochs["test_loss"]
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("topology", ["groups", "base"])
def test_a_deterministic_run_on_a_gpu_and_the_cpu_is_repeated_bit_for_bit(
    gpu: torch.device, tmp_path: Path, topology: str
) -> None:
    job = rudra.Job.load("digits").with_(
        protocol={"name": "hardsync", "n": None},
        topology={"name": topology},
        cluster={"learners": 2, "device": "cuda", "cpu_learners": 1, "shares": [3, 1], "deterministic": True},
        training={"epochs": 2},
    )
    path = tmp_path / "run.h5"
    rudra.run(job, output=path, progress="quiet").close()
    assert rudra.replay(path, quiet=True).identical
