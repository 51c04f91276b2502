"""Predictions against what can be worked out by hand, and how they are shown."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rudra
from rudra.cli.main import main
from rudra.core.records import UPDATE
from rudra.core.wire import tail_bytes, tensor_bytes
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.predict import Outline, as_text, outline, predict, steady_rate

SAMPLES = 10_000
SIZE = 1_000_000  # bytes
KNOWN = Outline(SAMPLES, SIZE)
COSTS = {
    "compute_s": 0.01,
    "jitter": 0.0,
    "latency_s": 1e-5,
    "bandwidth_bytes_per_s": 1e9,
    "message_s": 2e-4,
    "gradient_s": 1e-4,
    "update_s": 5e-4,
}
TRANSFER_S = SIZE / 1e9


def job(protocol: str = "async", learners: int = 1, **costs: Any) -> Job:
    return Job(
        protocol={"name": protocol},
        training={"minibatch_size": 10},
        cluster={"learners": learners},
        simulation={**COSTS, **costs},
    )


def test_one_learner_takes_the_sum_of_all_parts() -> None:
    found = predict(job().with_(cluster={"buckets": "off"}), known=KNOWN)
    step_s = 0.01 + 2 * TRANSFER_S + 2e-4 + 5e-4 + 2 * 1e-5
    assert found.epoch_s == pytest.approx(SAMPLES / 10 * step_s, rel=1e-3)
    assert found.samples_per_s == pytest.approx(10 / step_s, rel=1e-3)
    assert (found.bound, found.max_staleness) == ("compute", 0)
    assert found.bound_s == pytest.approx(SAMPLES / 10 * 0.01, rel=1e-3)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["compute"] == pytest.approx(0.01 / step_s, rel=1e-3)
    assert found.shares["push"] == pytest.approx((TRANSFER_S + 1e-5) / step_s, rel=1e-2)
    assert predict(job(), known=KNOWN).epoch_s == found.epoch_s, "too small for buckets on this network"
    in_buckets = predict(job().with_(cluster={"buckets": 0.5}), known=KNOWN)
    assert in_buckets.epoch_s == pytest.approx(SAMPLES / 10 * (step_s - TRANSFER_S / 2), rel=1e-3), "a half"


@pytest.mark.parametrize(
    ("learners", "costs", "bound", "seconds_per_gradient"),
    [
        (4, {}, "compute", 0.01 / 4),
        (100, {"bandwidth_bytes_per_s": 1e11}, "server", 7e-4),
        (100, {"message_s": 0.0, "update_s": 1e-5}, "link", TRANSFER_S),
    ],
)
def test_what_is_scarce_bounds_the_rate(
    learners: int, costs: dict[str, float], bound: str, seconds_per_gradient: float
) -> None:
    found = predict(job(learners=learners, **costs), known=KNOWN)
    assert found.bound == bound
    assert found.bound_s == pytest.approx(SAMPLES / 10 * seconds_per_gradient, rel=0.02)
    assert found.bound_s <= found.epoch_s * 1.01
    if bound != "compute":
        assert found.epoch_s == pytest.approx(found.bound_s, rel=0.05)
        assert found.loads[bound] > 0.95


def test_costs_for_each_byte_are_those_of_the_whole_vector() -> None:
    size = tensor_bytes(SIZE)
    whole = predict(job("softsync", 4), known=KNOWN)
    seconds = {"gradient_s_per_byte": 1e-4 / size, "update_s_per_byte": 5e-4 / size}
    per_byte = job("softsync", 4, gradient_s=0.0, update_s=1e-4, **seconds)
    half = Outline(SAMPLES, SIZE - size // 2)
    assert predict(per_byte, known=KNOWN).epoch_s == pytest.approx(whole.epoch_s)
    assert predict(per_byte, known=half).loads["server"] < 0.8 * predict(job("softsync", 4), known=half).loads["server"]


def test_a_server_that_copies_its_weights_keeps_its_learners_waiting(tmp_path: Path) -> None:
    """For the tests of all epochs but the last, whose weights change no more."""
    times = []
    for per_byte in (0.0, 1e-6):
        asked = job(tensors=False, copy_s_per_byte=per_byte).with_(
            data={"train_limit": 100}, training={"epochs": 3}, model={"name": "mlp"}
        )
        with rudra.simulate(asked, output=tmp_path / f"{per_byte}.h5", progress="quiet") as results:
            times.append(results.totals["time_s"][0])
            copied = 4 * results.layout[-1].offset + 4 * results.layout[-1].size
    assert times[1] - times[0] == pytest.approx(2 * 1e-6 * copied)


@pytest.mark.parametrize(
    ("minibatch_size", "shares", "guessed"),
    [
        (4, (), ""),
        (10, (), "compute_s of mini-batches of 10 is interpolated between 4 and 16"),
        (32, (), "compute_s of mini-batches of 32 is extrapolated from 4 and 16"),
        (10, (1.0, 4.0), ""),  # 4 and 16 of 20
        (10, (1.0, 1.5), "compute_s of mini-batches of 8, 12 is interpolated between 4 and 16"),
    ],
)
def test_what_nobody_has_measured_is_said(
    minibatch_size: int, shares: tuple[float, ...], guessed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"training.minibatch_size={minibatch_size}", f"cluster.shares={list(shares)}", "cluster.learners=2"]
    settings += ["protocol.name=hardsync", "simulation.compute_s={4=0.004, 16=0.016}", "training.epochs=1"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["predict", "digits", *arguments, "--updates", "20"]) == 0
    assert capsys.readouterr().out.count(guessed or "of mini-batches of") == bool(guessed)
    output = str(tmp_path / "run.h5")
    assert main(["simulate", "digits", *arguments, "--set", "simulation.tensors=false", "--output", output]) == 0
    assert capsys.readouterr().err.count(f"rudra: digits: {guessed}\n" if guessed else "of mini-batches of") == bool(
        guessed
    )


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_few_updates_tell_what_many_would(protocol: str) -> None:
    short = predict(job(protocol, 8, jitter=0.2), known=KNOWN)
    long = predict(job(protocol, 8, jitter=0.2), known=KNOWN, updates=4 * short.updates)
    assert short.epoch_s == pytest.approx(long.epoch_s, rel=0.01)
    assert short.mean_staleness == pytest.approx(long.mean_staleness, abs=0.05)


def test_an_epoch_is_as_long_as_one_says() -> None:
    whole, half = predict(job(), known=KNOWN), predict(job(), known=KNOWN, samples=SAMPLES // 2)
    assert whole.epoch_s == pytest.approx(2 * half.epoch_s)
    assert whole.bound_s == pytest.approx(2 * half.bound_s)


def test_rare_stragglers_are_met() -> None:
    """Hardsync waits for the one in 8 x 1/1000 that takes 100 times as long."""
    calm = predict(job("hardsync", 8), known=KNOWN)
    troubled = predict(job("hardsync", 8, straggler_probability=1e-3, straggler_factor=100.0), known=KNOWN)
    expected = calm.epoch_s + SAMPLES / 80 * (8e-3 * 0.99)
    assert troubled.epoch_s == pytest.approx(expected, rel=0.15)


def test_a_known_model_and_data_set_need_no_file() -> None:
    cifar10 = Job(model={"name": "cifar10_full"}, data={"name": "cifar10", "train_limit": 20_000}).resolved()
    samples, size, placed, buffers = outline(cifar10)
    assert samples == 20_000
    assert size == 4 * 89_578 + tail_bytes(1)
    assert placed is None
    assert buffers == 0


def test_too_few_updates_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 updates give no rate"):
        predict(job(), known=KNOWN, updates=1)


def test_the_command_shows_a_row_for_each_number_of_learners(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "rudra/table2", "--learners", "1,2,30", "--updates", "20", "--samples", "50000"]
    assert main(arguments) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("table2: 1-softsync, μ = ")
    assert title.endswith("costs: p775")
    assert head.split()[:3] == ["λ", "s/epoch", "speed-up"]
    assert [row.split()[0] for row in rows[:3]] == ["1", "2", "30"]
    times = [float(row.split()[1]) for row in rows[:3]]
    assert times == sorted(times, reverse=True)
    assert main([*arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["learners"] for line in lines] == [1, 2, 30]
    assert [line["epoch_s"] for line in lines] == pytest.approx(times, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--learners", "1,x"], "--learners 1,x: must be whole numbers >= 1 between commas, such as 1,2,4"),
        (["--learners", "0"], "--learners 0: must be whole numbers"),
        (
            ["--set", "simulation.costs=p776"],
            "neither a file nor a preset; use a file or one of crossbow, p775, ralp, wan",
        ),
        (["--learners", "2,4", "--set", "protocol.n=3"], "n"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "digits", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rudra: ")
    assert text in said
    assert said.count("\n") == 1


def test_nothing_is_read_that_need_not_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert main(["predict", "rudra/table2", "--set", f"data.path={missing}", "--updates", "20"]) == 0


def test_four_servers_behind_slow_links_take_three_times_the_pushes_of_one() -> None:
    """The model is large, and learners compute faster than one server's link of 10 Gbit/s can bring gradients."""
    rates = {}
    for shards in (1, 4):
        sharded = Job(
            training={"minibatch_size": 1},
            protocol={"name": "async"},
            topology={"name": "sharded", "options": {"shards": shards}},
            cluster={"learners": 16},
            simulation={
                **COSTS,
                "compute_s": 0.1,
                "bandwidth_bytes_per_s": 1.25e9,
                "update_s": 0.072,
                "gradient_s": 0.0,
            },
        )
        rates[shards] = predict(sharded, updates=100, known=Outline(100, 288_000_000)).samples_per_s
    assert rates[4] > 3 * rates[1]


def test_a_prediction_is_of_a_cluster_in_which_nothing_goes_wrong() -> None:
    faults = [{"learner": 0, "dies_at_s": 1.0}, {"mean_time_to_failure_s": 1.0}]
    assert predict(job(learners=3, faults=faults), known=KNOWN).epoch_s == predict(job(learners=3), known=KNOWN).epoch_s


UNLIKE: list[dict[str, Any]] = [
    {"learners": [0], "kind": "small", "threads": 4, "min": 2, "max": 8, "compute_s": {2: 0.008, 8: 0.03}},
    {"kind": "large", "min": 50, "max": 500, "compute_s": {50: 0.02, 500: 0.05}},
]


@pytest.mark.parametrize("weights", ["server", "shared"])
@pytest.mark.parametrize("rule", ["fixed", "adaptive"])
def test_unlike_workers(tmp_path: Path, rule: str, weights: str) -> None:
    """As a simulation of so many epochs has it, without the first."""
    run = job(learners=2, jitter=0.1).with_(
        protocol={"name": "hogbatch"},
        hogbatch={"rule": rule, "workers": UNLIKE, "weights": weights},
        training={"epochs": 4},
    )
    found = predict(run, known=Outline(1442, 40_000))
    with rudra.simulate(
        run.with_(data={"name": "digits"}, model={"name": "mlp"}, simulation={"tensors": False}),
        output=tmp_path / "out.h5",
        progress="quiet",
    ) as results:
        ends, rows = results.epochs["time_s"], results.minibatches
    assert found.epoch_s == pytest.approx((ends[-1] - ends[0]) / 3, rel=0.1)
    small, large = found.workers
    mine = rows[(rows["time_s"] > ends[0]) & (rows["learner"] == 0)]
    assert small["updates_per_s"] == pytest.approx(len(mine) / (ends[-1] - ends[0]), rel=0.1)
    assert small["share"] + large["share"] == pytest.approx(1)
    assert 0.2 < large["busy_share"] <= 1.01
    assert (small["kind"], large["kind"]) == ("small", "large")
    assert "mean batch" in as_text([found])
    assert found.as_dict()["workers"][0]["worker"] == 0


def test_updates_of_unlike_workers_are_not_counted() -> None:
    with pytest.raises(ConfigError, match="--updates: under protocol hogbatch whole epochs are simulated; valid: none"):
        predict(job().with_(protocol={"name": "hogbatch"}, hogbatch={"workers": UNLIKE[:1]}), known=KNOWN, updates=20)


@pytest.mark.parametrize(("updates", "first", "rate"), [(8, 2, 4.0), (4, 1, 4.0), (3, 0, 16 / 12), (2, 0, 0.8)])
def test_the_first_quarter_of_the_updates_does_not_count(updates: int, first: int, rate: float) -> None:
    """The first update takes 10 s, and each later one 2 s."""
    rows = np.zeros(updates, UPDATE)
    rows["samples"], rows["time_s"] = 8, [0.0, *np.arange(10.0, 10 + 2 * (updates - 1), 2)]
    assert steady_rate(rows) == (first, pytest.approx(rate))


def test_the_mean_batch_of_a_worker_is_of_all_its_threads() -> None:
    workers = [
        {"learners": [0], "kind": "small", "threads": 4, "min": 2, "max": 2, "compute_s": 0.01},
        {"kind": "large", "min": 32, "max": 32, "compute_s": 0.02},
    ]
    run = Job(
        model={"name": "mlp"}, protocol={"name": "hogbatch"}, hogbatch={"workers": workers}, cluster={"learners": 2}
    )
    small, large = predict(run, known=Outline(6400, SIZE)).workers
    assert (small["mean_batch"], large["mean_batch"]) == (pytest.approx(8, rel=0.02), pytest.approx(32, rel=0.02))
