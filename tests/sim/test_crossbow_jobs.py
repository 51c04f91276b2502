"""Speed of the banks in the jobs of CROSSBOW's figures 12 to 14, against the paper's text. Only times are simulated."""

from pathlib import Path

import pytest

import rudra
from rudra.job.job import Job
from rudra.studies import sweep

TIMES_ONLY = {
    "model": {"name": "mlp"},
    "data": {"name": "digits", "path": None},
    "training": {"epochs": 12, "target": None},
    "simulation": {"tensors": False},
    "results": {"checkpoint_every": "never"},
}


def jobs(figure: str) -> dict[tuple[int, int | str, str], Job]:
    """GPUs, learners on each, and rule of growth -> job of a figure."""
    points = (point.job for point in sweep.plan(f"crossbow/{figure}").points)
    return {
        (int(str(job.simulation.nodes)), job.cluster.learners_per_device, job.cluster.growth): job.with_(**TIMES_ONLY)
        for job in points
        if job.protocol.name == "sma" and job.training.minibatch_size == 16 and job.cluster.learners_per_device
    }


def rate(job: Job, path: Path) -> tuple[float, dict[int, float]]:
    """Images/s of a run, and those that its tuner measured."""
    with rudra.simulate(job, output=path, force=True, progress="quiet") as results:
        summary = results.summary()
        return summary["samples_per_s"], summary["bank_sizes"]


@pytest.mark.parametrize("figure", ["figure12", "figure14"])
def test_images_per_second_rise_up_to_four_learners_on_a_gpu(figure: str, tmp_path: Path) -> None:
    found = jobs(figure)
    rates = [rate(found[1, m, "double"], tmp_path / "run.h5")[0] for m in (1, 2, 3, 4, 8)]
    assert rates[:4] == sorted(rates[:4])
    assert rates[3] == pytest.approx(1.4 * rates[0], rel=0.02), "§5.4; the table was fitted to it"
    assert rates[4] < 0.97 * rates[3]


@pytest.mark.parametrize("figure", ["figure13", "figure14"])
def test_two_learners_on_each_of_eight_gpus_gain_as_much_as_in_the_paper(figure: str, tmp_path: Path) -> None:
    """No constant was fitted to it."""
    found = jobs(figure)
    one, two = (rate(found[8, m, "double"], tmp_path / "run.h5")[0] for m in (1, 2))
    assert two / one == pytest.approx(1.3, abs=0.05)


def test_the_tuner_of_the_paper_finds_its_number_of_learners(tmp_path: Path) -> None:
    """Algorithm 2 looks at one learner more than it keeps."""
    found = jobs("figure14")
    speed, measured = rate(found[1, "auto", "one"], tmp_path / "run.h5")
    assert [*measured] == [1, 2, 3, 4, 5]
    assert speed > 0.95 * rate(found[1, 4, "double"], tmp_path / "run.h5")[0]
    _, measured = rate(found[1, "auto", "double"], tmp_path / "run.h5")
    assert [*measured] == [1, 2], "each of the learners adds 12 %, so twice as many are too few for this rule"
