import json
import os
import resource
import subprocess
import sys
import textwrap
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import rudra
from rudra.core.records import (
    AVERAGE,
    EPOCH,
    EVENT,
    GRADIENT,
    LEARNER,
    METRIC,
    MINIBATCH,
    ROLE,
    STAGE,
    TIMES,
    TOTALS,
    UPDATE,
)
from rudra.errors import ResultsError, RudraError
from rudra.files import check_output, file_system
from rudra.job.job import Job
from rudra.prepare.start import StartRequest, decide
from rudra.results import plan_rows, validation, writer
from rudra.results.reader import FORMAT_VERSION, default_output, open_results
from tests.unit.results_files import LAYOUT, SIZE, WEIGHTS, new_writer, rows, sha256, write_run
from tests.waiting import eventually

CHILD = """
import sys
from pathlib import Path
from rudra.results import plan_rows
from rudra.job.job import Job
from rudra.errors import ResultsError
from rudra.core.records import EPOCH, GRADIENT, UPDATE
from tests.unit.results_files import *

path = Path(sys.argv[1])

def say(text):
    print(text, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def child(request, tmp_path):
    """Starts Python with the given lines after CHILD, and the result file's path as its argument."""

    def start(lines):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD + textwrap.dedent(lines), str(tmp_path / "run.h5")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

        def reap():
            process.kill()
            process.communicate(timeout=120)

        request.addfinalizer(reap)
        return process

    return start


def killed(writer):
    """Kills a child that has said one line."""
    assert writer.stdout.readline()
    writer.kill()
    writer.wait(timeout=120)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "run.h5"
    with new_writer(path, seed=7, missing=None) as writer:
        for kind, dtype in (
            ("gradients", GRADIENT),
            ("updates", UPDATE),
            ("minibatches", MINIBATCH),
            ("epochs", EPOCH),
        ):
            writer.append(kind, rows(dtype, 3, time_s=0.5) if "time_s" in dtype.names else rows(dtype, 3))
            writer.append(kind, rows(dtype, 1, samples=9))
        writer.finish(rows(TOTALS, pushed=5)[0], rows(LEARNER, 4, learner=range(4)), WEIGHTS, sha256(WEIGHTS))
    with open_results(path) as results:
        assert not results.live
        assert results.status == "finished"
        assert (results.attributes["format_version"], results.attributes["seed"]) == (FORMAT_VERSION, 7)
        assert results.attributes["hosts"] == ["köln", "b"]
        assert "missing" not in results.attributes
        assert results.job["protocol"]["n"] == 2
        for table in (results.gradients, results.updates, results.minibatches, results.epochs):
            assert table["samples"].tolist() == [16, 16, 16, 9]
        assert results.learners["learner"].tolist() == [0, 1, 2, 3]
        assert results.totals["pushed"].tolist() == [5]
        assert results.weights.tolist() == WEIGHTS.tolist()
        assert results.layout == LAYOUT
        tensors = results.state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {e.name: e.shape for e in LAYOUT}
    assert tensors["norm.running_mean"].tolist() == [19, 20, 21, 22]


def test_layout_of_the_file_is_the_documented_one(tmp_path):
    """Whoever changes this changes FORMAT_VERSION and the documentation too."""
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=1)
    with h5py.File(tmp_path / "run.h5") as file:
        found = {}
        file.visititems(lambda name, item: found.update({name: item.dtype}) if isinstance(item, h5py.Dataset) else None)
        assert not any(h5py.check_string_dtype(v.dtype) for v in file.values() if isinstance(v, h5py.Dataset))
        assert all(file.attrs.get_id(name).get_type().get_class() != h5py.h5t.VLEN for name in file.attrs)
        assert [h5py.check_string_dtype(file.attrs.get_id(n).dtype).length for n in ("name", "driver")] == [6, 3]
    layout = found.pop("weights/layout")
    assert found.pop("weights/names").names == ("name", "tensor", "dtype")
    assert layout.names == ("name", "kind", "dimensions", "shape", "offset", "size")
    assert found == {
        "gradients": GRADIENT,
        "updates": UPDATE,
        "minibatches": MINIBATCH,
        "epochs": EPOCH,
        "metrics": METRIC,
        "events": EVENT,
        "averages": AVERAGE,
        "stages": STAGE,
        "roles": ROLE,
        "learners": LEARNER,
        "totals": TOTALS,
        "state": np.dtype([("status", "S16"), ("reason", "S1024"), ("weights_sha256", "S64"), ("flushed_s", "<f8")]),
        "weights/final": np.dtype("<f4"),
        "weights/epochs": np.dtype("<f4"),
        "weights/kept": np.dtype("<i4"),
    }


def test_append_copies(tmp_path):
    with new_writer(tmp_path / "run.h5", flush_s=60) as writer:
        row = rows(UPDATE, samples=5)
        writer.append("updates", row)
        row["samples"] = 99
        writer.fail("failed", "")
    with open_results(tmp_path / "run.h5") as results:
        assert results.updates["samples"].tolist() == [5]


def test_rows_of_another_table_are_refused(tmp_path):
    with new_writer(tmp_path / "run.h5") as writer, pytest.raises(TypeError, match="gradients"):
        writer.append("gradients", rows(UPDATE))


def test_rows_are_flushed_after_flush_s(tmp_path):
    with new_writer(tmp_path / "run.h5", flush_s=100) as writer:
        start = os.times().elapsed  # any clock, for it is only compared with itself after the first flush
        writer.flush(start, force=True)
        for now, written in ((start + 99, 0), (start + 100, 2)):
            writer._pending["updates"].append(rows(UPDATE))
            writer.flush(now)
            assert writer._file["updates"].shape == (written,)


def test_rows_that_take_too_much_memory_are_flushed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("rudra.results.writer._MOST_BYTES", 3 * UPDATE.itemsize)
    with new_writer(tmp_path / "run.h5", flush_s=100) as writer:
        seen = []
        for _ in range(4):
            writer.append("updates", rows(UPDATE))
            seen.append(len(writer._file["updates"]))
        assert seen == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("leave", "status", "reason"),
    [
        (lambda w: w.fail("failed", "learner 3 lost: é" + 2000 * "x"), "failed", "learner 3 lost: é"),
        (lambda w: w.fail("interrupted", "stopped"), "interrupted", "stopped"),
        (lambda w: w.close(), "failed", "the run ended without a result"),
        (lambda w: 1 / 0, "failed", "division by zero"),
        (lambda w: _raise(KeyboardInterrupt()), "interrupted", "stopped on request"),
    ],
)
def test_a_run_without_an_end_keeps_its_rows_and_says_why(tmp_path, leave, status, reason):
    with suppress(ZeroDivisionError, KeyboardInterrupt), new_writer(tmp_path / "run.h5", flush_s=60) as writer:
        writer.append("updates", rows(UPDATE, 3))
        leave(writer)
    with open_results(tmp_path / "run.h5") as results:
        assert results.status == status
        assert results.state["reason"].startswith(reason)
        assert len(results.updates) == 3
        assert results.weights is None
        with pytest.raises(ResultsError, match=f"no final weights: the run is {status}"):
            results.state_dict()


def test_fail_after_the_end_changes_nothing(tmp_path):
    with new_writer(tmp_path / "run.h5") as writer:
        writer.finish(rows(TOTALS), rows(LEARNER, 4), WEIGHTS, sha256(WEIGHTS))
        writer.fail("failed", "too late")
    with open_results(tmp_path / "run.h5") as results:
        assert results.status == "finished"


def test_weights_take_no_space_before_the_end(tmp_path):
    size = 5_000_000
    writer = new_writer(tmp_path / "run.h5", size=size, layout=())
    writer.flush(force=True)
    assert (tmp_path / "run.h5").stat().st_size < 100_000
    assert np.isnan(writer._file["weights/final"][[0, -1]]).all()
    writer.finish(rows(TOTALS), rows(LEARNER, 4), np.ones(size, np.float32), sha256(np.ones(size, np.float32)))
    with open_results(tmp_path / "run.h5") as results:
        assert results.weights.sum() == size
    assert (tmp_path / "run.h5").stat().st_size < 4 * size + 5_000_000


def test_a_large_model_without_weights_yet_is_no_damage(tmp_path):
    new_writer(tmp_path / "run.h5", size=1 << 28, layout=()).fail("interrupted", "early")
    with open_results(tmp_path / "run.h5") as results:
        assert results.summary()["status"] == "interrupted"
        assert results.weights is None


@pytest.mark.parametrize("distance", [1e17, np.inf, np.nan])
def test_distances_in_a_run_that_diverged_are_no_damage(distance):
    averages = rows(AVERAGE, distance=distance, correction=distance)
    assert validation.rows("averages", averages, 1) is averages
    with pytest.raises(ValueError, match="/updates has learning_rate"):
        validation.rows("updates", rows(UPDATE, learning_rate=1e17), 1)


def test_another_process_reads_while_it_is_written(tmp_path, child):
    writer = child("""
        with new_writer(path) as writer:
            say("created")
            writer.append("updates", rows(UPDATE, 3))
            say("three")
            writer.append("updates", rows(UPDATE, 2000))
            writer.append("epochs", rows(EPOCH, evaluated=1, test_error=0.25))
            say("more")
            writer.finish(rows(TOTALS, pushed=1), rows(LEARNER, 4), WEIGHTS, sha256(WEIGHTS))
        say("finished")
    """)
    seen = []
    results = None
    for _ in range(4):
        assert writer.stdout.readline()
        results = results or open_results(tmp_path / "run.h5")
        seen.append((results.status, len(results.updates), len(results.epochs), results.weights is not None))
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert results.live
    assert seen == [
        ("running", 0, 0, False),
        ("running", 3, 0, False),
        ("running", 2003, 1, False),
        ("finished", 2003, 1, True),
    ]
    assert results.summary()["test_error"] == [0.25]
    results.close()
    assert writer.wait(timeout=120) == 0
    with open_results(tmp_path / "run.h5") as results:
        assert not results.live


def test_what_was_flushed_survives_a_killed_writer(tmp_path, child):
    writer = child("""
        writer = new_writer(path, flush_s=60)
        writer.append("updates", rows(UPDATE, 1500, time_s=2.0))
        writer.append("gradients", rows(GRADIENT, 3000, staleness=1))
        writer.flush(force=True)
        writer.append("updates", rows(UPDATE, 7))
        say("flushed")
    """)
    killed(writer)
    with pytest.raises(OSError, match="already open for write"):
        h5py.File(tmp_path / "run.h5", "r")  # which is why there is a second way to open it
    with open_results(tmp_path / "run.h5") as results:
        assert results.live
        summary = results.summary()
        assert (len(results.updates), len(results.gradients)) == (1500, 3000)
    assert (summary["status"], summary["updates"], summary["wall_time_s"]) == ("running", 1500, 2.0)
    assert summary["staleness_histogram"] == [0, 3000]


def test_a_writer_killed_at_any_moment_leaves_a_readable_file(tmp_path, child):
    writer = child("""
        writer = new_writer(path)
        say("created")
        while True:
            writer.append("updates", rows(UPDATE, 100, timestamp=1))
            writer.append("gradients", rows(GRADIENT, 100, update=1))
    """)
    writer.stdout.readline()
    writer.stdin.write("\n")
    writer.stdin.flush()
    with open_results(tmp_path / "run.h5") as results:
        assert eventually(lambda: writer.poll() is not None or len(results.updates) >= 5000)
        assert writer.poll() is None
    writer.kill()
    writer.wait(timeout=120)
    with open_results(tmp_path / "run.h5") as results:
        assert len(results.updates) >= 5000
        assert (results.updates["timestamp"] == 1).all()
        assert (results.gradients["update"] == 1).all()


@pytest.mark.parametrize("room", [3_000, 60_000, 400_000])
def test_a_full_disk_is_one_line(tmp_path, child, room):
    """A limit on the size of files stands for the disk's end: the same failing write."""
    writer = child("""
        try:
            with new_writer(path) as writer:
                for _ in range(1000):
                    writer.append("updates", rows(UPDATE, 100))
        except ResultsError as error:
            print(error.exit_code, error)
    """)
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (room, room))
    said, _ = writer.communicate(timeout=60)
    assert said == f"1 {tmp_path / 'run.h5'}: cannot write: File too large\n"
    assert writer.returncode == 0
    if room > 100_000:
        with open_results(tmp_path / "run.h5") as results:
            assert len(results.updates) > 500


@pytest.mark.parametrize(
    ("output", "force", "message"),
    [
        ("old.h5", False, "old.h5: exists; give another name or --force"),
        ("nowhere/a.h5", False, "nowhere/a.h5: directory .*nowhere does not exist"),
        ("sub", True, "sub: is a directory"),
        ("old.h5/a.h5", False, "old.h5 does not exist"),
    ],
)
def test_impossible_outputs_are_refused(tmp_path, output, force, message):
    (tmp_path / "old.h5").write_text("old")
    (tmp_path / "sub").mkdir()
    for attempt in (lambda p: check_output(p, force), lambda p: new_writer(p, overwrite=force)):
        with pytest.raises(ResultsError, match=message) as error:
            attempt(tmp_path / output)
        assert "\n" not in str(error.value)
    assert (tmp_path / "old.h5").read_text() == "old"


def test_a_directory_that_takes_no_files_is_refused():
    """Not even from root, whom permissions do not stop."""
    with pytest.raises(ResultsError, match=r"/proc/run.h5: (directory /proc is not writable|cannot create: )"):
        new_writer(Path("/proc/run.h5"))


def test_force_replaces_a_file_and_leaves_it_to_its_readers(tmp_path):
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=0)
    with open_results(tmp_path / "run.h5") as old:
        write_run(tmp_path / "run.h5", updates=20, epochs=1, staleness=0, overwrite=True)
        assert len(old.updates) == 10
    with open_results(tmp_path / "run.h5") as new:
        assert len(new.updates) == 20


def test_a_file_that_another_run_is_writing_is_not_replaced(tmp_path, child):
    path = tmp_path / "run.h5"
    process = child("""
        with new_writer(path):
            print("ready", flush=True)
            sys.stdin.read()
    """)
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(ResultsError, match=r"run\.h5: another run is writing it"):
        new_writer(path, overwrite=True)
    assert process.poll() is None
    process.communicate("", timeout=120)
    with new_writer(path, overwrite=True):
        pass


def test_without_swmr_the_file_is_whole_between_two_flushes(tmp_path, child):
    path = tmp_path / "run.h5"
    with new_writer(path, swmr=False) as writer:
        for count in (1, 2):
            writer.append("updates", rows(UPDATE, 3))
            writer.flush(force=True)
            with open_results(path) as results:
                assert not results.live
                assert results.status == "running"
                assert len(results.updates) == 3 * count
        reader = child("""
            from rudra.results.reader import open_results
            results = open_results(path)
            print("reading", flush=True)
            sys.stdin.readline()
            results.refresh()
            print(len(results.updates), flush=True)
        """)
        assert reader.stdout.readline() == "reading\n"
        writer.append("updates", rows(UPDATE, 3))
        writer.flush(force=True)  # who reads holds up nobody
        assert reader.communicate("go\n", timeout=120)[0] == "9\n"
        writer.append("updates", rows(UPDATE, 1))
        writer.finish(rows(TOTALS, pushed=5)[0], rows(LEARNER, 4, learner=range(4)), WEIGHTS, sha256(WEIGHTS))
    with open_results(path) as results:
        assert results.status == "finished"
        assert len(results.updates) == 10
        assert results.weights.tolist() == WEIGHTS.tolist()


def test_without_swmr_rows_wait_and_a_killed_writer_leaves_what_was_flushed(tmp_path, child):
    writer = child("""
        writer = new_writer(path, swmr=False)
        writer.append("updates", rows(UPDATE, 3))
        writer.flush(force=True)
        writer.append("updates", rows(UPDATE, 3))
        say("flushed")
    """)
    killed(writer)
    with open_results(tmp_path / "run.h5") as results:
        assert results.status == "running"
        assert len(results.updates) == 3


MOUNTS = """\
22 1 0:21 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:30 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2
31 22 0:31 / /home/scratch\\040disk rw - lustre mds:/scratch rw
32 22 0:32 / /homes rw - cifs //server/homes rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/data/a.h5", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/a.h5", "nfs4"),
        ("/home/scratch disk/a.h5", "lustre"),
        ("/homes/me", "cifs"),
        ("/homestead", "ext4"),
    ],
)
def test_file_systems_are_told_by_their_mount_points(path, kind):
    assert file_system(Path(path), MOUNTS) == kind
    assert file_system(Path(path), "") == ""


NOW = datetime(2024, 5, 6, 7, 8, 9)


def test_default_output_never_names_an_existing_file(tmp_path):
    names = [default_output("a b/c", tmp_path, NOW) for _ in range(3)]
    assert [n.name for n in names] == [f"a-b-c-20240506-070809{n}.h5" for n in ("", "-2", "-3")]
    with pytest.raises(ResultsError, match=r"a-20240506-070809\.h5: cannot create: No such file or directory$"):
        default_output("a", tmp_path / "missing", NOW)


def test_two_runs_that_begin_in_the_same_second_write_two_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writer, "datetime", SimpleNamespace(now=lambda: NOW))
    begun = [decide(Job(name="a"), StartRequest(None)) for _ in range(2)]
    again = decide(Job(name="a"), StartRequest(begun[0].output, True))  # a restart before the file is created
    assert again.overwrite
    for decision, updates in zip(begun, (10, 20), strict=True):
        write_run(decision.output, updates=updates, epochs=1, staleness=0, overwrite=decision.overwrite)
    assert sorted(os.listdir()) == ["a-20240506-070809-2.h5", "a-20240506-070809.h5"]
    for decision, updates in zip(begun, (10, 20), strict=True):
        with open_results(decision.output) as results:
            assert len(results.updates) == updates


@pytest.mark.parametrize(
    "start",
    [
        lambda: rudra.run(Job(), from_="other.h5", carry="all"),
        lambda: rudra.run(Job(data={"name": "idx", "path": "missing"})),
        lambda: rudra.simulate(Job(data={"name": "idx", "path": "missing"})),
    ],
)
def test_a_run_that_fails_to_start_leaves_no_file(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RudraError, match=r"other\.h5|missing"):
        start()
    assert os.listdir() == []


def test_a_file_of_format_5_counts_the_epochs_of_updates_from_0(tmp_path):
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file.attrs["format_version"] = 5
        epochs = file["updates"]["epoch"]
    with open_results(tmp_path / "run.h5") as results:
        assert (results.updates["epoch"] == epochs + 1).all()
        assert [(piece["epoch"] == 1).all() for piece in results.pieces("updates", 4)] == [True] * 3


@pytest.mark.parametrize(("version", "lacking"), [(7, ("averages", "stages")), (8, ("stages",))])
def test_a_file_of_an_older_format_has_no_rows_of_what_came_later(tmp_path, version, lacking):
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        for name in lacking:
            del file[name]
        file.attrs["format_version"] = version
    with open_results(tmp_path / "run.h5") as results:
        assert [len(getattr(results, name)) for name in lacking] == [0] * len(lacking)
        assert len(results.updates) == 10


@pytest.mark.parametrize(("name", "dtype"), [("minibatches", MINIBATCH), ("learners", LEARNER)])
def test_a_file_of_format_5_does_not_tell_reductions_from_pushes(tmp_path, name, dtype):
    older = np.dtype([(column, dtype[column]) for column in dtype.names if column not in {"reduce_s", "update_s"}])
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=0)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        rows = np.zeros(len(file["learners"]), dtype)
        rows["samples"], rows["push_s"], rows["pull_s"] = 1, 1.5, 0.5
        del file[name]
        file[name] = rows[list(older.names)].astype(older)
        file.attrs["format_version"] = 5
    with open_results(tmp_path / "run.h5") as results:
        found = getattr(results, name)
        assert found.dtype == dtype
        assert len(found)
        assert [set(found[column]) for column in TIMES[1:]] == [{0.0}, {1.5}, {0.0}, {0.5}, {0.0}]
        assert results.summary()["learner_times"][0]["reduce_s"] == 0.0


def _foreign(path):
    with h5py.File(path, "w") as file:
        file["x"] = 1


def _newer(path):
    with h5py.File(path, "w") as file:
        file.attrs["format_version"] = 99


def _incomplete(path):
    with h5py.File(path, "w") as file:
        file.attrs["format_version"] = FORMAT_VERSION


def _cut(path, keep=2):
    write_run(path, updates=5000, epochs=3, staleness=1)
    os.truncate(path, path.stat().st_size // keep)


def _altered(path):
    write_run(path, updates=10, epochs=1, staleness=0)
    with h5py.File(path, "r+") as file:
        file["weights/final"][3] = 77


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such result file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.touch(), "is empty: its run has not created it yet"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n\x03"), "not a result file of Rudra"),
        (lambda path: path.write_text("hello" * 1000), "not a result file of Rudra"),
        (_foreign, "not a result file of Rudra"),
        (_newer, "has format version 99; this Rudra reads 5 to 9$"),
        (_incomplete, "damaged: gradients, .* missing"),
        (_cut, "truncated"),
        (lambda path: _cut(path, keep=10_000), "truncated|not a result file"),
        (_altered, "damaged: the final weights do not match their checksum"),
    ],
)
def test_unusable_files_are_one_line(tmp_path, make, message):
    path = tmp_path / "run.h5"
    make(path)
    with pytest.raises(ResultsError, match=f"^{path}: .*{message}") as error, open_results(path) as results:
        results.state_dict()
    assert "\n" not in str(error.value)


def test_a_damaged_file_of_a_killed_writer_is_refused_at_once(tmp_path, child):
    """HDF5 by itself would wait for ever until the damage goes away."""
    writer = child("""
        writer = new_writer(path)
        writer.append("updates", rows(UPDATE, 1500))
        say("flushed")
    """)
    killed(writer)
    content = bytearray((tmp_path / "run.h5").read_bytes())
    content[100:] = bytes(len(content) - 100)
    (tmp_path / "run.h5").write_bytes(content)
    with pytest.raises(ResultsError, match=r"run\.h5: "), open_results(tmp_path / "run.h5") as results:
        results.summary()


def test_summary_of_a_run(tmp_path):
    path = tmp_path / "run.h5"
    with new_writer(path, initial_weights_sha256="00ff") as writer:
        stamps = [1, 2, 3]
        writer.append("updates", rows(UPDATE, 3, timestamp=stamps, samples=32, time_s=[0.5, 1, 1.5]))
        writer.append("gradients", rows(GRADIENT, 6, staleness=[0, 0, 1, 3, 1, 1]))
        described = {"epoch": [1, 2, 3], "evaluated": [1, 0, 1], "test_error": [0.5, np.nan, 0.25]}
        writer.append("epochs", rows(EPOCH, 3, **described))
        told = {"epoch": [1, 3, 3], "split": [b"test", b"test", b"validation"], "name": b"top5_error"}
        writer.append("metrics", rows(METRIC, 3, value=[0.2, np.nan, 0.1], **told))
        totals = rows(TOTALS, timestamp=3, samples=96, pushed=10, applied=6, pending=2, discarded=1, lost=1, time_s=2.0)
        learners = rows(LEARNER, 4, learner=range(4), compute_s=1.0, wait_s=0.5)
        writer.finish(totals, learners, WEIGHTS, sha256(WEIGHTS))
    with open_results(path) as results:
        summary = results.summary()
    expected = {
        "name": "digits",
        "driver": "mpi",
        "status": "finished",
        "protocol": "softsync",
        "n": 2,
        "learners": 4,
        "minibatch_size": 16,
        "epochs": 3,
        "updates": 3,
        "gradients": 6,
        "samples": 96,
        "wall_time_s": 2.0,
        "samples_per_s": 48.0,
        "test_error": [0.5, None, 0.25],
        "metrics": {"test": {"top5_error": [0.2, None, None]}, "validation": {"top5_error": [None, None, 0.1]}},
        "final_test_error": 0.25,
        "mean_staleness": 1.0,
        "max_staleness": 3,
        "staleness_histogram": [2, 3, 0, 1],
        "pushed": 10,
        "applied": 6,
        "pending": 2,
        "discarded": 1,
        "lost": 1,
        "initial_weights_sha256": "00ff",
        "weights_sha256": sha256(WEIGHTS),
    }
    assert {key: summary[key] for key in expected} == expected
    shares = [summary["learner_times"][3][f"{name}_share"] for name in ("compute", "push", "wait", "update")]
    assert shares == [0.5, 0.0, 0.25, 0.0]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_summary_of_a_run_that_did_nothing(tmp_path):
    new_writer(tmp_path / "run.h5").close()
    with open_results(tmp_path / "run.h5") as results:
        summary = results.summary()
    json.dumps(summary, allow_nan=False)
    assert (summary["updates"], summary["gradients"], summary["wall_time_s"]) == (0, 0, 0.0)
    unknown = ("final_test_error", "mean_staleness", "max_staleness", "samples_per_s", "pushed", "weights_sha256")
    assert [summary[name] for name in unknown] == [None] * len(unknown)


def test_weights_of_another_size_are_refused(tmp_path):
    with pytest.raises((TypeError, ResultsError)), new_writer(tmp_path / "run.h5") as writer:
        writer.finish(rows(TOTALS), rows(LEARNER, 4), np.ones(SIZE + 1, np.float32), "")
    with open_results(tmp_path / "run.h5") as results:
        assert results.status == "failed"


def _raise(error):
    raise error


def rewritten(path, name, column, value):
    with h5py.File(path, "r+") as file:
        found = file[name][()]
        found[column][0] = value
        file[name][...] = found


def attribute(path, name, value):
    with h5py.File(path, "r+") as file:
        file.attrs[name] = value


def replaced(path, name, make):
    with h5py.File(path, "r+") as file:
        del file[name]
        make(file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: rewritten(p, "gradients", "staleness", 2**40), "/gradients has staleness = 1099511627776 in row 0"),
        (lambda p: rewritten(p, "learners", "learner", 4), "/learners has learner = 4 in row 0"),
        (lambda p: rewritten(p, "updates", "time_s", np.nan), "/updates has time_s = nan in row 0"),
        (lambda p: rewritten(p, "epochs", "test_error", 1.5), "/epochs has test_error = 1.5 in row 0"),
        (lambda p: rewritten(p, "state", "status", b"?"), "/state has no status"),
        (lambda p: rewritten(p, "state", "flushed_s", np.inf), "/state has flushed_s = inf in row 0"),
        (lambda p: attribute(p, "learners", "four"), "attribute 'learners' is 'four'"),
        (lambda p: attribute(p, "learners", -4), "attribute 'learners' is '-4'"),
        (lambda p: attribute(p, "job", "{"), "attribute 'job' is not JSON"),
        (lambda p: attribute(p, "job", "[" * 9999), "attribute 'job' is not JSON"),
        (lambda p: attribute(p, "job", "[]"), "attribute 'job' holds no tables"),
        (lambda p: attribute(p, "job", '{"topology": {"options": 1}}'), r"the job's \[topology\] is not a table"),
        (lambda p: replaced(p, "state", lambda f: f.create_group("state")), "/state is not a plain data set"),
        (lambda p: replaced(p, "state", lambda f: f.update(state=h5py.SoftLink("/totals"))), "/state is a link"),
        (lambda p: replaced(p, "state", lambda f: f.update(state=np.zeros(3))), "/state has another layout"),
        (
            lambda p: replaced(p, "updates", lambda f: f.create_dataset("updates", (2**50,), UPDATE, chunks=(9,))),
            r"/updates claims [\d,]+ bytes, in a file of",
        ),
        (
            lambda p: replaced(
                p, "totals", lambda f: f.create_dataset("totals", (1,), TOTALS, external=[("/etc/passwd", 0, 999)])
            ),
            "/totals is not a plain data set",
        ),
    ],
)
def test_what_cannot_be_is_damage(tmp_path, damage, message):
    path = tmp_path / "run.h5"
    write_run(path, updates=10, epochs=1, staleness=1)
    damage(path)
    with pytest.raises(ResultsError, match=f"^{path}: damaged.*: .*{message}") as error, open_results(path) as results:
        results.summary()
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("parent", [-1, 0, 3, 2], "the way up from role 2 does not end"),
        ("parent", [-1, 0, 9, 0], "the way up from role 2 does not end"),
        ("parent", [-1, 0, 0, -1], "/roles: learner 1 has no parent"),
        ("parent", [-1, 0, 1, 0], "/roles: learner 0 exchanges with the statistics server"),
        ("group", [-1, -1, 0, -1], "/roles: some learners are in a compute group, and others are not"),
        ("index", [0, 0, 1, 0], "/roles has its learners in no order"),
        ("kind", [b"x"] * 4, "/roles has 0 of 2 learners"),
    ],
)
def test_roles_that_cannot_be_are_damage(tmp_path, column, values, message):
    plan = Job(cluster={"learners": 2}).plan()
    who = plan_rows.rows_of(plan)
    who[column] = values
    about = {**plan_rows.about(plan), "learners": 2}
    with new_writer(tmp_path / "run.h5", **about) as writer:
        writer.flush(force=True)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        del file["roles"]
        file["roles"] = who
        file.attrs["learners"] = 2
    with open_results(tmp_path / "run.h5") as results, pytest.raises(ResultsError, match=message):
        results.plan()


def test_a_name_cannot_speak_to_the_terminal(tmp_path):
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=1, name="a\x1b[2J\nb")
    with open_results(tmp_path / "run.h5") as results:
        assert results.summary()["name"] == r"a\x1b[2J\nb"


def test_what_a_file_does_not_tell_is_named(tmp_path):
    write_run(tmp_path / "run.h5", updates=10, epochs=1, staleness=1)
    with open_results(tmp_path / "run.h5") as results, pytest.raises(ResultsError, match="has no attribute 'started'"):
        results.attributes["started"]
