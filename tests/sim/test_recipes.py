"""Recipes of the documentation, run as they are shown; W&B and MLflow are stubs of their clients' interfaces."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pages import blocks, files, page
from torch import nn

import rudra
from rudra.job.job import Job

RECIPES = page("recipes.md")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file, text in files(RECIPES).items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("wandb_log", "mlflow_log", "finetune"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


class Wandb(ModuleType):
    """`wandb`: `init` returns a run with `log` and `finish`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []

    def init(self, *, project: str, id: str, resume: str) -> SimpleNamespace:
        self.calls.append(("init", project, id, resume))
        return SimpleNamespace(log=self._log, finish=lambda: self.calls.append(("finish",)))

    def _log(self, data: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", step, data))


class Mlflow(ModuleType):
    """`mlflow` with its fluent functions; it refuses what its server refuses."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []
        self.run: str | None = None

    def active_run(self) -> str | None:
        return self.run

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, *, run_name: str) -> None:
        self.run = run_name
        self.calls.append(("init", run_name))

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        assert all(isinstance(value, float) and value == value for value in metrics.values())
        self.calls.append(("log", step, metrics))

    def end_run(self) -> None:
        self.run = None
        self.calls.append(("finish",))


@pytest.mark.parametrize(("name", "client"), [("wandb", Wandb()), ("mlflow", Mlflow())])
def test_tracking_hook_logs_every_epoch_and_closes_the_run(
    name: str, client: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, client)
    option = "project" if name == "wandb" else "experiment"
    hooks = [{"at": at, "call": f"{name}_log:log", "options": {option: "mine"}} for at in ("epoch", "end")]
    job = Job.load("digits", ["training.epochs=2", "data.train_limit=160", 'model.name="mlp"']).with_(hooks=hooks)
    rudra.simulate(job, output=place / "run.h5", progress="quiet").close()
    logged = [call for call in client.calls if call[0] == "log"]
    assert [step for _, step, _ in logged] == [1, 2]
    assert all({"test_error", "train_loss", "mean_staleness", "learning_rate"} <= data.keys() for *_, data in logged)
    assert sum(call[0] == "init" for call in client.calls) == 1
    assert client.calls[-1] == ("finish",)
    assert any("run" in call for call in client.calls if call[0] == "init"), "the run has the result file's name"


def test_tables_of_hooks_fit_the_recipes() -> None:
    (tables,) = (block for block in blocks("toml", RECIPES) if "wandb_log" in block)
    assert tables.count("[[hooks]]") == 2


def test_finetuned_model_keeps_its_frozen_layers(place: Path) -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))
    before = layers.state_dict()
    torch.save(before, place / "pretrained.pt")
    with rudra.simulate(Job.load(place / "finetune.toml"), output=place / "tuned.h5", progress="quiet") as results:
        after = results.state_dict()
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        assert torch.equal(torch.as_tensor(after[name]), before[name])
    assert after["5.weight"].shape == (10, 32)
