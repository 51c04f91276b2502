"""Ranks that compute elsewhere than where MPI reads and writes, and in half precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_code

import rudra
from rudra.bench.ranks import on_ranks
from rudra.devices import Stage
from rudra.errors import RudraError
from rudra.executor import Buffer
from rudra.messages import tail_bytes

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

RUNS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "async": {"protocol": {"name": "async"}, "cluster": {"wire": "float16"}},
    "adv*": {"protocol": {"name": "async"}, "topology": {"name": "adv*"}},
    "one group": {"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}},
    "two groups": {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
    "half": {"protocol": {"name": "async"}, "training": {"precision": "bfloat16"}},
}


def make_job(protocol: dict[str, Any], **tables: Any) -> rudra.Job:
    return rudra.Job(
        name="devices",
        model={"name": user_code.everything},
        data={"name": user_code.delayed},
        training={"epochs": 2, "minibatch_size": 4, "seed": 3, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.02, "momentum": 0.9},
        protocol={"reference_batch_size": 16, **protocol},
        cluster={"threads_per_rank": 1, **tables.pop("cluster", {})},
        **tables,
    )


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Result files of runs whose learners and tests compute on copies; all on the same ranks."""
    directory = tmp_path_factory.mktemp("runs")
    paths = {name: directory / f"{place}.h5" for place, name in enumerate(RUNS)}
    jobs = {str(path): make_job(**RUNS[name]) for name, path in paths.items()}
    ranks = on_ranks(user_code.train_on_copies, 3, jobs=jobs)
    server, *others = (rank["copies"] for rank in ranks)
    assert 0 < server < 3, "it is the statistics server where there is no other"
    assert min(others) > 30
    return paths


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_copies_is_repeated_without_them_bit_for_bit(staged: dict[str, Path], name: str) -> None:
    with rudra.open_results(staged[name]) as results:
        summary = results.summary()
    replayed = rudra.replay(staged[name], quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == summary["updates"] >= 30
    assert summary["final_test_error"] < 0.5


def test_tests_of_copies_come_to_the_same(staged: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(**RUNS["hardsync"]).with_(cluster={"learners": 3})
    with (
        rudra.open_results(staged["hardsync"]) as copied,
        rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as plain,
    ):
        assert copied.summary()["weights_sha256"] == plain.summary()["weights_sha256"]
        for column in ("test_loss", "test_error"):
            assert np.array_equal(copied.epochs[column], plain.epochs[column])


def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job({"name": "async"}, cluster={"learners": 1, "device": "cuda"})
    with pytest.raises(RudraError, match="exit code 2"):
        rudra.run(job, output=tmp_path / "run.h5", progress="quiet")
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rudra:")]
    assert len(said) == 1
    assert said[0].startswith("rudra: [cluster] device = 'cuda': torch sees no GPU for learner 0 (rank 2) on ")
    assert said[0].endswith("; valid there: cpu")


# With a GPU.


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_vectors_come_back_from_a_gpu_as_they_went(gpu: torch.device) -> None:
    stage = Stage(100_003, gpu)
    buffer, back = (Buffer(stage.size, tail_bytes(1), pinned=True) for _ in range(2))
    assert buffer.vector.is_pinned()
    for seed in range(3):
        buffer.vector.normal_(generator=torch.Generator().manual_seed(seed))
        buffer.version += 1
        stage.gradient.copy_(stage.weights(buffer))
        back.vector.copy_(stage.gradient)
        assert back.wire[: stage.size * 4].tobytes() == buffer.wire[: stage.size * 4].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("topology", ["base", "adv*", "groups"])
def test_learners_that_share_a_gpu_learn_digits(
    gpu: torch.device, tmp_path: Path, topology: str, precision: str
) -> None:
    job = rudra.Job.load("digits").with_(
        topology={"name": topology},
        cluster={"learners": 2, "device": "cuda"},
        training={"epochs": 10, "precision": precision},
    )
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.attributes["device"] == "cuda"
        assert "device cuda" in results.attributes["not_replayable"]
        assert results.summary()["final_test_error"] < 0.06
        assert results.weights is not None
        assert results.weights.dtype == np.float32


@pytest.mark.gpu
def test_a_gpu_is_found_and_computes_what_a_cpu_does(gpu: torch.device, tmp_path: Path) -> None:
    found = []
    for device, resolved in (("auto", "cuda"), ("cpu", "cpu")):
        job = rudra.Job.load("digits").with_(
            cluster={"learners": 2, "device": device}, protocol={"name": "hardsync", "n": None}, training={"epochs": 1}
        )
        with rudra.run(job, output=tmp_path / f"{device}.h5", progress="quiet") as results:
            assert results.attributes["device"] == resolved
            found.append(results.weights)
    assert np.abs(found[0] - found[1]).max() < 1e-3
