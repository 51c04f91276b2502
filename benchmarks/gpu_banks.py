"""Section "banks" of `rudra bench gpu`: m learners on one device in each form, and one batch of all their samples."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import rudra
from benchmarks.gpu_jobs import learner_job
from benchmarks.gpu_rows import Found, Row, Setting, failure
from benchmarks.gpu_speed import Case, Rate, loop_rate
from rudra.benchmark_report import Cell, ratios, spread

FORMS = ("loop", "graphs", "fused")
BOUND = "one batch"
"""Plain loop whose mini-batch has the samples of all learners: a graph of the whole step, or eager on the host."""

CASES = [Case("lenet", 4), Case("resnet32", 16), Case("lenet", 16), Case("resnet32", 64), Case("vgg16", 64)]
SMALL = [Case("lenet", 4), Case("resnet32", 4, {"blocks": 1})]
SIZES = [1, 2, 4, 8, 16, 32, 64]
EXPECTED_S = 15.0


def rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section: one for each network, mini-batch and m, which has an outcome for each form."""
    cases, sizes = setting.sized((CASES, SIZES), (SMALL, [1, 4]), (SMALL[:1], [2]))
    alone: dict[str, list[float]] = {}
    return [Row(f"{case.name}, m = {m}", partial(compare, case, m, alone), EXPECTED_S) for case in cases for m in sizes]


def compare(case: Case, learners: int, alone: dict[str, list[float]], setting: Setting) -> Iterator[Found]:
    """Measures a bank in turns, and yields the images/s of runs in each form, and of the fastest form once more.

    Args:
        case: Network and mini-batch of each learner.
        learners: m.
        alone: Images/s with one learner in each turn, by the name of the case. A case with m = 1 enters them.
        setting: Setting of the benchmark.
    """
    name, span_s = f"{case.name}, m = {learners}", setting.sized(1.0, 0.5, 0.1)
    whole, loop = replace(case, size=case.size * learners), "eager" if setting.machine.is_host else "graph"
    ways: dict[str, Rate] = {BOUND: loop_rate(setting, whole, loop, span_s)}
    steps = int(min(setting.sized(2000, 100, 10), max(10, ways[BOUND]() * span_s / whole.size)))
    ways |= {form: partial(bank_rate, setting, case, learners, form, steps) for form in FORMS}
    figures: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(setting.sized(2, 1)):
        for way in [*ways]:
            try:
                figures[way].append(ways[way]())
            except Exception as error:
                del ways[way]
                yield failure(f"{name}: {way}", error)
    forms = sorted((form for form in FORMS if form in ways), key=lambda form: -spread(figures[form]).median)
    if learners == 1 and forms:
        alone[case.name] = figures[forms[0]]
    for way in ways:
        yield Found(f"{name}: {way}", {"images/s": spread(figures[way])})
    for fastest in forms[:1]:
        shown: dict[str, Cell] = {"form": fastest}
        if BOUND in ways:
            shown[f"best / {BOUND}"] = ratios(figures[fastest], figures[BOUND])
        if case.name in alone:
            shown["times m = 1"] = ratios(figures[fastest], alone[case.name])
        yield Found(f"{name}: best", shown)


def bank_rate(setting: Setting, case: Case, learners: int, form: str, steps: int) -> float:
    """Returns the images/s of a run whose learners average replicas, without the first fifth of its iterations."""
    job = learner_job(setting, case.model, case.size, steps * learners, dict(case.options))
    tables: Mapping[str, Any] = {
        "protocol": {"name": "sma"},
        "cluster": {"learners": learners, "learners_per_device": learners, "bank": form},
    }
    with rudra.run(job.with_(**tables), output=setting.directory / "bank.h5", force=True, progress="quiet") as results:
        time_s, samples = results.updates["time_s"], results.updates["samples"]
    first = len(time_s) // 5
    return float(samples[first + 1 :].sum() / (time_s[-1] - time_s[first]))
