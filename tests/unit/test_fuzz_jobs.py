"""Job files with anything in them: each is refused in one line that names what is wrong, or runs."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.job.tables import Hook
from tests.unit.fuzzing import DEEP, KEYS, NAMES, TABLES, TEXTS, VALUES, cases, command, damaged, fresh, refused, toml

pytestmark = pytest.mark.slow

OPTIONS = (
    *("groups", "reduction", "fan_out", "weight_fan_out", "outstanding"),
    *("hidden", "channels", "width", "nesterov", "betas", "n"),
)
FITTING: dict[str, Any] = {
    "training": {"epochs": 1, "minibatch_size": 8, "warm_start": "nowhere.h5"},
    "model": {"name": "mlp", "options": {"hidden": [4]}},
    "cluster": {"learners": 4, "gradient_format": "float16"},
    "simulation": {"nodes": {2: 1, 4: 2}, "compute_s": {4: 0.1, 16: 0.2}, "learner_jitter": {1: 0.5}},
    "study": {"grid": {"protocol.n": [1, 2]}},
}
NAMED = (
    "hooks",
    "[",
    "unknown table or key",
    "name must be",
    "hooks must be a list",
    *(f"{table} must be a table" for table in TABLES),
)
COLON_FREE = VALUES.filter(lambda value: not isinstance(value, str) or ":" not in value)
"""What names a callable is run: that is what it is for."""
MOMENTS = st.sampled_from(["update", "epoch", "end", "learners", "learner 1", "a:b"])
HOOKS = st.dictionaries(st.sampled_from([*Hook.model_fields]) | TEXTS, VALUES | MOMENTS, max_size=5)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KEYS), COLON_FREE | NAMES | st.integers(1, 40)),
        st.tuples(
            st.sampled_from([("topology", "options"), ("model", "options"), ("optimizer", "options")]),
            st.dictionaries(st.sampled_from(OPTIONS) | TEXTS, VALUES | st.integers(1, 9), max_size=2),
        ),
        st.tuples(st.tuples(st.sampled_from([*TABLES, "name", "hooks"]) | TEXTS, st.just("")), COLON_FREE),
        st.tuples(st.just(("hooks", "")), st.lists(HOOKS, max_size=2)),
        st.tuples(st.tuples(st.sampled_from([*TABLES]), TEXTS), VALUES),
    ),
    min_size=1,
    max_size=3,
)


def changed(changes: list[tuple[tuple[str, str], Any]]) -> dict[str, Any]:
    """The tables of a fitting job, with some values replaced."""
    tables = {table: dict(keys) for table, keys in FITTING.items()}
    for (table, key), value in changes:
        if not key:
            tables[table] = value
        elif isinstance(tables.setdefault(table, {}), dict):
            tables[table][key] = value
    return tables


@cases(800)
@given(changes=CHANGES)
def test_any_tables(changes: list[tuple[tuple[str, str], Any]]) -> None:
    tables = changed(changes)
    text = refused(lambda: Job(**{str(k): v for k, v in tables.items()}), *NAMED)
    if text is None:
        Job(**tables).to_json()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs") / "case"


@pytest.mark.parametrize("what", ["validate --syntax", "topology"])
@cases(150)
@given(changes=CHANGES)
def test_any_file_of_tables(what: str, here: Path, changes: list[tuple[tuple[str, str], Any]]) -> None:
    with fresh(here):
        file = here / "job.toml"
        file.write_text("\n".join(f"{toml(key)} = {toml(value)}" for key, value in changed(changes).items()))
        said = command(*what.split(), file)
        assert not said.code or str(file) in said.err or "[" in said.err
        assert list(here.iterdir()) == [file]


@cases(250)
@given(data=st.data())
def test_any_bytes(here: Path, data: st.DataObject) -> None:
    job = data.draw(st.sampled_from(sorted(shipped_jobs().values())))
    content = data.draw(damaged(job.read_bytes()) | DEEP)
    with fresh(here):
        file = here / "job.toml"
        file.write_bytes(content)
        said = command("validate", "--syntax", file)
        assert not said.code or str(file) in said.err or "[" in said.err
        assert list(here.iterdir()) == [file]


READERS = ["run", "validate", "sweep", "predict", "show", "plot", "timeline", "replay", "report", "watch", "topology"]


@cases(200)
@given(changes=st.lists(st.tuples(st.sampled_from(KEYS).map(".".join) | TEXTS, VALUES.map(toml) | TEXTS), max_size=3))
def test_any_overrides(changes: list[tuple[str, str]]) -> None:
    options = [f"--set={key}={value}" for key, value in changes if ":" not in value]
    said = command("validate", "--syntax", "digits", *options)
    assert not said.code or "digits" in said.err or "--set" in said.err


def _is_nothing(name: str) -> bool:
    """Whether it is no option, and no directory: above an empty one there may be anything."""
    return not name.startswith("-") and "\0" not in name and bool(name.strip("/."))


@cases(150)
@given(name=TEXTS.filter(_is_nothing), what=st.sampled_from(READERS))
def test_any_name(here: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh(here):
        monkeypatch.chdir(here)
        said = command(what, name)
        assert said.code == 2, said
        assert not list(here.iterdir())
        monkeypatch.chdir(here.parent)
