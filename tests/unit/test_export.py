"""Weights that leave a result file: what plain torch, and a reader of safetensors by hand, make of them."""

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import h5py
import numpy as np
import point_data
import pytest
import small_models
import torch
from pages import blocks, page
from results_files import WEIGHTS, new_writer, rows, sha256
from torch import nn

import rudra
from rudra.cli.main import main
from rudra.compute.statedict import StateEntry
from rudra.core.records import LEARNER, TOTALS
from rudra.errors import ConfigError, ResultsError
from tests import forks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIKE = {"F32": np.float32, "I64": np.int64, "BOOL": np.bool_, "C64": np.complex64, "BF16": np.uint16}
TRAINED, ENDS = 5, (2, 4, 5)
JOB = rudra.Job(
    model={"name": small_models.Assorted},
    data={"name": point_data.prompt},
    training={"epochs": TRAINED, "minibatch_size": 8},
    optimizer={"learning_rate": 0.2},
    cluster={"learners": 2, "threads_per_rank": 1},
    results={"keep_every": 2},
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five epochs of a model that has everything; of the first four, every second is kept."""
    path = tmp_path_factory.mktemp("recorded") / "run.h5"
    rudra.simulate(JOB, output=path, progress="quiet").close()
    return path


def from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The format as its specification has it."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    data, end, found = content[8 + length :], 0, {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = np.dtype(LIKE[entry["dtype"]])
        assert start == end, "no holes, no overlap"
        assert start % dtype.itemsize == 0, "aligned, as torch wants it"
        tensor = torch.from_numpy(np.frombuffer(data[start:stop], dtype).reshape(entry["shape"]).copy())
        found[name] = tensor.view(torch.bfloat16) if entry["dtype"] == "BF16" else tensor
        end = stop
    assert end == len(data)
    return found


def load(path: Path) -> dict[str, torch.Tensor]:
    return from_safetensors(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def error_of(state: dict[str, torch.Tensor]) -> float:
    """Test error in plain torch."""
    torch.manual_seed(1)  # other values than those of the run
    model = small_models.Assorted()
    model.load_state_dict(state, strict=True)
    test = point_data.prompt()[1]
    with torch.no_grad():
        return float((model.eval()(test.inputs).argmax(1) != test.labels).float().mean())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("epoch", [2, 4, 5, None])
def test_plain_torch_finds_the_test_error_of_the_epoch(
    recorded: Path, tmp_path: Path, suffix: str, epoch: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"model{suffix}"
    at = [] if epoch is None else ["--epoch", str(epoch)]
    assert main(["export", str(recorded), "-o", str(target), *at]) == 0
    assert capsys.readouterr().out == f"wrote {target}: 24 tensors of epoch {epoch or TRAINED}\n"
    state = load(target)
    with rudra.open_results(recorded) as results:
        errors = results.epochs["test_error"]
        assert error_of(state) == pytest.approx(errors[(epoch or TRAINED) - 1], abs=1e-7)
        assert len({*errors[1::2], errors[-1]}) > 1, "or else any epoch would do"
        weights = results.weights_of(epoch)
        for entry in results.layout:
            if entry.name in state:
                expected = weights[entry.offset : entry.offset + entry.size]
                assert np.array_equal(state[entry.name].numpy().ravel(), expected)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_all_names_types_and_values_are_those_of_the_model(recorded: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"model{suffix}"
    assert main(["export", str(recorded), "-o", str(target)]) == 0
    state, model = load(target), built()
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert {name: (t.dtype, t.shape) for name, t in state.items()} == {
        name: (t.dtype, t.shape) for name, t in expected.items()
    }
    counters = {"norm.num_batches_tracked", "seen"}
    untrained = {name for name, t in expected.items() if not t.is_floating_point()} - counters
    untrained |= {f"{layer}.{name}" for layer in ("frozen", "brief", "alias") for name in ("weight", "bias")}
    assert all(torch.equal(state[name], expected[name]) for name in untrained)
    assert not any(torch.equal(state[name], expected[name]) for name in ("first.weight", "again.weight"))
    assert 30 < state["seen"] == state["norm.num_batches_tracked"] <= 75, "150 gradients, two of them in an update"
    assert torch.equal(state["again.weight"], state["once.weight"])
    shared = state["again.weight"].data_ptr() == state["once.weight"].data_ptr()
    assert shared == (suffix == ".pt")


def built() -> nn.Module:
    """The model with the weights that a run begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return small_models.Assorted()


BEST = JOB.with_(
    training={"epochs": 8, "evaluation_batch_size": 64},
    optimizer={"learning_rate": 3.0},
    results={"keep_every": None, "keep_best": True},
)


@pytest.mark.parametrize("target", [None, "loss <= 0", "top5_error <= 0"])
def test_the_best_epoch_stays_and_is_exported(
    tmp_path: Path, target: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """At so high a rate that the tests get worse again."""
    path, output = tmp_path / "run.h5", tmp_path / "best.pt"
    rudra.simulate(BEST.with_(training={"target": target}), output=path, progress="quiet").close()
    with rudra.open_results(path) as results:
        column = {None: "test_error", "loss <= 0": "test_loss"}.get(target)
        measured = results.metrics["value"] if column is None else results.epochs[column]
        best = int(np.argmin(measured)) + 1
        error = results.epochs["test_error"][best - 1]
        assert results.best_epoch == best
        assert set(results.kept_epochs) >= {best, 8}
        assert len(results.kept_epochs) <= 2 or best == 8
        assert best < 8, "or else the last would do"
    assert main(["export", str(path), "-o", str(output), "--epoch", "best"]) == 0
    assert capsys.readouterr().out == f"wrote {output}: 24 tensors of epoch {best}\n"
    assert error_of(load(output)) == pytest.approx(error, abs=1e-7)
    assert rudra.replay(path, job=BEST.with_(training={"target": target}), quiet=True).difference is None


def test_a_best_epoch_that_was_not_kept_is_told(recorded: Path, tmp_path: Path) -> None:
    with rudra.open_results(recorded) as results:
        best = int(np.argmin(results.epochs["test_error"])) + 1
        assert results.best_epoch == best
        if best not in ENDS:
            with pytest.raises(ResultsError, match=rf"no weights of epoch {best}, the best one; .*; results.keep_best"):
                results.weights_of("best")
    untested = JOB.with_(training={"evaluate": False, "epochs": 1})
    with rudra.simulate(untested, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.best_epoch is None
        with pytest.raises(ResultsError, match="has no best epoch: none was evaluated"):
            results.weights_of("best")
    with pytest.raises(
        ConfigError, match=r"keep_best = true is not supported with \[training\] evaluate = false; use evaluate = true"
    ):
        untested.with_(results={"keep_best": True})


def test_a_state_dict_loads_without_an_export(recorded: Path) -> None:
    with rudra.open_results(recorded) as results:
        assert results.kept_epochs == ENDS
        for epoch in ENDS:
            assert error_of(results.state_dict(epoch)) == pytest.approx(
                results.epochs["test_error"][epoch - 1], abs=1e-7
            )


def test_a_replay_leaves_the_same_state_dict(recorded: Path, tmp_path: Path) -> None:
    with rudra.open_results(recorded) as results:
        update, expected = int(results.epochs["timestamp"][1]), results.state_dict(2)
    rudra.replay(recorded, job=JOB, until=update, output=tmp_path / "w.pt", quiet=True)
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-o model.pt --epoch 3", "run.h5: has no weights of epoch 3; epochs that are kept: 2, 4, 5"),
        ("-o model.pt --epoch -1", "run.h5: has no weights of epoch -1; epochs that are kept: 2, 4, 5"),
        ("-o model.onnx", "model.onnx: the suffix must say the format; valid: .pt, .safetensors"),
        ("-o model", "model: the suffix must say the format; valid: .pt, .safetensors"),
        ("-o there.pt", "there.pt: exists; give another name or --force"),
        ("-o no/model.pt", "no/model.pt: directory no does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    recorded: Path,
    tmp_path: Path,
    arguments: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.h5").symlink_to(recorded)
    Path("there.pt").write_text("mine")
    assert main(["export", "run.h5", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"rudra: {said}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.h5", "there.pt"]
    assert Path("there.pt").read_text() == "mine"
    assert main(["export", "run.h5", "-o", "there.pt", "--force"]) == 0
    assert error_of(load(Path("there.pt"))) < 1


def test_of_a_run_that_has_not_ended_the_kept_epochs_are_there(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "run.h5", tmp_path / "model.pt"
    path.write_bytes(recorded.read_bytes())
    with h5py.File(path, "r+") as file:
        state = file["state"][()]
        state["status"], state["weights_sha256"] = b"running", b""
        file["state"][...] = state
    assert main(["export", str(path), "-o", str(target)]) == 2
    said = f"rudra: {path}: has no final weights: the run is running; epochs that are kept: 2, 4\n"
    assert capsys.readouterr().err == said
    assert main(["export", str(path), "-o", str(target), "--epoch", "4"]) == 0
    assert load(target).keys() == small_models.Assorted().state_dict().keys()


def test_a_type_that_safetensors_does_not_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / "run.h5", tmp_path / "model.safetensors"
    values = np.array([1 + 2j, 3], np.complex128)
    with new_writer(path, state_dict=[StateEntry("wide", "wide", "complex128", values)]) as writer:
        writer.finish(rows(TOTALS), rows(LEARNER, 4), WEIGHTS, sha256(WEIGHTS))
    assert main(["export", str(path), "-o", str(target)]) == 2
    said = f"rudra: {target}: wide is torch.complex128, which safetensors does not have; a .pt file does\n"
    assert capsys.readouterr().err == said
    assert not target.exists()
    assert main(["export", str(path), "-o", str(tmp_path / "model.pt")]) == 0
    assert load(tmp_path / "model.pt")["wide"].tolist() == values.tolist()


FILLING = """
import resource, sys, torch
from pathlib import Path
from rudra.errors import ResultsError
from rudra.results.export import save
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save({"large": torch.zeros(1 << 20)}, Path(sys.argv[1]))
except ResultsError as error:
    print(error)
sys.exit()
"""


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    line = [*forks.rudra(FILLING), str(tmp_path / "full.pt")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert re.fullmatch(r".*full\.pt: cannot write: torch.save failed .*; is there room\?\n", done.stdout)
    assert not list(tmp_path.iterdir())


CHECKS = """
import rudra
from spirals import spirals
points, labels = spirals(500, 2).tensors
wrong = (model(points).argmax(1) != labels).float().mean().item()
with rudra.open_results("spirals.h5") as results:
    assert abs(wrong - results.summary()["final_test_error"]) < 1e-6
plain = torch.load("spirals.pt", weights_only=True)
assert plain.keys() == state.keys()
assert all(torch.equal(plain[name], state[name]) for name in state)
"""


def test_the_examples_of_the_pages(tmp_path: Path) -> None:
    """The run of the worked example in Python, simulated, and then what the page on exports does with the result."""
    (first,) = (block for block in blocks("python", page("python.md")) if "def spirals" in block)
    text = page("export.md")
    others = blocks("python", text)
    (tmp_path / "spirals.py").write_text(first.replace("rudra.run(", "rudra.simulate("))
    commands = re.findall(r"^rudra (export spirals\.h5 [^#\n]*)", text, re.MULTILINE)
    assert commands

    (tmp_path / "checks.py").write_text("\n".join([*others, CHECKS]))
    strict = "import warnings; warnings.simplefilter('error')"
    exports = [[*forks.rudra(strict), *command.split()] for command in commands]
    for line in (forks.script("spirals.py", strict), *exports, forks.script("checks.py", strict)):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=80, check=False, env=env)
        assert done.returncode == 0, done.stderr
