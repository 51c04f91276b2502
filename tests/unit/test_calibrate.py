"""A cost file from made-up runs: the costs that went in come out, and a prediction gives the runs' times back."""

import math
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rudra.cli.main import main
from rudra.core import records
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.machine import cores
from rudra.prepare import bank_size, cost_files
from rudra.simulation.predict import Outline, outline, predict
from rudra.studies import calibrate
from rudra.studies.bank_costs import BankCosts, measure_banks
from rudra.studies.calibrate import Alone, TimedRun
from rudra.studies.tcp_cost import SENT_BYTES, cpu_s_per_byte

STEPS = 400
PUSH_S, WAIT_S, PULL_S, UPDATE_S = 9e-4, 1.6e-3, 6e-4, 7e-4
ALONE = Alone({8: 0.01, 32: 0.03}, gradient_s=3e-4, copy_s=2e-4, evaluation_s=0.5, samples=1000, cpu_s_per_byte=2e-10)


def probe(size: int, learners: int, compute_s: float, *, variation: float = 0.0, drift: float = 0.0) -> TimedRun:
    """A run with these times; the first steps are slower, and one in 100 is disturbed."""
    generator = np.random.default_rng(0)
    rows = np.zeros(learners * STEPS, records.MINIBATCH)
    rows["learner"], rows["step"] = np.divmod(np.arange(len(rows)), STEPS)
    rows["samples"] = size
    rows["compute_s"] = compute_s * (1 + variation * generator.standard_normal(len(rows)))
    rows["compute_s"] *= 1 + drift * rows["step"] / STEPS
    rows["push_s"], rows["wait_s"], rows["pull_s"] = PUSH_S, WAIT_S, PULL_S
    rows["compute_s"][rows["step"] < 3] *= 50
    rows["push_s"][50::100] *= 100
    updates = np.zeros(len(rows), records.UPDATE)
    updates["update_s"] = UPDATE_S
    return TimedRun(size, learners, rows[generator.permutation(len(rows))], updates)


def made() -> list[TimedRun]:
    times = {(8, 1): 0.01, (8, 2): 0.012, (32, 1): 0.03, (32, 2): 0.033}
    return [probe(size, learners, seconds, variation=0.05) for (size, learners), seconds in times.items()]


def test_costs_that_went_in_come_out() -> None:
    found = calibrate.derive(made(), ALONE)
    assert found.compute_s == pytest.approx({8: 0.01, 32: 0.03}, rel=0.02)
    assert found.node_slowdown == pytest.approx(0.15, abs=0.02)
    assert found.jitter == pytest.approx(0.05 * 3**0.5, rel=0.1)
    assert found.transfer_s == pytest.approx(PULL_S)
    assert found.latency_s == pytest.approx(PUSH_S - PULL_S)
    assert found.update_s == pytest.approx(UPDATE_S)
    assert found.message_s == pytest.approx(WAIT_S - UPDATE_S - (PUSH_S - PULL_S))
    assert (found.gradient_s, found.evaluation_s) == (3e-4, 0.5)


def test_a_slow_drift_is_no_jitter() -> None:
    found = calibrate.derive([probe(8, 1, 0.01, variation=0.02, drift=0.5)], ALONE)
    assert found.jitter == pytest.approx(0.02 * 3**0.5, rel=0.15)


def test_a_slower_exchange_beside_others_is_part_of_the_slowdown() -> None:
    several = probe(8, 2, 0.01)
    several.minibatches["wait_s"] += 1e-3
    assert calibrate.derive([probe(8, 1, 0.01), several], ALONE).node_slowdown == pytest.approx(0.1, rel=0.02)


def test_with_one_learner_alone_there_is_no_slowdown() -> None:
    assert calibrate.derive([probe(8, 1, 0.01)], ALONE).node_slowdown == 0


@pytest.mark.parametrize(("push_s", "wait_s", "pull_s"), [(1e-3, 0.0, 1e-3), (2e-3, 0.0, 1e-4), (1e-4, 2e-3, 3e-3)])
def test_the_whole_exchange_comes_out_however_its_parts_were_seen(push_s: float, wait_s: float, pull_s: float) -> None:
    run = probe(8, 1, 0.01)
    run.minibatches["push_s"], run.minibatches["wait_s"], run.minibatches["pull_s"] = push_s, wait_s, pull_s
    found = calibrate.derive([run], ALONE)
    assert min(found.latency_s, found.message_s) >= 0
    total = 2 * found.transfer_s + 2 * found.latency_s + found.message_s + found.update_s
    assert total == pytest.approx(max(push_s + wait_s + pull_s, 2 * min(push_s, pull_s) + UPDATE_S))


def test_a_prediction_from_the_file_gives_the_runs_times_back(tmp_path: Path) -> None:
    job = Job.load("digits", ["cluster.learners=1", "protocol.name=async", "training.minibatch_size=16"])
    size_bytes = outline(job).size_bytes
    path = tmp_path / "costs.toml"
    path.write_text(calibrate.cost_file(job, calibrate.derive(made(), ALONE), size_bytes, 2), encoding="utf-8")
    measured = tomllib.loads(path.read_text(encoding="utf-8"))["measured"]
    assert measured["learners"] == 2
    assert {"date", "processor", "cores", "torch_version"} <= set(measured)
    exchange_s = PUSH_S + WAIT_S + PULL_S
    between_s = (0.01 * 0.03) ** 0.5  # log-log, and 16 is the middle of 8 and 32
    for learners, slowdown in ((1, 1.0), (2, 1.15)):
        named = job.with_(simulation={"costs": str(path)}, cluster={"learners": learners})
        found = predict(named, known=Outline(16_000, size_bytes))
        expected = 1000 / learners * (between_s * slowdown + exchange_s)
        assert found.epoch_s == pytest.approx(expected, rel=0.04)
    assert list(tmp_path.iterdir()) == [path]


def test_a_correction_and_the_cores_of_the_node_are_in_the_file() -> None:
    job = Job.load("digits", ["cluster.learners=1", "cluster.threads_per_rank=1", "data.train_limit=64"])
    corrected = replace(ALONE, correction_s=1e-3)
    for alone, per_byte in ((ALONE, None), (corrected, pytest.approx(1e-6, rel=0.01))):
        file = tomllib.loads(calibrate.cost_file(job, calibrate.derive(made(), alone), tail_bytes(1) + 1000, 2))
        assert file["models"]["lenet"].get("correction_s_per_byte") == per_byte
        assert (file["cores_per_node"], file["cpu_s_per_byte"]) == (cores(), 2e-10)


def test_learners_of_a_bank_are_timed_by_themselves() -> None:
    cluster = {"learners": 4, "learners_per_device": 4, "bank": "graphs", "streams": 2}
    timed = calibrate._timed(Job(protocol={"name": "sma"}, cluster=cluster)).cluster
    assert (timed.learners_per_device, timed.bank, timed.streams) == (None, "auto", None)


BANKED = Job.load(
    "digits", ["model.name=mlp", "data.train_limit=64", "protocol.name=sma", "cluster.threads_per_rank=1"]
)


def banks_of(job: Job, sizes: list[int], most: int) -> BankCosts:
    return measure_banks(calibrate._timed(job).resolved(learners=1), job.cluster, sizes, most, 0.0)


def test_banks_are_timed_in_the_form_of_the_job() -> None:
    cluster = {"learners": 4, "learners_per_device": 4, "bank": "fused"}
    found = banks_of(BANKED.with_(cluster=cluster), [2, 8], 4)
    assert {m: [*sizes] for m, sizes in found.relative.items()} == {1: [2, 8], 2: [2, 8], 4: [2, 8]}
    assert found.forms == {1: ("loop",) * 2, 2: ("fused",) * 2, 4: ("fused",) * 2}
    assert found.relative[1] == {2: 1.0, 8: 1.0}
    assert {*banks_of(BANKED.with_(cluster={"bank": "auto"}), [2], 2).forms[2]} <= {"loop", "fused"}


def test_banks_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_size, "free_memory", lambda: 1_000_000)  # six learners take half of it
    assert [*banks_of(BANKED, [2], 64).relative] == [1, 2, 4]


def test_a_bank_that_the_model_cannot_make_is_refused() -> None:
    job = BANKED.with_(cluster={"learners": 2, "learners_per_device": 2, "bank": "fused"})
    with pytest.raises(ConfigError, match=r"\[cluster\] bank = 'fused'"):
        banks_of(job.with_(model={"name": f"{__name__}:data_dependent"}), [2], 2)


def data_dependent(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    class Choosing(torch.nn.Linear):
        def forward(self, samples: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(samples.flatten(1))
            return found if found.sum() > 0 else -found

    return Choosing(math.prod(input_shape), classes)


def test_a_cost_file_says_how_long_a_bank_takes_at_any_minibatch(tmp_path: Path) -> None:
    """In multiples of the time of one learner on ranks."""
    banks = BankCosts({1: {8: 1.0, 32: 1.0}, 4: {8: 2.0, 32: 3.0}}, {1: ("loop",) * 2, 4: ("fused", "graphs")})
    job = Job.load("digits", ["cluster.learners=1", "protocol.name=sma", "topology.name=replicas"])
    text = calibrate.cost_file(job, calibrate.derive(made(), ALONE), outline(job).size_bytes, 2, banks=banks)
    assert "forms 1: loop; 4: fused, graphs" in text
    path = tmp_path / "costs.toml"
    path.write_text(text, encoding="utf-8")
    samples_per_s = {}
    for size in (8, 32):
        for m in (1, 4):
            cluster = {"learners": m, "learners_per_device": m}
            own = job.with_(simulation={"costs": str(path), "jitter": 0.0}, training={"minibatch_size": size})
            found = predict(own.with_(cluster=cluster), known=Outline(16_000, 8))
            samples_per_s[size, m] = found.samples_per_s
    assert samples_per_s[8, 4] == pytest.approx(2 * samples_per_s[8, 1], rel=0.05)
    assert samples_per_s[32, 4] == pytest.approx(4 / 3 * samples_per_s[32, 1], rel=0.05)


def test_a_byte_of_tcp_takes_some_time_of_a_core() -> None:
    began = time.process_time()
    found = cpu_s_per_byte()
    whole_s = time.process_time() - began  # of both ends, and of memory that is touched for the first time
    assert 0.05 * whole_s < found * 2 * SENT_BYTES < whole_s  # touching memory may take most of it


def test_a_users_model_is_named_as_it_is(tmp_path: Path) -> None:
    job = Job.load("digits", ["model.name=my.models:net", "cluster.learners=1"])
    text = calibrate.cost_file(job, calibrate.derive(made(), ALONE), 1000, 2)
    assert list(tomllib.loads(text)["models"]) == ["my.models:net"]


def test_a_file_that_exists_or_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.toml"
    path.touch()
    for output, text in ((path, "exists; give another name or --force"), (tmp_path / "a" / "b.toml", "does not exist")):
        assert main(["calibrate", "digits", "-o", str(output)]) == 2
        assert text in capsys.readouterr().err


def test_a_directory_of_costs_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cost_files, "MEASURED", tmp_path / "file" / "rudra")
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: pytest.fail("it measures"))
    assert main(["calibrate", "digits"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rudra: {tmp_path / 'file' / 'rudra'}: cannot write there: Not a directory; give -o ")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "many"])
@pytest.mark.parametrize("command", ["calibrate", "profile", "place"])
def test_seconds_of_a_measurement_are_above_zero(
    command: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "digits", "--seconds", seconds])
    assert ended.value.code == 2
    assert f"argument --seconds: must be a number > 0, not '{seconds}'" in capsys.readouterr().err


def test_calibrate_measures_no_more_samples_than_the_training_set_has() -> None:
    job = Job(model={"name": "mlp"}, data={"name": "digits", "train_limit": 64}, training={"minibatch_size": 32})
    measured: list[int] = []

    def execute(runs: calibrate.Runs) -> int:
        measured.extend(each.training.minibatch_size for each, _ in runs)
        return 1

    with pytest.raises(RunError):
        calibrate.calibrate(job, learners=1, bank=1, seconds=0.01, show=False, execute=execute)
    assert measured == [8, 32, 64]
    with pytest.raises(ConfigError, match=r"minibatch_size = 65 \(μ\) exceeds the training set; use 1 to 64"):
        calibrate.calibrate(job, sizes=[8, 65], show=False, execute=execute)


@pytest.mark.parametrize(("code", "error"), [(3, KeyboardInterrupt), (1, RunError)])
def test_a_timed_run_that_is_stopped_is_no_failure(code: int, error: type[BaseException]) -> None:
    job = Job(model={"name": "mlp"}, data={"name": "digits", "train_limit": 64})
    with pytest.raises(error):
        calibrate.calibrate(job, sizes=[8], seconds=0.01, show=False, execute=lambda runs: code)
