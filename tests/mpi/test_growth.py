"""Banks that grow on real ranks: where they end, what a sweep says, and runs that are stopped and replayed."""

import json
import signal
from pathlib import Path
from typing import Any

import faulty_models
import numpy as np
import pytest
import runs_on_ranks
import small_models
from processes import finish, replays, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

SIZES = [1, 2, 4, 8]


def make_job(bank: str, m: int | None = None, model: type = small_models.Latent, **tables: Any) -> rudra.Job:
    """Digits and a model whose forward pass has a fixed latency, which a fused bank has once."""
    size = {"learners_per_device": "auto", "learners": SIZES[-1]} if m is None else {"learners_per_device": m}
    return rudra.Job(
        name="growth",
        model={"name": model},
        data={"name": "digits", "train_limit": 720},
        training={
            "epochs": {"fused": 6, "loop": 2}[bank] if m is None else 1,
            "minibatch_size": 4,
            "seed": 3,
            "evaluate": False,
        },
        optimizer={"learning_rate": 0.1},
        protocol={"name": "sma"},
        cluster={"learners": m, "threads_per_rank": 1, "bank": bank, **size},
        results={"report_s": 0.05},
        **tables,
    )


def told(results: rudra.Results, kind: bytes) -> list[dict[str, Any]]:
    return [json.loads(row["text"]) for row in results.events if row["kind"] == kind]


def images_per_s(path: Path) -> float:
    """Returns the median throughput of a run with a fixed size."""
    with rudra.open_results(path) as results:
        updates = results.updates[3:]
        return float(np.median(updates["samples"][:-1] / np.diff(updates["time_s"])))


@CAMPAIGN  # it compares times
def test_growth_ends_where_a_sweep_in_the_same_sitting_does(tmp_path: Path) -> None:
    jobs = {f"{bank}.h5": make_job(bank) for bank in ("fused", "loop")}
    jobs |= {f"{m}.h5": make_job("fused", m) for m in SIZES}
    on_ranks(runs_on_ranks.train_as_needed, 1, jobs={str(tmp_path / name): job for name, job in jobs.items()})
    sweep = {m: images_per_s(tmp_path / f"{m}.h5") for m in SIZES}
    for bank in ("fused", "loop"):
        path = tmp_path / f"{bank}.h5"
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            updates, losses = results.updates, results.epochs["train_loss"]
            measured = [found["learners_per_device"] for found in told(results, b"measured")]
            assert measured[:2] == [1, 2]
            assert len(measured) <= 9
            last = int(updates["gradients"][-1])
            assert np.all(np.diff(losses) < 0.1 * losses[0]), "the loss continues through each change"
        assert (
            last == 1 if bank == "loop" else np.interp(last, SIZES, list(sweep.values())) >= 0.8 * max(sweep.values())
        )
        assert replays(path)


def test_banks_give_back_the_learners_that_memory_does_not_hold(tmp_path: Path) -> None:
    path, two_banks = tmp_path / "out.h5", {"learners": 8, "most_learners_per_device": 4}
    job = make_job("fused", model=faulty_models.Cramped).with_(
        training={"epochs": 1}, cluster=two_banks, data={"train_limit": 320}, results={"minibatches": False}
    )
    on_ranks(runs_on_ranks.train_as_needed, 1, jobs={str(path): job})
    with rudra.open_results(path) as results:
        assert results.status == "finished"
        measured = [(each["learners_per_device"], bool(each["images_per_s"])) for each in told(results, b"measured")]
        assert measured == [(1, True), (2, False)]
        assert set(results.updates["gradients"]) == {2}
        (memory,) = results.events[results.events["kind"] == b"memory"]
        assert memory["text"].endswith(b"Tried to allocate 2.00 GiB; from now on learners of each device: 1")
        changed = results.events["timestamp"][results.events["kind"] == b"decided"]
        assert 0 < changed[0] == changed[-1] < len(results.updates), "no update of two learners each was made"
    assert replays(path)


def test_a_run_that_is_stopped_while_its_bank_grows_continues_to_grow(tmp_path: Path) -> None:
    path, output = tmp_path / "job.toml", tmp_path / "out.h5"
    path.write_text(
        '[model]\nname = "small_models:Latent"\n[data]\nname = "digits"\ntrain_limit = 720\n'
        "[training]\nepochs = 6\nminibatch_size = 4\n"
        'evaluate = false\n[protocol]\nname = "sma"\n[cluster]\nlearners_per_device = "auto"\nbank = "fused"\n'
        "learners = 8\nthreads_per_rank = 1\n[results]\nflush_s = 0.1\nreport_s = 0.02\n"
    )
    process = start("run", path, "--output", output)
    wait_for_updates(process, output, 60)  # the second size is under way, or measured
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 3, err
    with rudra.open_results(output) as results:
        before = told(results, b"measured")
        assert before[0]["learners_per_device"] == 1
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        found = told(results, b"measured")
        sizes = [each["learners_per_device"] for each in found]
        assert found[: len(before)] == before
        assert len({*sizes}) == len(sizes), "nothing is measured twice"
        assert results.updates["gradients"][-1] > 1
    assert replays(output)
