"""Tables of result files as data frames."""

import sys
from pathlib import Path

import numpy as np
import pytest
from results_files import new_writer, rows, write_run

from rudra.core.records import EVENT, MINIBATCH
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.results import plan_rows
from rudra.results.frame import TABLES
from rudra.results.reader import open_results


@pytest.mark.parametrize("table", TABLES)
def test_a_frame_has_the_rows_of_the_file(tmp_path: Path, table: str) -> None:
    plan = Job(cluster={"learners": 4}).plan()
    write_run(tmp_path / "run.h5", updates=10, epochs=2, staleness=1, roles=plan_rows.rows_of(plan))
    with open_results(tmp_path / "run.h5") as results:
        found, expected = results.frame(table), getattr(results, table)
    assert list(found.columns) == [name for name in expected.dtype.names if name != "pad"]
    assert len(found) == len(expected)
    for name in found.columns:
        if expected.dtype[name].kind == "S":
            assert found[name].tolist() == [text.decode() for text in expected[name]]
        else:
            assert found[name].dtype == expected.dtype[name]
            assert np.array_equal(found[name], expected[name], equal_nan=True)


def test_texts_of_events_are_texts(tmp_path: Path) -> None:
    with new_writer(tmp_path / "run.h5") as writer:
        writer.append("events", np.array([(b"lost", 3, 0, 0, 0, 0, 0, "Köln".encode())], EVENT))
        writer.append("minibatches", rows(MINIBATCH, 3, learner=[2, 0, 2], compute_s=[1, 2, 4]))
    with open_results(tmp_path / "run.h5") as results:
        assert results.frame("events")[["kind", "text"]].to_numpy().tolist() == [["lost", "Köln"]]
        assert results.frame("minibatches").groupby("learner")["compute_s"].sum().to_dict() == {0: 2.0, 2: 5.0}


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run.h5", updates=1, epochs=1, staleness=0)
    with open_results(tmp_path / "run.h5") as results:
        with pytest.raises(
            ConfigError, match=r"table 'update' is unknown; valid: gradients, .*; did you mean updates\?$"
        ):
            results.frame("update")
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ConfigError, match=r"^data frames need pandas: pip install 'rudra\[pandas\]'$"):
            results.frame("updates")
