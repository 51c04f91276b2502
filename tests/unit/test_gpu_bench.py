"""`rudra bench gpu` without a GPU: rows, their file, the budget, and what a row that fails does to others."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks import gpu, gpu_accuracy, gpu_banks, gpu_bus, gpu_checks, gpu_jobs, gpu_ranks, gpu_speed
from benchmarks.gpu_device import MACHINES, CudaCounter, Machine, StepCounter, copies_in
from benchmarks.gpu_rows import CheckFailed, Figures, Found, LeftOut, Row, Section, Setting, ends_after, measured, row
from rudra.benchmark_report import Spread
from rudra.cli.main import main
from rudra.errors import RunError
from tests import forks
from tests.structure import ROOT


def one(setting: Setting) -> Figures:
    return {"images/s": Spread(2.0, 1.0, 3.0), "loop": "eager"}


def broken(setting: Setting) -> Figures:
    raise ValueError("no\nsuch kernel")


def wrong(setting: Setting) -> Figures:
    raise CheckFailed("the difference is 1")


def absent(setting: Setting) -> Figures:
    raise LeftOut("no graphs here")


def for_ever(setting: Setting) -> Figures:
    while True:
        pass


def setting_in(directory: Path, left_s: float = 60.0) -> Setting:
    return Setting(Machine(), "quick", directory, time.monotonic() + left_s)


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Replaces the sections of the benchmark, and works in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def use(**rows: list[Row]) -> None:
        made = [Section(name, lambda setting, rows=found: rows) for name, found in rows.items()]  # type: ignore[misc]
        monkeypatch.setattr(gpu, "SECTIONS", made)

    return use


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_row_is_printed_and_written_when_it_is_measured(sections: Callable[..., None], tmp_path: Path) -> None:
    shown: list[str] = []
    seen: list[tuple[int, int]] = []

    def look(setting: Setting) -> Figures:
        seen.append((len(shown), len(lines_of(tmp_path / "gpu.jsonl"))))
        return {}

    sections(speed=[row("a", 1, one), row("b", 1, look)])
    report = gpu.run(quick=True, show=shown.append)
    assert seen == [(2, 1)], "the device and the first row"
    assert re.fullmatch(r"CPU, \d+ cores, \d+ GiB, torch .+", shown[0])
    assert shown[1] == "speed: a: images/s 2 (1–3), loop eager"
    first, _ = lines_of(tmp_path / "gpu.jsonl")
    assert (first["section"], first["row"]) == ("speed", "a")
    assert first["figures"] == {"images/s": {"median": 2, "low": 1, "high": 3}, "loop": "eager"}
    assert f"{first['device']}, torch {first['torch']}" == shown[0]
    assert report.rows[0][:4] == ("speed", 2, 0, 0)


def test_a_second_call_appends_to_the_file(sections: Callable[..., None], tmp_path: Path) -> None:
    sections(speed=[row("a", 1, one)])
    for _ in range(2):
        gpu.run(quick=True, keep=tmp_path / "rows", show=lambda line: None)
    assert len(lines_of(tmp_path / "rows")) == 2


def test_a_row_that_fails_is_named_and_the_others_follow(
    sections: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections(checks=[row("a", 1, broken), row("b", 1, wrong)], speed=[row("c", 1, absent), row("d", 1, one)])
    assert main(["bench", "gpu", "--quick"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[1:5] == [
        "checks: a: failed: ValueError: no such kernel",
        "checks: b: failed: the difference is 1",
        "speed: c: left out: no graphs here",
        "speed: d: images/s 2 (1–3), loop eager",
    ]
    problems = [line.get("problem", "").partition(":")[0] for line in lines_of(tmp_path / "gpu.jsonl")]
    assert problems == ["failed", "failed", "left out", ""]
    assert "in broken" in lines_of(tmp_path / "gpu.jsonl")[0]["trace"]


def test_rows_that_are_left_out_are_no_failure(sections: Callable[..., None]) -> None:
    sections(speed=[row("c", 1, absent)])
    assert main(["bench", "gpu", "--quick"]) == 0


def test_with_json_only_the_report_is_printed(
    sections: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    sections(speed=[row("a", 1, one), row("b", 1, broken)])
    assert main(["bench", "gpu", "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["rows"][0][:4] == ["speed", 1, 1, 0]
    assert report["goals"] == [{"goal": "no row fails", "figure": 1, "reached": False}]


def test_a_section_that_does_not_fit_into_the_budget_is_named(sections: Callable[..., None]) -> None:
    shown: list[str] = []
    sections(checks=[row("a", 1, one)], speed=[row("b", 500, one), row("c", 500, one)], copies=[row("d", 1, one)])
    report = gpu.run(quick=True, budget=100, show=shown.append)
    assert [line.partition(": left out")[0] for line in shown[1:]] == [
        "checks: a: images/s 2 (1–3), loop eager",
        "speed: b",
        "speed: c",
        "copies: d: images/s 2 (1–3), loop eager",
    ]
    assert re.search(r"speed: b: left out: (99|100) s of the budget are left", "\n".join(shown))
    assert report.notes[1:] == ["section left out: speed"]
    assert report.failures == []


def test_a_row_that_outlasts_the_budget_is_interrupted(tmp_path: Path) -> None:
    setting = setting_in(tmp_path, left_s=0.05)
    (found,) = measured(row("a", 0, for_ever), setting)
    assert found == Found("a", problem="left out: the budget ended before it was measured")
    (late,) = measured(row("b", 0.001, one), setting)
    assert late.problem.startswith("left out")


def test_outcomes_before_an_error_are_kept(tmp_path: Path) -> None:
    def some(setting: Setting) -> Iterator[Found]:
        yield Found("a: eager", {"images/s": 1.0})
        raise RunError("the run failed")

    found = list(measured(Row("a", some, 1), setting_in(tmp_path)))
    assert [(each.row, each.problem) for each in found] == [("a: eager", ""), ("a", "failed: the run failed")]


def test_a_timer_of_the_process_continues_after_the_budget() -> None:
    def outer(*_: object) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, outer)
    before, _ = signal.setitimer(signal.ITIMER_REAL, 50)
    try:
        with ends_after(10):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 10
        assert 10 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
        assert signal.getsignal(signal.SIGALRM) is outer
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, before)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "bench gpu: torch sees no GPU here; use --device host"),
        (["--device", "hots"], "bench gpu: --device 'hots' is unknown; valid: host, cuda; did you mean host?"),
        (["--quick", "--budget", "0"], "bench gpu: --budget 0; valid: seconds > 0"),
        (["--quick", "--keep", "no/such/file"], "no/such/file: cannot write: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == f"rudra: {said}"


def test_a_loop_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each turn: runs and loops are measured in the order of the case."""

    def refusing(setting: Setting, loop: gpu_speed.Loop) -> Any:
        raise ValueError("no kernel")

    monkeypatch.setitem(gpu_speed.LOOPS, "eager", refusing)
    monkeypatch.setattr(gpu_speed, "run_rate", lambda *_: 50.0)
    case = gpu_speed.Case("lenet", 2, ways=("Rudra", "eager", "graph", "DDP"))
    found = {each.row.rpartition(": ")[2]: each for each in gpu_speed.compare(case, setting_in(tmp_path))}
    assert found["eager"].problem == "failed: ValueError: no kernel"
    assert found["graph"].problem == "left out: there are no CUDA graphs on the host"
    assert found["Rudra"].figures == {"images/s": Spread(50.0, 50.0, 50.0)}
    ratio, rate = found["DDP"].figures["Rudra / DDP"], found["DDP"].figures["images/s"]
    assert isinstance(ratio, Spread)
    assert isinstance(rate, Spread)
    assert ratio.median == pytest.approx(50 / rate.median)
    assert not distributed.is_initialized()


def test_a_run_that_fails_leaves_the_rates_of_the_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> float:
        raise RunError("bench: the run ended with exit code 1")

    monkeypatch.setattr(gpu_speed, "run_rate", fails)
    case = gpu_speed.Case("lenet", 2, ways=("Rudra", "eager"))
    found = {each.row.rpartition(": ")[2]: each for each in gpu_speed.compare(case, setting_in(tmp_path))}
    assert found["Rudra"].failed
    assert [*found["eager"].figures] == ["images/s"]


def test_a_gradient_that_differs_too_much_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_in(tmp_path)
    found = gpu_checks.gradient("lenet", {}, setting)
    assert 0 < found["error"] == found["CPU's error"] < 1e-5
    monkeypatch.setattr(gpu_checks, "LARGEST", -1.0)
    with pytest.raises(CheckFailed, match=r"the relative error is \S+, on the CPU \S+; valid: up to -1"):
        gpu_checks.gradient("lenet", {}, setting)


def test_data_that_is_missing_leaves_its_rows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDRA_DATA", str(tmp_path))
    setting = setting_in(tmp_path)
    found = [outcome for each in gpu_accuracy.rows(setting) for outcome in measured(each, setting)]
    assert [each.problem for each in found] == [
        f"left out: there is no {tmp_path}/fashion-mnist; RUDRA_DATA can name another place"
    ]


def test_copies_over_the_bus_are_counted_by_kind() -> None:
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 4}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 100}},
        {"cat": "kernel", "name": "Memcpy HtoD (Pageable -> Device)"},
    ]
    assert copies_in(events) == {"pageable copies": 1, "copies": 2, "bytes": 12}
    assert copies_in([]) == {"pageable copies": 0, "copies": 0, "bytes": 0}


def test_waits_are_the_warnings_of_torch_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    allocated = iter([100, 130])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": next(allocated)})
    counter, filters = CudaCounter(), [*warnings.filters]
    counter.start()
    for text in ("called a synchronizing CUDA operation", "called a synchronizing CUDA operation", "another"):
        warnings.warn(text, UserWarning, stacklevel=1)
    assert counter.stop() == {"waits": 2, "allocations": 30}
    assert modes == ["warn", "default"]
    assert warnings.filters == filters


def test_a_rank_counts_waits_before_it_records_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, str]] = []

    class Counting(StepCounter):
        def start(self) -> None:
            called.append((step, "start"))

        def stop(self) -> dict[str, float]:
            called.append((step, "stop"))
            return {"waits": 60.0}

        def start_copies(self) -> None:
            called.append((step, "start copies"))

        def stop_copies(self) -> dict[str, float]:
            called.append((step, "stop copies"))
            return {"copies": 20.0}

    monkeypatch.setattr(Machine, "counter", lambda machine: Counting())
    file = tmp_path / "steps.json"
    for step in range(50):
        moment = gpu_jobs.rudra.Moment("update", "learner 0", 2, "bench", step=step)
        gpu_jobs.watch(moment, "host", str(file))
    first, second, third = 10, 30, 40
    assert called == [(first, "start"), (second, "stop"), (second, "start copies"), (third, "stop copies")]
    found = json.loads(file.read_text())
    assert found.pop("peak MB") > 0
    assert found == {"waits": 60, "copies": 20}


def test_each_goal_is_of_a_row_and_a_figure_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "run_rate", lambda *_: 50.0)
    for section in (gpu_speed, gpu_banks):
        monkeypatch.setattr(section, "loop_rate", lambda *_: lambda: 100.0)
    monkeypatch.setattr(gpu_banks, "bank_rate", lambda setting, case, learners, form, steps: 50.0 * learners)
    learner = {"equal": True, "seconds": {"ipc": [2.0], "staged": [1.0]}}
    monkeypatch.setattr(gpu_ranks, "on_ranks", lambda *_, **__: [{}, {}, learner])
    setting = Setting(Machine(), "full", tmp_path)
    banks = [each for each in gpu_banks.rows(setting) if each.name.endswith((" m = 1", " m = 4", " m = 8"))]
    rows = [*gpu_speed.rows(setting), *banks, *(each for each in gpu_bus.rows(setting) if each.name == "two ranks")]
    found = [outcome for each in rows for outcome in measured(each, setting)]
    assert not [each.row for each in found if each.problem]
    goals = gpu._goals(found, "full")
    of_banks = {"times m = 1": {"4": 4.0, "8": 8.0}, "best / one batch": {"4": 2.0, "8": 4.0}}
    wanted = [of_banks.get(figure, {}).get(pattern[pattern.find("m = ") + 4], 0.5) for pattern, figure, _ in gpu.GOALS]
    assert [goal.figure for goal in goals] == wanted
    assert gpu._goals(found, "small") == []


def test_each_device_has_a_name_and_a_backend() -> None:
    assert {name: (cls.in_jobs, cls.backend) for name, cls in MACHINES.items()} == {
        "host": ("cpu", "gloo"),
        "cuda": ("cuda", "nccl"),
    }


PYTHON = """#!/bin/sh
case "$*" in
  *torch.cuda.is_available*) exit 1 ;;
  "-c "*) exit 0 ;;
  "-m rudra "*) shift 2; exec {rudra} "$@" ;;
  *) echo "what is $*" >&2; exit 9 ;;
esac
"""


def test_check_ends_with_the_exit_code_of_a_mistake(tmp_path: Path) -> None:
    """Of a Python that is ready and sees no GPU, without the imports of torch that would tell."""
    for name in ("check", ".setup"):
        shutil.copy(ROOT / name, tmp_path)
    stand_in = tmp_path / "python3"
    stand_in.write_text(PYTHON.format(rudra=shlex.join(forks.rudra())))
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(tmp_path / "check"), "--gpu", "--device", "hots"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("rudra: bench gpu: --device 'hots' is unknown")
