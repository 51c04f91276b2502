"""Code that files name is imported only from files of this user's own runs, or of those that the user trusts."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from results_files import write_run

from rudra import trust
from rudra.cli.main import main
from rudra.core.digest import digest_of, sample
from rudra.core.training_state import TrainingState
from rudra.errors import CheckpointError, ResultsError, TrustError
from rudra.job.job import Job
from rudra.prepare.replayed import replayed_job
from rudra.prepare.resume import resumable
from rudra.results import plan_rows
from rudra.results.checkpoint import CheckpointWriter, read
from rudra.results.reader import open_results

NAME = "strangers_own_rules"
MODEL = {"model": {"name": f"{NAME}:Net"}, "topology": {"name": f"{NAME}:base"}}


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def run(directory: Path, signature: dict[str, str] | None = None, **tables: Any) -> Path:
    """Result file and checkpoint of an interrupted run; modules beside them."""
    job = Job(cluster={"learners": 4, "threads_per_rank": 1}, training={"epochs": 4})
    said = {**json.loads(job.to_json()), **tables}
    path = directory / "run.h5"
    about = {"not_replayable": "", "python_objects": "", **(signature or {})}
    write_run(path, updates=16, epochs=2, staleness=0, finish=False, job=json.dumps(said), **about)
    writer = CheckpointWriter(path.with_suffix(".ckpt"), said, about)
    position = TrainingState(timestamp=16, epoch=2, samples=512, applied=32, steps=(8, 8, 8, 8))
    writer.save(position, {"weights": np.zeros(3, np.float32)})
    writer.commit()
    (directory / f"{NAME}.py").write_text(f"open({str(directory / 'executed')!r}, 'w')\n")
    return path


@pytest.mark.parametrize(
    "words",
    [
        *("resume", "show", "show --json", "timeline -o t.json", "watch --once", "topology", "export -o w.pt"),
        *("report -o r.html", "plot -o p.png"),
    ],
)
def test_a_strangers_file_executes_nothing(
    tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run(tmp_path, hooks=[{"at": "end", "call": "csv", "options": {"file": ".bashrc"}}], **MODEL)
    command, *options = words.split()
    code = main([command, str(path), *options])
    assert not (tmp_path / "executed").exists()
    assert str(tmp_path) not in sys.path
    if command in {"report", "plot"}:
        assert code == 0
    if command == "resume":
        assert code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"model.name = {NAME}:Net" in line
        assert "--trust" in line
        assert "hooks.0.call = csv" in line


def test_a_replay_of_a_strangers_file_executes_nothing(tmp_path: Path) -> None:
    with open_results(run(tmp_path, **MODEL)) as results, pytest.raises(TrustError, match=f"model.name = {NAME}:Net"):
        replayed_job(results, None)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_the_user_trusts_or_has_signed_names_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"model": {"name": "nets:Net", "options": {"inner": ["os:system"]}}}
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    about = trust.signed(job, "7")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert set(trust.code_of(job)) == {"model.name", "model.options.inner.0"}
    altered = {"model": {"name": "os:system"}}
    for tables, said in (
        (altered, about),
        (job, about | {"run": "8"}),
        (job, about | {"modules": '["/tmp"]'}),
        (job, {}),
        (job, about | {"signature": ""}),
    ):
        with pytest.raises(TrustError, match="--trust"):
            trust.admit(Path("a.h5"), tables, tables, said, trust=False)
    assert str(tmp_path) not in sys.path
    trust.admit(Path("a.h5"), altered, altered, {}, trust=True)
    assert str(tmp_path) not in sys.path
    trust.admit(Path("a.h5"), job, job, about, trust=False)
    assert str(tmp_path) in sys.path


def test_the_key_is_this_users_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = {"model": {"name": "nets:Net"}}
    assert trust.signed(job, "7")["signature"]
    key = tmp_path / "data" / "rudra" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert os.listdir(key.parent) == ["key"]
    key.chmod(0o640)
    assert trust.signed(job, "7")["signature"] == ""
    with pytest.raises(TrustError):
        trust.admit(Path("a.h5"), job, job, {"run": "7", "modules": "[]", "signature": ""}, trust=False)


def test_a_user_without_a_folder_gets_unsigned_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert trust.signed({"model": {"name": "nets:Net"}}, "7")["signature"] == ""
    assert "--trust" in capsys.readouterr().err
    assert trust.signed({"model": {"name": "lenet"}}, "7")["signature"] == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("first", "second"), [({"run": "1"}, {"run": "2"}), ({}, {})])
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, first: dict[str, str], second: dict[str, str]) -> None:
    (tmp_path / "b").mkdir()
    path = run(tmp_path, first)
    resumable(path)
    other = run(tmp_path / "b", second, **({} if second else {"training": {"seed": 5, "epochs": 4}}))
    path.with_suffix(".ckpt").write_bytes(other.with_suffix(".ckpt").read_bytes())
    with pytest.raises(CheckpointError, match=r"belongs to another run than .*run\.h5"):
        resumable(path)


@pytest.mark.parametrize(("topology", "told"), [("base", True), ("replicas", False)])
def test_old_runs_of_one_job_are_told_apart_by_their_weights(tmp_path: Path, topology: str, told: bool) -> None:
    job = Job(cluster={"learners": 4}, topology={"name": topology}, protocol={"name": "softsync" if told else "easgd"})
    job_tables = json.loads(job.to_json())
    path = run(tmp_path, topology=job_tables["topology"], protocol=job_tables["protocol"])
    rows = plan_rows.rows_of(job.plan())
    about = {"not_replayable": "", **plan_rows.about(job.plan())}
    with open_results(path) as results:
        said = json.dumps(results.job)
    for number, weights in enumerate((np.zeros(3, np.float32), np.ones(3, np.float32))):
        digest = digest_of(weights[sample(16, 3)].tobytes())
        write_run(
            path,
            updates=16,
            epochs=2,
            staleness=0,
            finish=False,
            job=said,
            roles=rows,
            digest=digest,
            overwrite=True,
            **about,
        )
        if told and number:
            with pytest.raises(CheckpointError, match=r"another run than .*run\.h5: the weights of update 16 differ"):
                resumable(path)
        else:
            resumable(path)


def test_a_pipe_and_a_directory_are_no_checkpoints(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").mkdir()
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(CheckpointError, match=f"{name}: (is not a file|cannot read)"):
            read(tmp_path / name)


def test_an_attribute_whose_bytes_h5py_takes_for_addresses_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    opaque = h5py.h5t.create(h5py.h5t.OPAQUE, 8)
    opaque.set_tag(b"NUMPY:|O")
    with h5py.File(path, "w") as file:
        attribute = h5py.h5a.create(file.id, b"a", opaque, h5py.h5s.create_simple((2,)))
        attribute.write(np.array([65, 66], "u8").view("V8"), mtype=opaque)
    with pytest.raises(ResultsError, match="attribute 'a' is neither a text nor a number"):
        open_results(path)
