"""Every number of `jobs/rudra/paper.toml` against the tables and the text that were copied out of the paper."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT.parent / "shared" / "papers" / "rudra-facts.md"
pytestmark = pytest.mark.skipif(not FACTS.is_file(), reason=f"no {FACTS} to compare with")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def facts() -> str:
    return FACTS.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ours() -> dict[str, Row]:
    return tomllib.loads((ROOT / "jobs" / "rudra" / "paper.toml").read_text(encoding="utf-8"))


def rows_of(facts: str, title: str) -> list[list[str]]:
    """Cells of the table below a title in bold, without its heads."""
    below = facts.split(f"**{title}**")[1].split("\n**")[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def about(facts: str, title: str) -> str:
    """The paragraph that a title in bold begins."""
    return facts.split(f"**{title}**")[1].split("\n\n")[0]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def fraction(percent: str | float) -> float:
    return round(float(percent) / 100, 6)


def found(pattern: str, text: str) -> list[float]:
    """The numbers that a pattern catches."""
    match = re.search(pattern, text)
    assert match, f"not in the facts: {pattern}"
    return [number(group) for group in match.groups()]


def configuration(sigma: float, size: float, learners: float, **told: Any) -> Row:
    protocol = {"protocol": "softsync", "n": sigma} if sigma else {"protocol": "hardsync"}
    return {"sigma": sigma, **protocol, "minibatch_size": size, "learners": learners, **told}


def topology(architecture: str) -> Row:
    name = architecture.removeprefix("Rudra-")
    return {} if name == "base" else {"topology": name}


def baseline(facts: str) -> list[Row]:
    *triple, percent, time_s = found(r"Baseline \((\d+),(\d+),(\d+)\): ([\d.]+)%, ([\d,]+) s", facts)
    return [{**configuration(*triple), "test_error": fraction(percent), "time_s": time_s}]


def table_1(facts: str) -> list[Row]:
    size, learners = found(r"μ = (\d+) .* about (\d+) learners", about(facts, "Table 1"))
    # The protocol is not told: that of all runs with such networks (Table 4) is 1-softsync.
    return [
        configuration(1, size, learners, overlap=fraction(share), **topology(name))
        for name, share in rows_of(facts, "Table 1")
    ]


def table_2(facts: str) -> list[Row]:
    return [
        configuration(*map(number, triple), test_error=fraction(percent), time_s=number(time_s))
        for _, *triple, percent, time_s in rows_of(facts, "Table 2")
    ]


def table_3(facts: str) -> list[Row]:
    rows = rows_of(facts, "Table 3")
    assert all((sigma == "0") == (protocol == "Hardsync") for sigma, _, _, protocol, _, _ in rows)
    return [
        configuration(*map(number, triple), test_error=fraction(percent), time_s=number(time_s))
        for *triple, _, percent, time_s in rows
    ]


def configurations_4(facts: str) -> list[tuple[Row, float, float]]:
    """Of Table 4: configuration, top-1 error and minutes per epoch."""
    return [
        (
            configuration(0 if protocol == "Hardsync" else 1, number(size), number(learners), **topology(name)),
            fraction(top_1),
            number(minutes),
        )
        for _, name, size, learners, protocol, top_1, _, minutes in rows_of(facts, "Table 4")
    ]


def table_4(facts: str) -> list[Row]:
    assert "⟨σ⟩ ≈ 1 in base and adv, larger in adv*" in facts
    staleness = [
        {"mean_staleness": row["sigma"]} if row.get("topology") != "adv*" else {} for row, *_ in configurations_4(facts)
    ]
    return [
        {**row, "minutes_per_epoch": minutes, **known}
        for (row, _, minutes), known in zip(configurations_4(facts), staleness, strict=True)
    ]


def figure_9(facts: str) -> list[Row]:
    """Of the whole training."""
    (epochs,) = found(r"\*\*Table 4\*\* ImageNet, (\d+) epochs", facts)
    return [
        {**row, "test_error": error, "time_s": minutes * 60 * epochs} for row, error, minutes in configurations_4(facts)
    ]


def figure_4(facts: str) -> list[Row]:
    text = about(facts, "Fig. 4")
    (learners,) = found(r"λ = (\d+)", text)
    most, far = found(r"P\(σ > (\d+)\) < (0\.\d+)", text)
    told = [
        found(r"(\d+)-softsync \(30 gradients per update\) stays near (\d+), σ ∈ \{0,1,(\d+)\}", text),
        found(r"(\d+)-softsync \(15 per update\) near (\d+), σ ∈ \{0…(\d+)\}", text),
        [*found(r"\(b\) (\d+)-softsync: inset histogram, mass close to (\d+)", text), most],
    ]
    common = {"protocol": "softsync", "learners": learners}
    rows = [{**common, "sigma": n, "n": n, "mean_staleness": mean, "staleness_max": top} for n, mean, top in told]
    rows[-1]["beyond_max"] = far
    return rows


def figure_5(facts: str) -> list[Row]:
    text = about(facts, "Fig. 5")
    learners, size = found(r"λ = (\d+), μ = (\d+)", text)
    n, percent = found(r"(\d+)-softsync with α₀ stays at (\d+)%", text)
    return [configuration(n, size, learners, modulation="none", test_error=fraction(percent))]


def figure_8(facts: str) -> list[Row]:
    """Speed-ups against the baseline, of the rows of Table 2 with its μ."""
    (base,) = baseline(facts)
    text = about(facts, "Fig. 8")
    rows = [row for row in table_2(facts) if row["minibatch_size"] == base["minibatch_size"]]
    for row in rows:
        del row["test_error"]
        row["speed_up"] = round(base["time_s"] / row["time_s"], 2)
        assert re.search(rf"{row['speed_up']:.2f}× \((?:λ=)?{row['learners']:.0f}\)", text)
    return rows


CIFAR10 = ("baseline", "figure5", "figure6", "figure7", "figure8", "table2", "table3")
WHAT = {
    "baseline": baseline,
    "figure4": figure_4,
    "figure5": figure_5,
    "figure6": baseline,
    "figure7": baseline,
    "figure8": figure_8,
    "figure9": figure_9,
    "table1": table_1,
    "table2": table_2,
    "table3": table_3,
    "table4": table_4,
}


def test_every_table_is_compared(ours: dict[str, Row]) -> None:
    assert set(ours) == set(WHAT)


@pytest.mark.parametrize("name", WHAT)
def test_rows_are_the_papers(name: str, facts: str, ours: dict[str, Row]) -> None:
    def order(row: Row) -> tuple[Any, ...]:
        return row["sigma"], row.get("minibatch_size", 0), row["learners"], row.get("topology", "")

    own = [
        {key: value for key, value in row.items() if key not in {"fitted", "base_fitted"}} for row in ours[name]["rows"]
    ]
    assert sorted(own, key=order) == sorted(WHAT[name](facts), key=order)


@pytest.mark.parametrize("name", WHAT)
def test_the_work_is_the_papers(name: str, facts: str, ours: dict[str, Row]) -> None:
    own = {key: value for key, value in ours[name].items() if key not in {"source", "rows"}}
    if name in CIFAR10:
        epochs, samples = found(r"\*\*CIFAR-10\*\*: ([\d,]+)/.* (\d+) epochs", facts)[::-1]
    elif name in {"figure9", "table4"}:
        millions, epochs = found(r"\*\*ImageNet 2012\*\*: ([\d.]+) M/.* (\d+) epochs\.", facts)
        samples = 1e6 * millions
    else:
        assert own == {}, "a matter of time alone"
        return
    assert own == {"epochs": epochs, "training_samples": samples}
