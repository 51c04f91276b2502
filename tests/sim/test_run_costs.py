"""Costs from a run: the costs that a simulation ran with come out of its rows, and explain what would be faster."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import rudra
from rudra.cli.main import main
from rudra.core.records import EPOCH, UPDATE
from rudra.errors import ConfigError
from rudra.explain import explain
from rudra.explain.findings import held_by_evaluation
from rudra.job.job import Job
from rudra.prepare.cost_files import load
from rudra.prepare.run_costs import COMMUNICATION_S, RunCosts, fitted
from rudra.simulation.predict import steady_rate
from rudra.simulation.whatif import FittedRun

COSTS: dict[str, Any] = {
    "compute_s": {4: 0.007, 16: 0.02, 64: 0.07},
    "jitter": 0.1,
    "latency_s": 1e-4,
    "bandwidth_bytes_per_s": 1e9,
    "message_s": 5e-5,
    "gradient_s": 3e-4,
    "update_s": 4e-4,
    "copy_s_per_byte": 1e-9,
}
WEIGHTS_BYTES = 4 * 414_760
HARDSYNC = {"protocol": {"name": "hardsync"}}


def job(*, simulation: dict[str, Any] | None = None, learners: int = 4, **tables: Any) -> Job:
    about = {"tensors": False, **COSTS, **(simulation or {})}
    table = {"model": {"name": "lenet"}, "data": {"name": "digits"}, "cluster": {"learners": learners}, **tables}
    return Job(name="run", simulation=about, **{"training": {"epochs": 4, "minibatch_size": 16}, **table})


def simulated(path: Path, job: Job) -> float:
    """Simulates a job and returns its rate."""
    with rudra.simulate(job, output=path, force=True, progress="quiet") as results:
        return steady_rate(results.updates)[1]


def costs(path: Path) -> RunCosts:
    with rudra.open_results(path) as results:
        return fitted(results)


def test_on_a_server_all_costs_of_an_exchange_come_out(tmp_path: Path) -> None:
    for tables in (HARDSYNC, {"protocol": {"name": "async"}}, {"protocol": {"name": "softsync", "n": 1}}):
        simulated(tmp_path / "run.h5", job(**tables))
        found = costs(tmp_path / "run.h5").keys
        assert found["compute_s"] == pytest.approx({16: 0.02}, rel=0.01)
        assert (found["jitter"], found["distribution"]) == (pytest.approx(0.1, rel=0.1), "uniform")
        for key in ("latency_s", "bandwidth_bytes_per_s", "message_s", "update_s", "copy_s_per_byte"):
            assert found[key] == pytest.approx(COSTS[key], rel=0.01), (tables, key)


def test_a_simulated_node_has_the_cores_that_its_job_says(tmp_path: Path) -> None:
    """Not those of this machine."""
    simulated(tmp_path / "run.h5", job(simulation={"nodes": 1, "node_slowdown": 0.05}, learners=8, **HARDSYNC))
    found = costs(tmp_path / "run.h5")
    assert found.keys["compute_s"] == pytest.approx({16: 0.02}, rel=0.02)
    assert found.known["node_slowdown"] == pytest.approx(0.05)


def test_a_correction_takes_time_and_its_cost_comes_out(tmp_path: Path) -> None:
    protocol = {"name": "async", "correction": "dc_asgd"}
    cost, seconds = {"correction_s_per_byte": 1e-9}, 1e-9 * WEIGHTS_BYTES
    rates = [simulated(tmp_path / "run.h5", job(simulation=it, protocol=protocol, learners=1)) for it in ({}, cost)]
    assert 16 / rates[1] - 16 / rates[0] == pytest.approx(seconds, rel=0.02)
    simulated(tmp_path / "run.h5", job(simulation=cost, protocol=protocol))
    found = costs(tmp_path / "run.h5")
    assert found.keys["correction_s_per_byte"] == pytest.approx(1e-9, rel=0.01)
    assert "message_s" not in found.keys


NOT_EARLY = {"bandwidth_bytes_per_s": 1e8}
EARLY = {"bandwidth_bytes_per_s": 3e7}


@pytest.mark.parametrize("network", [EARLY, NOT_EARLY])
def test_a_forward_pass_that_began_early_counts_as_computing(tmp_path: Path, network: dict[str, float]) -> None:
    about = {"simulation": network, "learners": 2, "protocol": {"name": "hardsync"}}
    path = tmp_path / "run.h5"
    simulated(path, job(topology={"name": "groups"}, **about))
    with rudra.open_results(path) as results:
        shown_s = results.minibatches["compute_s"][20:].mean()
    assert shown_s == pytest.approx(0.02 if network is NOT_EARLY else 0.02 * 2 / 3, rel=0.01)
    assert costs(path).keys["compute_s"] == pytest.approx({16: 0.02}, rel=0.01)
    run = FittedRun.read(path)
    per_s = simulated(tmp_path / "other.h5", job(**about))
    assert run.predict(run.written(["topology.name=base"])).samples_per_s == pytest.approx(per_s, rel=0.05)
    assert "A forward pass that began before the end" in "\n".join(explain(path).lines)


def as_measured(path: Path, **attributes: Any) -> None:
    """Lets a simulated run pass for a run on ranks of one node, so that its job tells no costs."""
    with h5py.File(path, "r+") as file:
        file.attrs.update({"driver": "mpi", "hosts": ["here"] * len(file["roles"]), **attributes})


def test_a_changed_run_shares_the_cores_of_its_node(tmp_path: Path) -> None:
    """Two learners fill two cores, so communication in parallel with computing gains less than its time."""
    here = {"nodes": 1, "servers_on_first_node": True, "local_latency_s": 3e-3, "compute_s": 5e-3}
    about = {"simulation": {**here, "update_s": 1.5e-3, "gradient_s": 0.0, "message_s": 0.0, "copy_s_per_byte": 0.0}}
    about |= {"learners": 2, "protocol": {"name": "softsync", "n": 1}}
    per_s = simulated(tmp_path / "run.h5", job(**about))
    as_measured(tmp_path / "run.h5", cores_per_node=2)
    run = FittedRun.read(tmp_path / "run.h5")
    about["simulation"] |= {"cores_per_node": 2, "communication_s": COMMUNICATION_S}
    better = simulated(tmp_path / "other.h5", job(topology={"name": "adv*"}, **about))
    # Computing takes 5 ms, an update for two gradients 1.5 ms of a core, threads 0.4 ms each, two pulls and pushes 0.2.
    assert 2 * 16 / better == pytest.approx(5e-3 + (1.5e-3 + 2 * COMMUNICATION_S + 4 * 1.7e-3) / 2, rel=0.05)
    gain = run.predict(run.written(["topology.name=adv*"])).samples_per_s / per_s
    assert gain == pytest.approx(better / per_s, rel=0.05)


def test_what_exchanges_take_beyond_the_shortest_ones_is_the_servers(tmp_path: Path) -> None:
    """A change that needs no server does not pay for it."""
    about = {"learners": 2, "protocol": {"name": "hardsync"}}
    here = {"nodes": 1, "servers_on_first_node": True, "gradient_s": 0.0}
    path = tmp_path / "run.h5"
    per_s = simulated(path, job(simulation={**here, "latency_jitter_s": 5e-3}, **about))
    as_measured(path)
    run = FittedRun.read(path)
    assert run.message_s is not None
    assert run.message_s > 5e-4
    assert run.ratio == pytest.approx(1.0, abs=0.05)
    better = simulated(tmp_path / "other.h5", job(simulation=here, topology={"name": "groups"}, **about))
    gain = run.predict(run.written(["topology.name=groups"])).samples_per_s / per_s
    assert gain == pytest.approx(better / per_s, rel=0.08)
    assert run.written(["simulation.message_s=0.5"]).simulation.message_s == 0.5  # the user's key


def test_a_run_with_fewer_learners_than_the_number_of_a_slow_one_is_predicted(tmp_path: Path) -> None:
    simulated(tmp_path / "run.h5", job(simulation={"slowdown": {3: 3.0}, "learner_jitter": {3: 0.3}}, **HARDSYNC))
    run = FittedRun.read(tmp_path / "run.h5")
    assert run.costs.slow == pytest.approx({3: 3.0}, rel=0.03)
    assert run.predict(run.written(["cluster.learners=2"])).epoch_s < run.epoch_s


@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 2}])
def test_in_groups_the_bandwidth_comes_out(tmp_path: Path, options: dict[str, int]) -> None:
    protocol = {"name": "hardsync" if options["groups"] == 1 else "async"}
    simulated(tmp_path / "run.h5", job(protocol=protocol, topology={"name": "groups", "options": options}))
    found = costs(tmp_path / "run.h5").keys
    assert found["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=0.01)
    assert found["latency_s"] == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(
    "table",
    [
        {"distribution": "lognormal", "jitter": 0.4},
        {"distribution": "exponential", "jitter": 0.5},
        {"distribution": "memoryless"},
        {"straggler_probability": 0.02, "straggler_factor": 8.0},
    ],
)
def test_the_distribution_of_times_comes_out(tmp_path: Path, table: dict[str, Any]) -> None:
    simulated(tmp_path / "run.h5", job(simulation=table, protocol={"name": "async"}, training={"epochs": 12}))
    found = costs(tmp_path / "run.h5").keys
    assert found["distribution"] == table.get("distribution", "uniform")
    if "jitter" in table:
        assert found["jitter"] == pytest.approx(table["jitter"], rel=0.15)
    if "straggler_factor" in table:
        assert found["straggler_probability"] == pytest.approx(0.02, rel=0.5)
        assert found["straggler_factor"] == pytest.approx(8.0, rel=0.1)


def test_a_slow_learner_is_named_and_the_gain_of_shares_is_what_a_run_gains(tmp_path: Path) -> None:
    slow = {"slowdown": {3: 3.0}}
    rate = simulated(tmp_path / "run.h5", job(simulation=slow, **HARDSYNC))
    better = simulated(
        tmp_path / "auto.h5",
        job(simulation=slow, **HARDSYNC).with_(cluster={"shares": "auto"}),
    )
    found = explain(tmp_path / "run.h5")
    text = "\n".join(found.lines)
    assert re.search(r"Learner 3 \(rank 5, node 3\) needs (2\.9|3\.0)\d times as long", text)
    assert "learner 3 in 100% of the steps" in text
    assert "If no learner were slow, it would take 0.6" in text
    (shares,) = (each for each in found.alternatives if each.overrides == ("cluster.shares=auto",))
    assert shares.gain == pytest.approx(better / rate - 1, rel=0.2)
    assert [each.gain for each in found.alternatives] == sorted(
        (each.gain for each in found.alternatives), reverse=True
    )


def test_another_setting_is_predicted_within_five_percent(tmp_path: Path) -> None:
    simulated(tmp_path / "run.h5", job(protocol={"name": "softsync", "n": 1}))
    run = FittedRun.read(tmp_path / "run.h5")
    for overrides, other in (
        (["protocol.name=hardsync", "protocol.n="], job(**HARDSYNC)),
        (["cluster.learners=8"], job(learners=8, protocol={"name": "softsync", "n": 1})),
        (["training.minibatch_size=64"], job(training={"epochs": 12, "minibatch_size": 64}, protocol={"n": 1})),
    ):
        per_s = simulated(tmp_path / "other.h5", other)
        assert run.predict(run.written(overrides)).samples_per_s == pytest.approx(per_s, rel=0.05), overrides


def test_where_nothing_helps_the_explanation_says_so(tmp_path: Path) -> None:
    proportional = {"compute_s": {8: 0.01, 32: 0.04}, "nodes": 1, "node_slowdown": 1.0, "jitter": 0.0}
    nothing = {
        "copy_s_per_byte": 0.0,
        "latency_s": 0.0,
        "message_s": 0.0,
        "update_s": 0.0,
        "gradient_s": 0.0,
        "bandwidth_bytes_per_s": 1e12,
    }
    simulated(tmp_path / "run.h5", job(simulation=proportional | nothing, protocol={"name": "async"}))
    found = explain(tmp_path / "run.h5")
    assert found.lines[-1] == "No change that was tried would make it faster by more than 5 %."
    assert not found.rows()


def test_costs_of_a_run_serve_another_job_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.h5"
    simulated(path, job(**HARDSYNC))
    other = Job.load("digits", [f"simulation.costs={path}", "cluster.learners=8", "simulation.update_s=0.5"])
    table = load(other).simulation
    assert table.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert table.update_s == 0.5  # the job's own key
    with pytest.raises(ConfigError, match=r"the run has model.name = lenet, not mlp; use a run of this model"):
        load(Job.load("digits", [f"simulation.costs={path}", "model.name=mlp"]))
    assert main(["predict", str(path), "--learners", "2,4", "--set", "topology.name=groups"]) == 0
    assert "s per epoch of the run itself" in capsys.readouterr().out


def test_a_rate_that_ignores_staleness_is_told(tmp_path: Path) -> None:
    simulated(tmp_path / "run.h5", job(protocol={"name": "async", "modulation": "none"}))
    text = "\n".join(explain(tmp_path / "run.h5").lines)
    assert "Theory says 3.00: as expected." in text
    assert re.search(r"That is (2\.9|3) times α0/⟨σ⟩, which is too high in theory", text)
    assert "No learner waits for another one." in text


def test_evaluations_hold_training_back_where_updates_slow_down() -> None:
    updates = np.zeros(90, UPDATE)
    updates["time_s"] = [*np.arange(0, 4, 0.1), *np.arange(4, 6, 0.2), *np.arange(6, 10, 0.1)]
    updates["samples"] = 8
    epochs = np.zeros(1, EPOCH)
    epochs["evaluation_began_s"], epochs["evaluation_s"] = 4.0, 2.0
    assert held_by_evaluation(SimpleNamespace(epochs=epochs, updates=updates)) == pytest.approx(0.1, abs=0.01)


def test_too_few_rows_are_refused_with_the_number_that_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.h5"
    simulated(path, job(training={"epochs": 1, "minibatch_size": 64}))
    with pytest.raises(ConfigError, match=r"learner \d has \d mini-batches after the first 5; costs need 20 of each"):
        costs(path)
    assert main(["predict", str(path)]) == 2
    assert "costs need 20 of each learner: use a longer run" in capsys.readouterr().err
    lines = explain(path).lines
    assert lines[-1].startswith("No predictions: [simulation] costs = ")


BANK_S = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.030, 16: 0.07}


def of_banks(**cluster: Any) -> Job:
    """Learners of one device, of whom 16 take longer than their advantage."""
    about = {"jitter": 0.02, "bank_s": BANK_S, "update_s": 1e-4}
    cluster = {"learners_per_device": "auto", "learners": 16, **cluster}
    training = {"epochs": 20, "minibatch_size": 4}
    return job(simulation=about, protocol={"name": "sma"}, cluster=cluster, training=training, data={"name": "digits"})


def test_the_times_of_all_sizes_come_out_of_a_bank_that_grew(tmp_path: Path) -> None:
    """Most of its learners never computed, or only for a while."""
    path = tmp_path / "run.h5"
    simulated(path, of_banks())
    found = costs(path)
    expected = {m: {4: pytest.approx(BANK_S[m], rel=0.03)} for m in (1, 2, 4, 8)}
    assert {m: seconds for m, seconds in found.keys["bank_s"].items() if m in BANK_S} == expected
    assert found.keys["compute_s"] == pytest.approx({4: 0.010}, rel=0.02)
    assert not found.slow
    assert found.as_text().startswith(f"from {found.minibatches:,} mini-batches of the run: compute times, banks, ")
    run = FittedRun.read(path)
    assert run.ratio == pytest.approx(1.0, abs=0.03), "after the last change"
    assert "times as long for a sample" not in "\n".join(explain(path).lines), "they compute together"
    fixed = of_banks(learners_per_device=2, learners=2)
    per_s = simulated(tmp_path / "two.h5", fixed)
    two = ["cluster.learners_per_device=2", "cluster.learners=2", "cluster.most_learners_per_device=", "changes=[]"]
    assert run.predict(run.written(two)).samples_per_s == pytest.approx(per_s, rel=0.05)


def test_a_calibration_says_how_long_other_banks_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to the bank of the run, which takes twice as long here."""
    calibrated = {1: {1: 0.0025, 4: 0.005}, 4: {1: 0.005, 4: 0.006}}
    path, table = tmp_path / "run.h5", tmp_path / "measured.toml"
    models = {"bank_s": calibrated, "compute_s": calibrated[1]}
    table.write_text("\n".join(["[models.lenet]", *(f"{key} = {_toml(of)}" for key, of in models.items())]))
    monkeypatch.setattr("rudra.prepare.cost_files.measured_path", lambda job: table)
    simulated(path, of_banks(learners_per_device=4, learners=4))
    as_measured(path)
    found = load(Job(model={"name": "lenet"}, data={"name": "digits"}, simulation={"costs": str(path)})).simulation
    for m, sizes in calibrated.items():
        assert found.bank_s[m] == pytest.approx({of: 2 * seconds for of, seconds in sizes.items()}, rel=0.03)
    assert found.compute_s == pytest.approx({1: 0.005, 4: 0.010}, rel=0.03)


def _toml(table: Any) -> str:
    if not isinstance(table, dict):
        return repr(table)
    return f"{{ {', '.join(f'{key} = {_toml(of)}' for key, of in table.items())} }}"


def test_a_run_with_few_updates_of_each_bank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    simulated(
        path, of_banks(learners_per_device=4, learners=4).with_(data={"train_limit": 12 * 16}, training={"epochs": 1})
    )
    with pytest.raises(ConfigError, match=re.escape(f"costs = '{path}': costs need 20 updates of a bank")):
        costs(path)
