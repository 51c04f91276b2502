"""What a report shows of unlike workers, against rows made by hand and against a run in virtual time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rudra
from rudra.job.job import Job
from tests.unit.report_files import without_layout

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
pytest.importorskip("jinja2", reason="Jinja is not installed: pip install 'rudra[plot]'")

from rudra.report import report
from rudra.report.runs import read
from rudra.report.worker_figures import normalised
from rudra.report.workers import Workers, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = {"kind": "small", "threads": 4, "min": 1, "max": 16, "compute_s": {1: 0.04, 16: 0.16}}
LARGE = {"kind": "large", "min": 32, "max": 256, "compute_s": {32: 0.064, 64: 0.096, 128: 0.16, 256: 0.288}}
"""As (b + 32) / 1000: a batch of 32 leaves half of the device idle, when compared with an endless one."""


def made(loss: list[float], **more: object) -> Workers:
    """A large worker that computes ten batches of 100 samples, each a tenth of an epoch and of a second."""
    about = {
        "rule": "fixed",
        "kinds": ("large",),
        "threads": (1,),
        "samples_of_epoch": 1000,
        "end_s": 1.0,
        "updates": (10,),
        "worker": np.zeros(10, np.int64),
        "began_s": np.arange(10) / 10,
        "took_s": np.full(10, 0.1),
        "samples": np.full(10, 100),
        "loss": np.array(loss),
    }
    return Workers(**(about | more))  # type: ignore[arg-type]


def test_losses_are_means_over_the_samples_of_a_window() -> None:
    uneven = made([8.0, 4.0] + [2.0] * 8, samples=np.array([100, 300] + [75] * 8), samples_of_epoch=1000)
    time_s, epochs, loss = uneven.losses(40)
    assert loss.tolist() == [8.0, 4.0] + [2.0] * 8, "each is more than a 40th of an epoch, and of the time"
    assert time_s.tolist() == pytest.approx(np.arange(10) / 10)
    assert epochs[:2].tolist() == pytest.approx([0.05, 0.25])
    fine = made(list(range(100)), worker=np.zeros(100, np.int64), began_s=np.arange(100) / 100)
    fine = fine._replace(took_s=np.full(100, 0.01), samples=np.full(100, 10), loss=np.arange(100.0))
    windows = fine.losses(40)[2]
    assert 34 <= len(windows) <= 41
    assert (np.diff(windows) > 0).all()
    assert windows[-1] > 97


def test_losses_are_normalised_by_the_least_in_the_time_that_all_took() -> None:
    short, long = made([4.0] + [2.0] * 9), made([4.0, 3.0] + [2.5] * 4 + [0.5] * 4, end_s=3.0)
    long = long._replace(began_s=np.arange(10) * 0.3, took_s=np.full(10, 0.3))
    one, other = normalised([short, long])
    assert one.normalised.tolist() == [0.0] + [1.0] * 9
    assert other.normalised[:3].tolist() == [0.0, 0.5, 0.75]
    assert other.normalised[-1] == 1.75, "later than the other ended"
    assert one.reached_s == pytest.approx(0.1)
    assert other.reached_s is None, "not before the other ended"
    assert [len(course.loss) for course in normalised([made([1.0] * 10)])] == [0]
    assert [len(course.loss) for course in normalised([made([np.nan] * 10)])] == [0]


def test_a_loss_that_falls_is_a_mean_over_as_few_gradients_as_it_needs() -> None:
    noisy = made([4.0, 3.0, 1.5, 2.5, 2.0, 2.0, 1.0, 1.4, 0.8, 1.2], samples=np.array([100] * 9 + [300]))
    noisy = noisy._replace(samples_of_epoch=10_000)
    since_s, loss = noisy.falling()
    assert since_s.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.6, 0.8])
    assert loss.tolist() == pytest.approx([4.0, 3.0, 2.0, 1.2, (0.8 + 3 * 1.2) / 4])
    assert noisy._replace(samples_of_epoch=17_000).falling()[0].tolist() == [0.0, 0.1, 0.2, 0.6], "too few at the end"
    assert made([1.0, 2.0] * 5).falling()[1].tolist() == [1.5], "nothing fell"


def test_a_large_worker_is_used_as_far_as_its_batches_let_it() -> None:
    """Half of the samples a second of its largest batch, half of the time: a quarter, whenever that is."""
    samples, took_s = np.array([100] * 5 + [50] * 5), np.array([0.05] * 5 + [0.1] * 5)
    large = made([1.0] * 10, samples=samples, took_s=took_s, end_s=2.0)
    middles, used = large.utilisation(0)
    assert used.mean() == pytest.approx(100 * (5 * 0.05 + 5 * 0.1 * 0.25) / 2.0)
    assert used[middles < 0.5].mean() == pytest.approx(50)
    assert used[(middles > 0.5) & (middles < 1.0)].mean() == pytest.approx(25)
    assert not used[middles > 1.1].any()
    small = large._replace(kinds=("small",))
    assert small.used("small") == pytest.approx(100 * (5 * 0.05 + 5 * 0.1) / 2.0), "its threads are all at work"
    assert small.used("large") is None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("workers")
    common = {
        "model": {"name": "mlp", "options": {"hidden": [16]}},
        "data": {"train_limit": 512, "test_limit": 64},
        "training": {"epochs": 2, "seed": 1},
        "optimizer": {"learning_rate": 0.1},
        "simulation": {"jitter": 0.0, "latency_s": 0.0, "message_s": 0.0, "update_s": 0.0},
    }
    made = []
    for name, rule, team in [
        ("small", "fixed", [SMALL]),
        ("large", "fixed", [LARGE]),
        ("fixed", "fixed", [SMALL, LARGE]),
        ("adaptive", "adaptive", [SMALL, LARGE]),
    ]:
        tables = [{**table, "learners": [i]} for i, table in enumerate(team)]
        hogbatch = {"rule": rule, "lr_scaling": "none", "workers": tables}
        cluster = {"learners": len(team)}
        job = Job(**common, protocol={"name": "hogbatch"}, hogbatch=hogbatch, cluster=cluster, name=name)
        made.append(place / f"{name}.h5")
        rudra.simulate(job, output=made[-1]).close()
    return made


def test_threads_that_compute_together_are_busy_for_as_long_as_they_are(tmp_path: Path) -> None:
    """Not all in the moment in which the last one ends."""
    job = Job(
        model={"name": "mlp", "options": {"hidden": [16]}},
        data={"train_limit": 512},
        training={"epochs": 1, "evaluate": False},
        protocol={"name": "hogbatch"},
        cluster={"learners": 1},
        hogbatch={"workers": [SMALL], "weights": "shared"},
        simulation={"jitter": 0.0, "latency_s": 0.0, "message_s": 0.0, "update_s": 0.0},
    )
    with rudra.simulate(job, output=tmp_path / "window.h5") as results:
        workers = workers_of(results)
    assert workers.utilisation(0)[1] == pytest.approx(100, abs=5)


@pytest.mark.parametrize(
    ("hogbatch", "expected"),
    [({}, 2.5), ({"weights": "shared", "locking": True}, 1), ({"weights": "shared"}, 4)],
    ids=["server", "locked window", "racing window"],
)
def test_the_staleness_to_expect_is_that_of_the_runs_own_protocol(
    tmp_path: Path, hogbatch: dict[str, Any], expected: float
) -> None:
    job = Job(
        model={"name": "mlp", "options": {"hidden": [4]}},
        data={"train_limit": 128},
        training={"epochs": 1, "evaluate": False},
        protocol={"name": "hogbatch"},
        cluster={"learners": 2},
        hogbatch={"workers": [{**SMALL, "learners": [0]}, {**LARGE, "learners": [1]}], **hogbatch},
    )
    rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet").close()
    assert read(tmp_path / "run.h5").expected_staleness == expected


def test_a_run_in_virtual_time_has_the_shares_batches_and_utilisation_of_its_costs(files: list[Path]) -> None:
    runs = {path.stem: read(path) for path in files}
    about = {name: run.workers for name, run in runs.items()}
    small, large, fixed = about["small"], about["large"], about["fixed"]
    assert [small.name, large.name, fixed.name] == ["small only", "large only", "fixed"]
    assert (small.share("small"), large.share("small")) == (100.0, 0.0)
    assert sum(fixed.updates) == runs["fixed"].summary["updates"]
    assert set(small.batches(0)[1]) == {4}
    assert large.batches(0)[1].max() == 256
    for alone, kind in ((small, "small"), (large, "large")):
        assert alone.used(kind) == pytest.approx(100, abs=0.5)
    adaptive = about["adaptive"]
    own = adaptive.worker == 1
    at_least = own & (adaptive.samples == 32)
    if at_least.any():  # what the law of its costs says: 32 / 0.064 against 256 / 0.288
        assert adaptive.took_s[at_least] == pytest.approx(0.064)
    for worker in (0, 1):
        assert adaptive.samples[adaptive.worker == worker].sum() > 0
    assert adaptive.samples.sum() == 2 * 512


def test_a_report_has_the_panels_of_figures_5_to_8(files: list[Path], tmp_path: Path) -> None:
    with without_layout():
        (page, *_) = report(files[2:], tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    for title in (
        "Convergence of heterogeneous workers",
        "Updates by kind of worker",
        "Utilisation of workers",
        "Batches of",
    ):
        assert title in text
    for said in ("time to 95 % of the drop in loss (s)", ">fixed<", ">adaptive<"):
        assert said in text
