"""What `rudra run` checks before it starts ranks; nothing here starts any."""

from pathlib import Path

import pytest

from rudra import preflight
from rudra.errors import ConfigError, RudraError
from rudra.job.job import Job
from rudra.machine import RANK_BYTES


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, room for 600 ranks, no batch system."""
    monkeypatch.setattr(preflight, "cores", lambda: 2)
    monkeypatch.setattr(preflight, "free_memory", lambda: 600 * RANK_BYTES)
    for name in preflight.ALLOCATIONS:
        monkeypatch.delenv(name, raising=False)


def checked(*changes: str) -> None:
    job = Job.load("digits", changes).resolved()
    preflight.check(job, job.plan(), begins=True)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["data.name=idx", "data.path=nowhere"], "nowhere: no such file or directory; --set data.path=PLACE"),
        (["data.name=idx"], r"\[data\] name = idx needs path"),
        (["training.warm_start=nowhere.h5"], r"\[training\] warm_start: nowhere.h5: no such file"),
        (["training.minibatch_size=1443"], r"minibatch_size = 1443 \(μ\) exceeds the training set; use 1 to 1,442"),
        (["data.train_limit=50", "training.minibatch_size=51"], r"exceeds the training set; use 1 to 50"),
        (["cluster.learners=599"], r"learners = 599: 601 ranks take 18.9 GB of memory .* 18.9 GB are free; use fewer"),
    ],
)
def test_a_run_that_cannot_work_is_refused(changes: list[str], line: str) -> None:
    with pytest.raises(RudraError, match=line):
        checked(*changes)


def test_many_more_ranks_than_cores_are_one_warning_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    checked("cluster.learners=4")
    assert capsys.readouterr().err == ""
    checked("cluster.learners=500")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "502 ranks share 2 cores, which is slow; they take 15.8 GB of memory" in said


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = 'cuda': torch sees no GPU for learner 0 .*; valid there: cpu"):
        checked("cluster.device=cuda")


def test_under_a_batch_system_ranks_check_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    checked("data.name=idx", "data.path=nowhere", "cluster.learners=9999")


@pytest.mark.parametrize(("size", "small"), [(preflight.QUICK_BYTES, True), (preflight.QUICK_BYTES + 1, False)])
def test_samples_of_large_files_are_not_counted_before_the_run(size: int, small: bool, tmp_path: Path) -> None:
    with (tmp_path / "data.csv").open("wb") as file:
        file.truncate(size)  # takes no room on the disk
    assert preflight._is_small(tmp_path / "data.csv") == preflight._is_small(tmp_path) == small
