"""`rudra init` and the job files that it writes."""

import datetime
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import files, page

from rudra.cli.main import main
from rudra.job.job import Job
from rudra.job.jobfiles import parsed, read_job, read_toml, shipped_jobs
from rudra.job.template import WIDTH, commented, toml

BARE = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | BARE | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BARE, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_values_are_written_as_they_are_read(value: Any) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value


@pytest.mark.parametrize("name", sorted(shipped_jobs()))
def test_a_commented_job_is_the_job(name: str) -> None:
    path, tables = read_job(name)
    text = commented(tables, "about")
    assert max(len(line) for line in text.splitlines() if "# " in line) <= WIDTH
    read = tomllib.loads(text)
    assert Job.of(path, read) == Job.of(path, tables)
    for table, keys in tables.items():
        for wanted, found in zip(keys, read[table], strict=True) if isinstance(keys, list) else [(keys, read[table])]:
            assert wanted.items() <= found.items()


def test_every_key_is_there_and_has_its_default_when_it_is_taken_in() -> None:
    """As a user does: without the # before it."""
    text = commented({}, "about")
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        f"[{name}]" for name in Job.model_fields if name not in {"name", "hooks", "changes"}
    ]
    taken, listed = [], False
    for line in lines:
        listed = line.startswith("#[[") or (
            listed and not re.match(r"#?\[", line)
        )  # those have keys that must be given
        taken += [] if listed else [re.sub(r"^#(?=\w+ = [^ ]|\[)", "", line)]
    assert Job(**tomllib.loads("\n".join(taken))) == Job()
    assert Job(**tomllib.loads(text)) == Job()
    tables: dict[str, set[str]] = {}
    for line in lines:
        if found := re.match(r"#?\[+([\w.]+)\]", line):
            keys = tables.setdefault(found[1], set())
        elif (found := re.match(r"#?(\w+) =", line)) and tables:
            keys.add(found[1])
    assert tables == keys_of(Job, "")


def keys_of(kind: Any, prefix: str) -> dict[str, set[str]]:
    """Keys of the tables in a table, those of inner ones by their dotted names."""
    found: dict[str, set[str]] = {}
    for key, field in kind.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)[:1]):
            if hasattr(inner, "model_fields"):
                below = keys_of(inner, f"{prefix}{key}.")
                tables = {name.rpartition(".")[2] for name in below if name.count(".") == prefix.count(".") + 1}
                found |= {prefix + key: set(inner.model_fields) - tables, **below}
    return found


def test_hooks_and_long_values() -> None:
    grid = {"training": {"minibatch_size": [*range(1, 40)]}, "protocol": {"name": ["hardsync", "softsync"]}}
    tables = {
        "name": "mine",
        "optimizer": {"milestones": [10 * number for number in range(1, 40)]},
        "hooks": [{"at": "end", "call": "csv"}, {"at": "epoch", "call": "own:log", "options": {"a b": [1.5e-7]}}],
        "study": {"grid": grid, "points": [{"training": {"epochs": number, "seed": number}} for number in range(5)]},
        "data": {"options": {"day": datetime.date(2026, 11, 24)}},
    }
    text = commented(tables, "about")
    read = tomllib.loads(text)
    assert {name: {**read[name], **keys} if isinstance(keys, dict) else keys for name, keys in tables.items()} == {
        name: read[name] for name in tables
    }
    assert '\ngrid.protocol.name = ["hardsync", "softsync"]\n' in text
    assert text.count("\n[[hooks]]\n") == 2


def test_init_writes_a_job_that_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert capsys.readouterr().out == "wrote job.toml; check it with: rudra validate job.toml\n"
    assert main(["validate", "job.toml", "--syntax"]) == 0
    assert Job.load("job.toml") == Job.of(Path("job.toml"), read_job("digits")[1], [parsed("cluster.learners=")])
    assert main(["init"]) == 2
    assert capsys.readouterr().err == "rudra: job.toml: exists; give another name or --force\n"
    assert main(["init", "--force"]) == 0
    assert main(["init", "job.yaml"]) == 2
    assert "is not a name for a job file; valid: job.yaml.toml" in capsys.readouterr().err


def test_init_from_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--from", "rudra/figure5", "-"]) == 0
    text = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert text.startswith("# Figure 5: ")
    assert "\n#paper = []" in text, "the numbers of the paper are not here"
    (tmp_path / "figure.toml").write_text(text)
    assert main(["init", "--from", "figure.toml", "again.toml"]) == 0
    assert read_toml(tmp_path / "again.toml") == read_toml(tmp_path / "figure.toml")
    (tmp_path / "bad.toml").write_text("[training]\nepoch = 1\n")
    assert main(["init", "--from", "bad.toml", "new.toml"]) == 2
    assert "bad.toml: [training] unknown key 'epoch'" in capsys.readouterr().err
    assert main(["init", "--from", "nope"]) == 2
    assert not (tmp_path / "new.toml").exists()


def test_init_finds_modules_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "template_rules.py").write_text("from topologies import base\n")
    (tmp_path / "mine.toml").write_text('[topology]\nname = "template_rules:base"\n')
    assert main(["init", "--from", str(tmp_path / "mine.toml"), str(tmp_path / "new.toml")]) == 0
    assert read_toml(tmp_path / "new.toml")["topology"] == {"name": "template_rules:base"}


def test_a_module_of_ones_own_is_the_example_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--own", "own.toml"]) == 0
    shown = files(page("own-model.md"))
    about, _, job = Path("own.toml").read_text().partition("\n")
    assert about.startswith("# ")
    assert {"own.py": Path("own.py").read_text(), "own.toml": job} == {
        name: shown[name].partition("\n")[2] for name in ("own.py", "own.toml")
    }
    assert main(["init", "--own", "waves.toml"]) == 0
    assert main(["validate", "--syntax", "waves.toml"]) == 0
    capsys.readouterr()
    for arguments, line in (
        (["own.toml"], "own.toml: exists; give another name or --force"),
        (["signal.toml"], "signal cannot be the name of a module of yours"),
        (["my-job.toml"], "my-job cannot be the name of a module of yours"),
        (["--from", "digits", "new.toml"], "--own and --from are two kinds of jobs"),
    ):
        assert main(["init", "--own", *arguments]) == 2
        assert line in capsys.readouterr().err
