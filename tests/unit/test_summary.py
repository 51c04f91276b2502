"""What a run's summary says that is in no table of its file."""

from pathlib import Path

import pytest

from rudra.core.records import EPOCH, UPDATE
from rudra.results.progress import summary_table
from rudra.results.reader import open_results
from tests.unit.report_files import write_point
from tests.unit.results_files import new_writer, rows


@pytest.mark.parametrize(
    ("about", "factor"),
    [
        ({"protocol": "hardsync", "n": None}, 0.5),  # sqrt(λμ/B), B = 64
        ({"protocol": "softsync", "n": 1}, 1.0),
        ({"protocol": "softsync", "n": 4}, 0.25),
        ({"protocol": "softsync", "n": 4, "modulation": "none"}, 1.0),
        ({"protocol": "softsync", "n": 4, "modulation": "mean_staleness"}, 1.0),
        (
            {"protocol": "softsync", "n": 2, "topology": "groups", "options": {"groups": 2, "parameter_server": True}},
            0.5,
        ),
    ],
)
def test_effective_rate(tmp_path: Path, about: dict, factor: float) -> None:
    write_point(tmp_path / "run.h5", mu=4, lam=4, learning_rate=0.3, **about)
    with open_results(tmp_path / "run.h5") as results:
        assert results.summary()["learning_rate"] == pytest.approx(0.3 * factor)


def test_rates_above_the_first_one_are_told(tmp_path: Path) -> None:
    """As OneCycleLR has them, whatever α0 is."""
    rates = [0.002, 0.05, 0.0001]
    with new_writer(tmp_path / "run.h5") as writer:
        writer.append("updates", rows(UPDATE, 3, timestamp=[1, 2, 3], learning_rate=rates))
        writer.append("epochs", rows(EPOCH, 1, epoch=1, learning_rate=rates[-1]))
        writer.fail("failed", "")
    with open_results(tmp_path / "run.h5") as results:
        summary = results.summary()
    assert (summary["highest_learning_rate"], summary["last_learning_rate"]) == (0.05, 0.0001)
    assert "0.005 = α0 x 0.5 (modulation n), 0.05 at most, 0.0001 at the end" in summary_table(summary)


def test_no_effective_rate_where_the_file_does_not_tell(tmp_path: Path) -> None:
    write_point(tmp_path / "run.h5", protocol="softsync", n=1, mu=4, lam=4, rate_factor=None)
    with open_results(tmp_path / "run.h5") as results:
        assert results.summary()["learning_rate"] is None
