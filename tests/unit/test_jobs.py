"""Every job that comes with Rudra can be run as it stands, given its data."""

import tomllib
from pathlib import Path

import pytest
import torch

from rudra.compute import models, tasks
from rudra.compute.optim import UpdateRule
from rudra.data.load import DataInfo
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.prepare import cost_files
from rudra.prepare.points import at
from rudra.studies import sweep

ROOT = Path(__file__).parents[2]
NOISE = "rudra.data.noise:noise"
TOKENS = torch.zeros(1, 64, dtype=torch.int64)
DATA = {
    "digits": DataInfo("digits", 1437, 360, (1, 8, 8), 10),
    "idx": DataInfo("idx", 60_000, 10_000, (1, 28, 28), 10),
    "cifar10": DataInfo("cifar10", 50_000, 10_000, (3, 32, 32), 10),
    "text": DataInfo("text", 15_685, 1_742, (64,), 65, (TOKENS, TOKENS)),
    "arff": DataInfo("arff", 12_920, 3_185, (500,), 983, (torch.zeros(1, 500), torch.zeros(1, 983))),
    "libsvm": DataInfo("libsvm", 39_799, 9_950, (300,), 2),
    NOISE: DataInfo("noise", 48_000, 256, (3, 224, 224), 1000),
}
JOBS = sorted(file for file in (ROOT / "jobs").rglob("*.toml") if file.name != "paper.toml")
STUDIES = [file for file in JOBS if "[study]" in file.read_text(encoding="utf-8")]
GALLERY = [file for file in STUDIES if file.parent.name == "gallery"]


def test_every_file_is_shipped() -> None:
    assert {str(file.relative_to(ROOT / "jobs"))[: -len(".toml")]: file for file in JOBS} == shipped_jobs()
    assert {"digits", "rudra/figure5"} <= set(shipped_jobs())


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_can_be_run(file: Path) -> None:
    job = Job.load(str(file.relative_to(ROOT / "jobs").with_suffix("")))
    assert job == Job.load(file)
    assert job.name == file.stem
    job = cost_files.load(job.resolved())
    check(job)
    module = models.build(job.model, DATA[job.data.name], job.training.seed)
    task = tasks.make(job.task, DATA[job.data.name].classes)
    models.check_model_output(module, task, DATA[job.data.name])
    UpdateRule(job.optimizer, torch.zeros(100))


def check(job: Job) -> None:
    info = DATA[job.data.name]
    assert (job.data.path is None) == (job.data.name in {"digits", NOISE})
    assert job.data.name != NOISE or not job.simulation.tensors, "noise teaches nothing"
    assert job.data.path is None or not job.data.path.is_absolute(), "users keep data where they like"
    protocol = job.make_protocol()
    samples = min(job.data.train_limit or info.training_samples, info.training_samples)
    assert protocol.gradients_per_update * job.training.minibatch_size <= samples, "an epoch is at least one update"
    assert all(m < job.training.epochs for m in job.optimizer.milestones), "every milestone is reached"


@pytest.mark.slow
@pytest.mark.parametrize("file", GALLERY, ids=lambda f: f.stem)
def test_gallery_every_point_can_be_run(file: Path) -> None:
    for point in sweep.plan(file).points:
        check(point.job)


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("file", [file for file in STUDIES if file not in GALLERY], ids=lambda f: f.stem)
def test_every_point_of_a_study_can_be_run(file: Path, quick: bool) -> None:
    study = sweep.plan(file, quick=quick)
    for point in study.points:
        check(point.job)
        optimizer, epochs = point.job.optimizer, point.job.training.epochs
        assert optimizer.momentum_form == "caffe" or not optimizer.momentum, "the papers' form"
        if file.parent.name != "rudra":
            continue
        if point.job.model.name == "cifar10_full" and optimizer.name == "sgd":
            assert (optimizer.learning_rate, optimizer.momentum) == (0.001, 0.9)
        if not quick and point.job.simulation.tensors:
            imagenet = file.stem == "figure9"
            assert (optimizer.milestones, epochs) == (((15, 25), 30) if imagenet else ((120, 130), 140))
    assert study.title
    tables = tomllib.loads(file.read_text(encoding="utf-8"))["study"].get("paper", [])
    assert not tables or any(row["file"] for row in study.paper), "a study is compared with what the paper prints"
    assert tables or file.parent.name in {"crossbow", "jobs"}, "some figures of CROSSBOW are without numbers"


@pytest.mark.parametrize(("name", "steps"), [("figure5", 90), ("table2", 75)])
def test_quick_studies_of_errors_are_longer_than_the_network_stands_still(name: str, steps: int) -> None:
    """cifar10_full begins to learn after some 60 updates at α0 = 0.001, or 60 n at α0/n: before, errors are chance."""
    for point in sweep.plan(f"rudra/{name}", quick=True).points:
        job, protocol = point.job, point.job.make_protocol()
        samples = (job.data.train_limit or 0) * job.training.epochs
        updates = samples / (protocol.gradients_per_update * job.training.minibatch_size)
        assert updates / (protocol.n or 1) >= steps


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_says_what_it_is_for(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_names_what_decides_its_result(file: Path) -> None:
    """Whoever reads or copies it must not have to know the defaults."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    for table, key in [
        ("model", "name"),
        ("data", "name"),
        ("training", "epochs"),
        ("training", "minibatch_size"),
        ("training", "seed"),
        ("optimizer", "learning_rate"),
        ("protocol", "name"),
    ]:
        assert key in tables[table]


@pytest.mark.parametrize(
    ("name", "points", "matched"),
    [
        ("baseline", 1, 1),
        ("figure4", 3, 3),
        ("figure5", 4, 1),
        ("figure6", 36, 3),
        ("figure7", 72, 24),
        ("figure8", 36, 5),
        ("figure9", 4, 4),
        ("adv-statistics", 3, 1),
        ("table1", 3, 3),
        ("table2", 23, 23),
        ("table3", 5, 5),
        ("table4", 4, 4),
    ],
)
def test_a_study_has_the_papers_points(name: str, points: int, matched: int) -> None:
    study = sweep.plan(f"rudra/{name}")
    assert len(study.points) == points
    rows = [row for row in study.paper if row["file"]]
    assert len(rows) == matched
    for row in rows:
        (point,) = (point for point in study.points if point.file == row["file"])
        protocol = point.job.make_protocol()
        assert point.job.learners == row["learners"]
        assert point.job.topology.name == row.get("topology", "base")
        assert point.job.training.minibatch_size == row.get("minibatch_size", point.job.training.minibatch_size)
        expected = 0 if row["protocol"] == "hardsync" else protocol.n
        assert row["sigma"] == expected or point.job.learners == 1
        if row["protocol"] == "softsync" and row.get("modulation") != "none":
            assert protocol.modulation.rate_factor(1.0) == pytest.approx(1 / row["n"])


@pytest.mark.parametrize(
    ("name", "points", "matched"),
    [
        ("figure5b", 6, 6),
        ("figure6", 48, 8),
        ("figure13", 12, 1),
        ("figure17", 2, 2),
        ("figure18", 2, 2),
        ("figure20", 6, 2),
        ("figure21", 3, 3),
        ("figure28", 48, 4),
        ("figure29", 48, 4),
        ("figure30", 72, 6),
        ("figure31", 15, 3),
        ("table3", 120, 3),
    ],
)
def test_a_study_of_omnivore_has_its_groups_and_one_batch_for_each(name: str, points: int, matched: int) -> None:
    study = sweep.plan(f"omnivore/{name}")
    assert len(study.points) == points
    rows = [row for row in study.paper if row["file"]]
    assert len(rows) == len(study.paper) == matched
    for row in rows:
        (point,) = (point for point in study.points if point.file == row["file"])
        assert point.job.plan().workers == row["n"] == row["sigma"] + 1
    batches = {p.job.training.minibatch_size * p.job.learners // p.job.plan().workers for p in study.points}
    assert len(batches) == 1
    if name == "figure20":
        assert all(point.job.plan().served for point in study.points), "like with like"
    if rows[0].get("merged"):
        matched_jobs = [next(point.job for point in study.points if point.file == row["file"]) for row in rows]
        assert all(job.plan().stage is not None for job in matched_jobs)


def test_the_ladder_of_figure_31_is_against_what_is_not_merged() -> None:
    study = sweep.plan("omnivore/figure31")
    jobs = {point.file: point.job for point in study.points}
    for row in study.paper:
        ours, base = jobs[row["file"]], jobs[row["against"]]
        assert (ours.placement.given, base.placement.given) == (True, False)
        assert (ours.optimizer.momentum, ours.optimizer.learning_rate) == (row["momentum"], row["learning_rate"])
        assert (base.learners, base.optimizer.momentum, base.optimizer.learning_rate) == (32, 0.9, 0.0005)
        assert ours.training.seed == base.training.seed


@pytest.mark.parametrize(
    ("name", "points", "compared"),
    [
        ("figure11", 3, 1),
        ("figure12", 18, 2),
        ("figure13", 8, 3),
        ("figure14", 15, 2),
        ("figure15", 12, 2),
        ("figure16", 12, 1),
    ],
)
def test_a_study_of_crossbow_compares_runs_that_the_paper_compares(name: str, points: int, compared: int) -> None:
    study = sweep.plan(f"crossbow/{name}")
    assert len(study.points) == points
    assert all(row["file"] for row in study.paper)
    pairs = [(row, row["against"]) for row in study.paper if "against" in row]
    assert len(pairs) == compared
    jobs = {point.file: point.job for point in study.points}
    for row, against in pairs:
        one, other = jobs[row["file"]], jobs[against]
        assert one != other
        assert one.training.seed == other.training.seed
        assert one.simulation.nodes == other.simulation.nodes, "as many GPUs"
        if name == "figure15":
            assert one.averaging.model_copy(update={"outer": other.averaging.outer}) == other.averaging
            assert other.averaging.outer.momentum == 0.0


TABLE_2 = {  # hidden layers, largest batch of a thread, batches of the large worker
    "w8a": (8, 64, (64, 8192)),
    "delicious": (8, 32, (64, 2048)),
    "reuters": (4, 64, (64 // 8, 8192 // 8)),  # for real-sim
    "fashion": (6, 64, (128, 8192)),
}


@pytest.mark.parametrize("name", TABLE_2)
def test_a_study_of_hogbatch_has_the_papers_networks_batches_and_speeds(name: str) -> None:
    depth, most, bounds = TABLE_2[name]
    for quick in (False, True):
        study = sweep.plan(f"hogbatch/{name}", quick=quick)
        assert [point.file for point in study.points] == [
            "learners=1,workers=small,epochs=1.h5",
            "learners=1,workers=large.h5",
            *(f"rule={rule}.h5" for rule in ("fixed", "adaptive", "balanced")),
        ]
        assert {row["file"] for row in study.paper} == {"rule=fixed.h5", "rule=adaptive.h5"}
    study = sweep.plan(f"hogbatch/{name}")
    options = study.points[0].job.model.options
    assert options["hidden"] == [512] * depth
    assert (options["activation"], options["biases"]) == ("sigmoid", False)
    alone = [point.job.hogbatch.workers[0] for point in study.points[:2]]
    for point in study.points[2:]:
        assert [table.model_copy(update={"learners": None}) for table in point.job.hogbatch.workers] == alone
    small, large = alone
    assert (small.kind, small.threads, small.min, small.max) == ("small", 48, 1, most)
    assert (large.kind, large.min, large.max) == ("large", *bounds)
    seconds = {size: at(large.compute_s, size) for size in bounds}
    used = bounds[0] / seconds[bounds[0]] / (bounds[1] / seconds[bounds[1]])
    assert used == pytest.approx(0.5, abs=0.02), "what is left of its samples a second in its smallest batch"
    slower = at(small.compute_s, 1) / 48 / (seconds[bounds[1]] / bounds[1])
    assert 236 <= slower * (8 if name == "reuters" else 1) <= 317, "§7.2"


def test_the_papers_numbers_are_consistent() -> None:
    """Tables 2 and 3 share three rows, and what the text says of them holds."""
    paper = tomllib.loads((ROOT / "jobs" / "rudra" / "paper.toml").read_text(encoding="utf-8"))
    table2, table3 = paper["table2"]["rows"], paper["table3"]["rows"]
    assert len(table2) == 23
    assert sum(row in table2 for row in table3) == 3
    best = [row["test_error"] for row in table2 if 120 <= row["minibatch_size"] * row["learners"] <= 160]
    assert (min(best), max(best)) == (0.1796, 0.1892)
    omnivore = tomllib.loads((ROOT / "jobs" / "omnivore" / "paper.toml").read_text(encoding="utf-8"))
    for row in omnivore["figure6"]["rows"]:
        assert row["implicit_momentum"] == 1 - 1 / row["n"]
    for row in paper["figure8"]["rows"]:
        assert row["speed_up"] == pytest.approx(paper["baseline"]["rows"][0]["time_s"] / row["time_s"], abs=0.005)
