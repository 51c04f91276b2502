"""Whole searches with real gradients in virtual time."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

import rudra
from rudra.cli.main import main
from rudra.errors import ResultsError, RudraError
from rudra.job.job import Job
from rudra.results.scores import on_test_set
from rudra.simulation.predict import Outline
from rudra.tuning import prices
from rudra.tuning.answer import Verdict
from rudra.tuning.journal import NAME
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.space import trajectory
from rudra.tuning.surface import ROWS
from rudra.tuning.trainer import Trainer
from tests.unit.html_pages import HtmlPage

JOB = Job(
    name="small",
    model={"name": "mlp"},
    data={"train_limit": 640},
    training={"epochs": 12, "minibatch_size": 8},
    optimizer={"learning_rate": 0.01, "momentum": 0.9},
    cluster={"learners": 2, "threads_per_rank": 1},
    simulation={"slowdown": {1: 4.0}},
)
GIVEN: dict[str, list[Any]] = {
    "protocol.name": ["hardsync", "async"],
    "topology.name": ["base"],
    "training.minibatch_size": [8],
    "cluster.shares": [()],
}
ABOUT: dict[str, Any] = {"target": "accuracy >= 0.95", "budget": 12, "given": GIVEN, "quiet": True}


class Searched(NamedTuple):
    """A search that nobody stopped: its directory and store, what it found, and the runs that it trained."""

    directory: Path
    store: Path
    found: Verdict
    trained: list[tuple[str, str, int]]


def count_training(patch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """A list that gets protocol, trajectory and epochs of each run that is trained from now on."""
    trained: list[tuple[str, str, int]] = []
    simulate = rudra.simulate

    def counting(job: Job, **about: Any) -> Any:
        if job.data.train_limit == JOB.data.train_limit:  # not the short runs that identify code and data
            trained.append((str(job.protocol.name), trajectory(job), job.training.epochs))
        return simulate(job, **about)

    patch.setattr("rudra.tuning.trainer.api.simulate", counting)
    return trained


def leave_figures_out(patch: pytest.MonkeyPatch) -> None:
    """Pages have no figures, at which nobody looks."""
    patch.setattr("rudra.report.page.inline", lambda figure, prefix, *, narrow: "")


PRICES: dict[tuple[str, str], tuple[float, float, str] | str] = {}


def share_predictions(patch: pytest.MonkeyPatch) -> None:
    """Searches predict a point once in this process. Only its job and the outline of its model decide its price."""
    price = prices._price

    def once(about: tuple[Job, Outline]) -> tuple[float, float, str] | str:
        key = about[0].to_json(), repr(about[1])
        if key not in PRICES:
            PRICES[key] = price(about)
        return PRICES[key]

    patch.setattr(prices, "_price", once)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    directory = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        trained = count_training(patch)
        share_predictions(patch)
        found = rudra.tune(JOB, output=directory / "whole", store=directory / "probes", **ABOUT)
    return Searched(directory / "whole", directory / "probes", found, trained)


def test_a_search_that_is_stopped_continues_and_its_job_reaches_the_target(
    searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_predictions(monkeypatch)
    plain, trained = Trainer.train, []
    evaluated: list[Sequence[Path]] = []

    def counted(job: Job, paths: Sequence[Path]) -> list[dict[str, float]]:
        evaluated.append(paths)
        assert job.data.test_limit is None
        return on_test_set(job, paths)

    monkeypatch.setattr("rudra.tuning.final_scores.on_test_set", counted)

    def stopping(trainer: Trainer, probe: Probe, before: Outcome | None) -> Outcome:
        trained.append(probe)
        if len(trained) % 6 == 0:
            raise KeyboardInterrupt
        return plain(trainer, probe, before)

    monkeypatch.setattr(Trainer, "train", stopping)
    for _ in range(20):
        try:
            found = rudra.tune(JOB, output=tmp_path / "stopped", **ABOUT)
            break
        except KeyboardInterrupt:
            continue
    assert len(evaluated) == 1, "the test set is read once"
    again = rudra.tune(JOB, output=tmp_path / "stopped", **ABOUT)
    assert [*again.lines()] == [*found.lines()]
    assert len(evaluated) == 1, "the scores are in the journal"
    monkeypatch.setattr(Trainer, "train", plain)
    whole = searched.found
    assert [*found.lines()] == [*whole.lines()]
    for name in ("best.toml", "tried.csv", "report.html", NAME):
        assert (tmp_path / "stopped" / name).read_bytes() == (searched.directory / name).read_bytes()
    left = sorted(path.name for path in (tmp_path / "stopped").iterdir())
    assert left == [".lock", "best.toml", NAME, "probes", "report.html", "tried.csv"]
    assert not [*(tmp_path / "stopped" / "probes").glob("*.ckpt")]
    assert whole.winner is not None
    assert whole.winner.settings["protocol.name"] == "async", "a learner is four times slower"
    assert whole.saving > 1
    scores = whole.tested(whole.winner)
    assert all(score.reached and score.value > 0.7 for score in scores)
    middle = median(score.value for score in scores)
    assert f"  on the test set: winner {middle:.4g}" in "\n".join(whole.lines())
    entries = [json.loads(line) for line in (searched.directory / NAME).read_text().splitlines()]
    marks = {entry["name"]: entry["marks"] for entry in entries if entry.get("kind") == "probe"}
    ((*ends,),) = (entry["scores"] for entry in entries if entry.get("kind") == "test")
    first = {name: next(i for i, mark in enumerate(marks[name], 1) if mark[2] >= 0.95) for name, _, _ in ends}
    assert {name: epochs for name, epochs, _ in ends} == first, "each at the target"
    check_page(HtmlPage((searched.directory / "report.html").read_text()), whole)
    best = Job.load(searched.directory / "best.toml")
    assert best.protocol.name == "async"
    assert best.optimizer.average.given
    with rudra.simulate(best, output=tmp_path / "best.h5", progress="quiet") as results:
        assert results.epochs["test_error"].min() < 0.25
    with (searched.directory / "tried.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {row["protocol.name"] for row in rows} == {"hardsync", "async", ""}


def check_page(page: HtmlPage, verdict: Verdict) -> None:
    """The figures of the page are those of the verdict, and it needs no other file."""
    assert all(line.strip() in page.section("the-answer") for line in verdict.lines())
    assert f"{verdict.saving:.2f}" in page.section("why-the-winner-won")
    _, *rows = csv.reader(page.download("test-set").splitlines())
    scores = {(row[0], int(row[2])): float(row[6]) for row in rows}
    for role, finalist in verdict.roles.items():
        for score in verdict.tested(finalist):
            assert scores.pop((role, score.seed)) == score.value
            assert f"{score.value:.4f}" in page.section("the-test-set")
    assert not scores
    *_, last = page.of("table")
    assert "test accuracy" in last.text
    links = [str(part.attributes[name]) for part in page.parts for name in ("src", "href") if name in part.attributes]
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    for picture in page.of("svg"):
        assert picture.attributes["aria-label"]
    texts = {part.text for part in page.of("text")}
    assert {"samples since the common checkpoint", "held-out loss (mean per sample)"} <= texts
    assert "protocol, by staleness σ (updates)" in texts
    assert {*ROWS.values()} & texts


def test_another_cluster_trains_only_what_depends_on_time(
    searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of another search changes nothing but the time."""
    leave_figures_out(monkeypatch)
    trained = count_training(monkeypatch)
    share_predictions(monkeypatch)
    even = JOB.with_(simulation={"slowdown": {}, "compute_s": 0.01})
    alone = rudra.tune(even, output=tmp_path / "alone", **ABOUT)
    trained.clear()
    second = rudra.tune(even, output=tmp_path / "second", store=searched.store, **ABOUT)
    assert [*second.lines()] == [*alone.lines()]
    for name in (NAME, "best.toml", "tried.csv"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert "async" in {name for name, _, _ in trained}
    assert not [its[0] for its in {*searched.trained} & {*trained}]
    trained.clear()
    rudra.tune(even, output=tmp_path / "third", store=searched.store, **ABOUT)
    assert not trained


@pytest.mark.parametrize(
    ("protocol", "topology"), [("hardsync", "base"), ("async", "sharded"), ("sma", "replicas"), ("average", "replicas")]
)
def test_a_checkpoint_has_the_scores_that_its_run_recorded(tmp_path: Path, protocol: str, topology: str) -> None:
    job = JOB.with_(
        protocol={"name": protocol},
        topology={"name": topology},
        cluster={"learners": 4},
        training={"epochs": 1, "evaluation_batch_size": 100},
        optimizer={"average": {"rate": 0.05}},
        results={"keep_checkpoints": "1 epochs"},
    )
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        recorded = results.epochs[-1]
    (scores,) = on_test_set(job, [tmp_path / "run-1.ckpt"])
    assert scores["loss"] == recorded["test_loss"]
    assert scores["error"] == recorded["test_error"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budget": 0.5}, "--budget 0.5x: is less than one reference run; use 1x or more"),
        ({"strategy": "luck"}, "--strategy luck: unknown; valid: bayes, first-epoch, grid, guided, halving, omnivore"),
        ({"target": None}, "small: no target; give one, such as --target 'accuracy >= 0.9'"),
        ({"target": "accuracy > 1"}, "is no target"),
        ({"target": "precision@3 >= 0.5"}, "target: no evaluation measures 'precision@3'; use loss, error, "),
        ({"given": {"topology.name": ["adv*"], "protocol.name": ["hardsync"]}}, "no point of the space is possible: "),
        ({"given": {"protocol.nome": [1, 2]}}, "unknown key"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_anything_trains(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(RudraError) as caught:
        rudra.tune(JOB, output=tmp_path / "out", **{**ABOUT, **more})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert "precision" not in said or not (tmp_path / "out").exists(), "it is found before the points are predicted"


def test_a_checkpoint_that_could_not_be_written_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is only a warning of the run, but the next probe would begin there."""
    simulate = rudra.simulate

    def on_full_disk(job: Job, *, output: Path, **about: Any) -> Any:
        results = simulate(job, output=output, **about)
        for path in output.parent.glob(f"{output.stem}-*.ckpt"):
            path.unlink()
        return results

    monkeypatch.setattr("rudra.tuning.trainer.api.simulate", on_full_disk)
    with pytest.raises(ResultsError, match=r"-1\.ckpt: could not be written; free some space, and repeat the command"):
        rudra.tune(JOB, output=tmp_path / "out", **ABOUT)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--space", "protocol.nme=async"], r".*\[protocol\] unknown key 'nme'; .*; did you mean name\?"),
        (["--space", "protocol.name=sma", "--space", "topology.name=base"], r".*no point of the space is possible: .*"),
        (["--set", "optimizer.weight_decay=0", "--space", "optimizer.weight_decay=0,1"], r".*--set fixes it; .*"),
        (["--set", "training.epoch=1"], r".*\[training\] unknown key 'epoch'; .*"),
    ],
)
def test_a_mistake_in_the_space_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    about = ["--target", "accuracy >= 0.9", "--set", "model.name=mlp", "--set", "cluster.learners=2", "--plan"]
    assert main(["tune", "digits", *about, *options, "-o", str(tmp_path / "out")]) == 2
    assert re.fullmatch(f"rudra: {line}\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_plan_of_a_search_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--set", "model.name=mlp", "--set", "cluster.learners=2"]
    assert (
        main(
            [
                "tune",
                "digits",
                "--target",
                "accuracy >= 0.9",
                "--plan",
                "--space",
                "training.minibatch_size=8",
                "--space",
                "protocol.name=hardsync,async,sma",
                "--space",
                "topology.name=base,groups,adv*,replicas",
                *options,
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "samples/s  σ" in said
    assert "same weights as hardsync" in said
    assert "refused: hardsync, on adv*: [topology] name = 'adv*' is not supported with protocol hardsync" in said
    assert [*tmp_path.iterdir()] == []


BANK_S = {1: 0.0100, 2: 0.0101, 4: 0.0160}
"""Images/s still rise up to four learners on a device. But each of them needs more samples."""


def test_the_best_number_of_learners_on_a_device_is_not_the_fastest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one learning rate, so that the search has only this choice."""
    leave_figures_out(monkeypatch)
    job = Job(
        name="bank",
        model={"name": "mlp"},
        data={"train_limit": 640},
        training={"epochs": 16, "minibatch_size": 8, "seed": 1, "target": "loss <= 0.4"},
        optimizer={"learning_rate": 0.03, "momentum": 0.9},
        protocol={"name": "sma"},
        cluster={"learners": 4, "learners_per_device": 4, "threads_per_rank": 1},
        simulation={"bank_s": BANK_S, "compute_s": BANK_S[1], "jitter": 0.0, "update_s": 0.0},
    )
    fixed = {"protocol.name": "sma", "topology.name": "replicas", "training.minibatch_size": 8, "averaging.period": 1}
    fixed |= {"optimizer.learning_rate": 0.03, "optimizer.momentum": 0.9, "averaging.outer.momentum": None}
    given = {key: [value] for key, value in fixed.items()}
    answer = rudra.tune(job, budget=5, given=given, output=tmp_path, quiet=True)
    assert answer.winner is not None
    assert answer.winner.settings["cluster.learners_per_device"] == answer.job.cluster.learners_per_device == 2
    rates: dict[int, float] = {}
    times: dict[int, float] = {}
    for m in BANK_S:
        own = job.with_(cluster={"learners": m, "learners_per_device": m})
        own = own.with_(
            data={"validation_split": 0.1},
            training={"target": "validation loss <= 0.4", "target_window": 1, "stop_at_target": True},
        )
        with rudra.simulate(own, output=tmp_path / f"{m}.h5", progress="quiet") as results:
            summary = results.summary()
            rates[m], times[m] = summary["samples_per_s"], summary["time_to_target_s"]
    assert max(rates, key=rates.__getitem__) == 4
    assert min(times, key=times.__getitem__) == 2, times
