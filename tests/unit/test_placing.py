"""A job whose `[placement] cut` names a rule: what is chosen, by which times, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rudra.cli.main import main
from rudra.errors import ConfigError, RudraError
from rudra.job.job import Job
from rudra.prepare.cut import choose_cut, with_cut

SLOW = {"bandwidth_bytes_per_s": 1.25e8, "costs": "defaults"}


def small() -> nn.Module:
    """Its parameters are at the end; after its first layer it has no buffers in front of layer 4."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 100), nn.BatchNorm1d(100), nn.Linear(100, 10))


def one_layer() -> nn.Module:
    return nn.Linear(64, 10)


def without_front() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def of_lenet(seconds: float, behind: float) -> list[dict[str, Any]]:
    """Costs of the layers of lenet on the digits: of the first ones, and of those behind the convolutions."""
    about = ((800, 5120), (0, 5120), (36200, 12800), (0, 3200), (0, 3200), (1602000, 2000), (0, 2000), (20040, 0))
    return [
        {
            "name": str(index),
            "parameters_bytes": held,
            "output_bytes": given,
            "forward_s": {8: seconds if index < 4 else behind},
            "backward_s": {8: 0.0},
        }
        for index, (held, given) in enumerate(about)
    ]


def job(model: str | Callable[[], nn.Module], rule: str, **tables: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "digits"},
        protocol={"name": "hardsync"},
        placement={"cut": rule, "rule": "synchronous"},
        **{"cluster": {"learners": 3, "threads_per_rank": 1}, **tables},
    )


@pytest.mark.parametrize(
    ("given", "cut", "why"),
    [
        (job("lenet", "ralp"), "4", "chooses '4': it sends least: 0.0882 MB each way"),
        (job("lenet", "ralp", training={"minibatch_size": 512}), None, "places no layers: activations and the front"),
        (job("mlp", "ralp"), None, r"places no layers: skewness 2\.15 is above the threshold"),
        (job(small, "ralp"), "2", "chooses '2': it sends least"),  # not behind BatchNorm, whatever that sends
        (job("lenet", "auto", simulation=SLOW | {"layers": of_lenet(1e-3, 1e-3)}), "5", "chooses '5': a step takes"),
        (job("lenet", "auto", simulation=SLOW | {"layers": of_lenet(1e-3, 1.0)}), None, "places no layers: a step"),
    ],
)
def test_what_a_rule_chooses(given: Job, cut: str | None, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert given.placement.by_rule
    found = with_cut(given, {}, 0)
    assert found == {"placement": {"cut": cut}}
    assert with_cut(given, found, 0) is found, "a rule is asked once"
    assert with_cut(given.with_(placement={"cut": "4"}), {}, 0) == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"\[placement\] cut = '{given.placement.cut}' {why}", line)


def test_times_that_no_costs_tell_are_measured() -> None:
    assert choose_cut(job("lenet", "auto", simulation=SLOW | {"bandwidth_bytes_per_s": 1e6})) in ("4", "5")


def test_ranks_tell_how_many_learners_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four ranks, three are servers; a single learner has nobody to wait for, but everything to send."""
    costs = SLOW | {"layers": of_lenet(1e-3, 5e-3), "bandwidth_bytes_per_s": 1e7}
    open_ = job("lenet", "auto", cluster={"threads_per_rank": 1}, simulation=costs)
    said = []
    for ranks in (6, 7, 20):
        with_cut(open_, {}, ranks)
        choose_cut(open_.with_(cluster={"learners": ranks - 3}))
        one, other = capsys.readouterr().err.splitlines()
        assert one == other
        said.append(one)
    assert len(set(said)) == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (job(one_layer, "ralp"), r"^\[model\] Linear cannot be cut, as torch.nn.Linear is one layer; "),
        (
            job(without_front, "auto"),
            r"^\[placement\] cut = 'auto' is not supported with this model: the front would have no .*; remove cut",
        ),
        (
            job("mlp", "auto", simulation={"layers": of_lenet(1.0, 1.0)}),
            r"^\[simulation\] layers belong to another model, which .*'auto' does not support; use rudra calibrate",
        ),
    ],
)
def test_what_no_rule_can_place(given: Job, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        choose_cut(given)
    assert "\n" not in str(caught.value)


def test_too_few_ranks_are_refused_as_without_a_rule() -> None:
    with pytest.raises(RudraError, match="2 ranks are too few for topology base"):
        with_cut(job("lenet", "ralp", cluster={}), {}, 2)


@pytest.mark.parametrize(
    ("command", "model", "said"),
    [
        ("validate", "lenet", ["ranks          6,", "layers from 4 on are with a stage server, synchronous"]),
        ("validate --syntax", "lenet", ["ranks          6,", "by rule ralp, which chooses before training; synchr"]),
        ("validate", "mlp", ["ranks          5,"]),
        ("topology", "lenet", ["stage server"]),
        ("topology -n 7", "lenet", ["stage server"]),
        ("predict", "lenet", ["\n3 "]),
    ],
)
def test_commands_say_what_is_chosen(
    command: str, model: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "digits"\n[protocol]\nname = "hardsync"\n'
        '[placement]\ncut = "ralp"\nrule = "synchronous"\n[cluster]\nthreads_per_rank = 1\n'
        '[simulation]\ncosts = "defaults"\n'
    )
    name, *options = command.split()
    learners = [] if "-n" in options else ["--learners", "3"]
    assert main([name, str(path), *options, *learners]) == 0
    out, err = capsys.readouterr()
    assert all(text in out for text in said), out
    chosen = "places no layers" if model == "mlp" else "chooses '4'"
    assert err.count(f"mine: [placement] cut = 'ralp' {chosen}") == ("--syntax" not in options)
