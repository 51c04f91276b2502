"""The schema of job files says of every shipped job that it is right, and of mistakes that they are wrong."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job import schema
from rudra.job.job import Job
from rudra.job.jobfiles import read_toml, shipped_jobs
from rudra.job.table import Table
from rudra.job.template import toml
from tests.unit.schema import text

VALIDATOR = jsonschema.Draft7Validator(json.loads(schema.text()))

RIGHT = """
[model]
name = "own:Network"
[training]
evaluate = "always"
target = "validation top5_error <= 0.1"
[optimizer]
groups = [{ parameters = "*.bias", weight_decay = 0 }, { parameters = ["a", "b"], rate_factor = 2 }]
[simulation]
compute_s = { 4 = 0.1, 16 = 0.3 }
nodes = 2
faults = [{ learner = 1, dies_at_s = 3.0 }]
[results]
checkpoint_every = "2 epochs"
[[hooks]]
at = "end"
call = "csv"
options = { every = 2 }
[[changes]]
at_epoch = 1
protocol.name = "softsync"
protocol.n = 1
training.minibatch_size = 32
[study]
grid = { protocol.n = [1, 2] }
points = [{ protocol.n = 4, training.epochs = 1 }]
quick.training.epochs = 2
"""


def wrong(tables: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(tables)]


def test_the_file_is_what_the_tables_say() -> None:
    assert schema.text() == text(), "python -m tests.unit.schema"
    jsonschema.Draft7Validator.check_schema(json.loads(schema.text()))


@pytest.mark.parametrize("name", sorted(shipped_jobs()))
def test_shipped_jobs_are_right(name: str) -> None:
    assert wrong(read_toml(shipped_jobs()[name])) == []


def test_what_is_right() -> None:
    tables = tomllib.loads(RIGHT)
    Job(**tables)
    assert wrong(tables) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nepoch = 3", "$.training: Additional properties are not allowed ('epoch' was unexpected)"),
        ("[trainin]\nepochs = 3", "$: Additional properties are not allowed ('trainin' was unexpected)"),
        ('[training]\nepochs = "3"', "$.training.epochs: '3' is not of type 'integer'"),
        ("[training]\nepochs = 0", "$.training.epochs: 0 is less than the minimum of 1"),
        ("[training]\nevaluate = 1", "$.training.evaluate: 1 is not valid under any of the given schemas"),
        (
            '[cluster]\nlearners = 2\n[protocol]\nname = "hardsink"',
            "$.protocol.name: 'hardsink' is not valid under any of the given schemas",
        ),
        ('[optimizer]\nname = "sdg"', "$.optimizer.name: 'sdg' is not one of ['sgd', "),
        ('[training]\ntarget = "accuracy 0.9"', "$.training.target: 'accuracy 0.9' does not match "),
        ('[results]\ncheckpoint_every = "hourly"', "$.results.checkpoint_every: 'hourly' does not match "),
        (
            "[[changes]]\nprotocol.n = 1",
            "$.changes[0]: {'protocol': {'n': 1}} is not valid under any of the given schemas",
        ),
        ("[[changes]]\nat_epoch = 1\ntraining.seed = 2", "$.changes[0].training: Additional properties "),
        ('[[hooks]]\nat = "end"', "$.hooks[0]: 'call' is a required property"),
        ('[[hooks]]\nat = "start"\ncall = "csv"', "$.hooks[0].at: 'start' is not one of "),
        ("[optimizer]\ngroups = [{ rate_factor = 2 }]", "$.optimizer.groups[0]: 'parameters' is a required property"),
    ],
)
def test_what_is_wrong_is_found_as_the_job_finds_it(text: str, said: str) -> None:
    tables = tomllib.loads(text)
    with pytest.raises(ConfigError):
        Job(**tables)
    (error,) = wrong(tables)
    assert error.startswith(said)


def test_every_key_is_described_and_may_have_its_default() -> None:
    for key, about in schema.job_keys().items():
        assert about["description"], key
        *tables, name = key.split(".")
        kind: Any = Job
        for each in tables:
            kind = kind.model_fields[each].annotation
            assert issubclass(kind, Table)
        default, table = kind.model_fields[name].default, ".".join(tables)
        assert default is None or wrong(tomllib.loads(f"[{table}]\n{name} = {toml(default)}")) == [], key


def test_values_that_a_key_names() -> None:
    keys = schema.job_keys()
    named = {key: list(schema.named(about)) for key, about in keys.items()}
    assert named["protocol.name"] == ["async", "average", "diloco", "easgd", "hardsync", "hogbatch", "sma", "softsync"]
    assert named["training.evaluate"] == ["true", "false", "always", "workers"]
    assert named["augment.flip"] == ["true", "false"]
    assert named["training.epochs"] == []


def test_the_command_prints_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema.text()
    file = tmp_path / "rudra.schema.json"
    assert main(["schema", "-o", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == schema.text()
    assert main(["schema", "-o", str(file)]) == 2
    assert capsys.readouterr().err == f"rudra: {file}: exists; give another name or --force\n"
    assert main(["schema", "-o", str(file), "--force"]) == 0
