"""What all tests share."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from rudra.prepare import cost_files

# No deadlines of single examples: another process may take the cores of any of them.
settings.register_profile("check", max_examples=16, deadline=None)
settings.register_profile("all", max_examples=40, deadline=None)  # of `./check --all`
settings.register_profile("fuzz", max_examples=4000, deadline=None, print_blob=True)  # see tests/unit/fuzzing.py
settings.load_profile("check")  # `--hypothesis-profile` replaces it

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours

gc.disable()  # thousands of tests are collected, and stay


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm",
        choices=("local", "here"),
        default="local",
        help="what tests/slurm runs on; here: the cluster you are on",
    )


@pytest.fixture(autouse=True)
def _without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are compared on the CPU; subprocesses see no GPU either."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


_CACHES = count()


@pytest.fixture(autouse=True)
def _without_calibration(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test uses no measurement of this machine, and none of another test."""
    monkeypatch.setattr(cost_files, "MEASURED", tmp_path_factory.getbasetemp() / "no such directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_CACHES)}"))


@pytest.fixture(autouse=True, scope="session")
def _with_a_key_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Runs sign their files with a key that is not in the user's data folder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data"))
        yield


def _mark_repetitions(items: list[pytest.Item]) -> None:
    """Marks cases of tests with `each_value` as `campaign`, but for few with each value of each parameter."""
    tests = defaultdict[str, list[tuple[pytest.Item, set[str]]]](list)
    for item in items:
        if "each_value" in item.keywords and isinstance(item, pytest.Function):
            values = {f"{name} = {value!r}" for name, value in item.callspec.params.items()}
            tests[item.nodeid.partition("[")[0]].append((item, values))
    for cases in tests.values():
        left = {value for _, values in cases for value in values}
        while left:
            best = max(cases, key=lambda case: len(case[1] & left))
            left -= best[1]
            cases.remove(best)
        for item, _ in cases:
            item.add_marker("campaign")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup, tests that share what their module has set up go to one process, which does so once.

    Tests that use several of these fixtures bring the tests of each of them together.

    Tests that need a GPU come first: CUDA looks for one once in a process, and is kept from the other tests.
    """
    _mark_repetitions(items)
    items.sort(key=lambda item: "gpu" not in item.keywords)
    if not items or not getattr(items[0].config.option, "loadgroup", False):
        return
    groups = defaultdict[Path, list[set[str]]](list)  # of a module: fixtures that tests use together
    for item in items:
        if shared := _of_the_module(item):
            overlapping = [group for group in groups[item.path] if group & shared]
            others = [group for group in groups[item.path] if not group & shared]
            groups[item.path] = [*others, shared.union(*overlapping)]
    for item in items:
        if shared := _of_the_module(item):
            (group,) = (group for group in groups[item.path] if group & shared)
            # The scheduler reads it there. xdist does the same for its own mark, which pytest 9.2 heeds no more.
            item._id = type(item.id).parse(f"{item.nodeid}@{item.path.stem}: {', '.join(sorted(group))}")


def _of_the_module(item: pytest.Item) -> set[str]:
    """Names of the fixtures that the module of a test sets up for this test and others."""
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return {name for name, (*_, definition) in fixtures.items() if definition.scope == "module"}


def pytest_collection_finish() -> None:
    """What is there now is not looked at again while tests run: that took a third of their time."""
    gc.freeze()
    gc.set_threshold(10_000)  # simulations make many objects, and hardly any cycles
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI is set, a skipped test has not been passed; only a kind of machine may be missing there."""
    report = yield
    machine = {"gpu", "golden"} & {*item.keywords}
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail") and not machine:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, where every test must run: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    if os.environ.get("CI") and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: skipped, where every test must run: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
