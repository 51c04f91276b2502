"""Rows of the Rudra paper's tables as jobs with the costs of the preset p775, and the fit of its constants.

Source: Rudra, Tables 2, 3 and 4. A row is named (σ, μ, λ): σ = 0 is hardsync, another σ the n of n-softsync.
"""

import itertools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from rudra.job.job import Job
from rudra.job.jobfiles import PAPER, shipped_jobs
from rudra.prepare import cost_files
from rudra.prepare.nodes import nodes_of
from rudra.simulation.costs import CostModel
from rudra.simulation.predict import Outline, outline, predict

EPOCHS = 140
GRADIENTS = 2000
"""Simulated for each row."""

NOISE = 0.05
"""Times of the paper that differ by less are not taken to have an order: its own like rows differ by 1 %, and others by
up to 20 % against what μ and λ alone explain."""

UPDATE_PASSES = 8 / 3
"""update_s in gradient_s; the preset says why."""

Key = tuple[int, int, int] | tuple[int, int, int, str]


class Row(NamedTuple):
    """One configuration of the paper.

    Attributes:
        block: rows of one block are compared with each other.
        sigma: as the paper names the configuration.
        minibatch_size: μ.
        learners: λ.
        time_s: of the whole training; in Table 4 of one epoch.
        topology: that it was trained with.
        fitted: the constant of p775 that is fitted to its time, if one is. What remains of the tables is predicted.
    """

    block: str
    sigma: int
    minibatch_size: int
    learners: int
    time_s: float
    topology: str = "base"
    fitted: str = ""

    @property
    def key(self) -> Key:
        key = self.sigma, self.minibatch_size, self.learners
        return key if self.topology == "base" else (*key, self.topology)


BASELINE_S = 54 * 3600 * 256 / 1_200_000
"""A mini-batch of 256 of ImageNet: 54 hours for an epoch with one learner (§5.5)."""

TEXT_8_54 = Row("§5.5", 1, 8, 54, 96 * 60, "adv*")
"""Only in the text, without its architecture, which is read as adv*; the time is of one epoch."""

IMAGENET = Outline(1_200_000, 289_000_000)  # §4.2

STALLED = (30, 4, 30), (1, 4, 30)
"""λ-softsync where its server cannot keep up (§5.2), and 1-softsync beside it."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "an update of 11 passes": {"update_s": 0.000308 * 11 / 3},
    "computing at μ = 4 and gradient_s fitted again": {
        "compute_s": {4: 0.01988, 32: 0.1271, 128: 0.4086},
        "gradient_s": 0.000438,
        "update_s": 0.000438 * UPDATE_PASSES,
    },
}
"""What `STALLED` hangs on. λ-softsync takes what the server needs or what computing needs, whichever is more, and p775
has both nearly equal. Of the server's work the paper says nothing: 11 passes are the gradient's addition, and momentum
and step as three calls of BLAS. Computing at μ = 4 is extrapolated from 32, 9 % too slow for 1-softsync: fitted to that
row in place of that, and gradient_s to (0, 8, 30) again, the server has more to do."""


@cache
def printed() -> dict[str, tuple[Row, ...]]:
    """Tables 2 (with the baseline) and 3, from the file that lies beside the paper's jobs."""
    paper = paper_tables()
    names = {"Table 2": ("baseline", "table2"), "Table 3": ("table3",)}
    return {title: tuple(_row(row, title) for name in n for row in paper[name]["rows"]) for title, n in names.items()}


@cache
def table4() -> tuple[Row, ...]:
    """Table 4 and what the text adds to it, in seconds per epoch."""
    return *(_row(row, "Table 4") for row in paper_tables()["table4"]["rows"]), TEXT_8_54


@cache
def paper_tables() -> dict[str, Any]:
    """What the paper prints, from the file that lies beside its jobs."""
    file = next(path for name, path in shipped_jobs().items() if name.startswith("rudra/")).with_name(PAPER)
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _row(row: Mapping[str, Any], title: str) -> Row:
    block = f"μλ ≈ {2 ** round(math.log2(row['minibatch_size'] * row['learners']))}" if title == "Table 2" else title
    time_s = row["time_s"] if "time_s" in row else 60 * row["minutes_per_epoch"]
    told = row["sigma"], row["minibatch_size"], row["learners"], time_s
    return Row(block, *told, row.get("topology", "base"), row.get("fitted", ""))


def quotients(rows: Mapping[Key, Row]) -> list[tuple[Row, Row]]:
    """Rows of Rudra-base beside that of 1-softsync with the same μ and λ."""
    found = [(row, rows.get((1, row.minibatch_size, row.learners))) for row in rows.values() if row.topology == "base"]
    return [(row, one) for row, one in found if one is not None and one is not row]


def ordered_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs (faster, slower) of rows of one block whose times in the paper differ by more than its noise."""
    pairs = itertools.combinations(sorted(rows, key=lambda row: row.time_s), 2)
    return [(a, b) for a, b in pairs if a.block == b.block and b.time_s > a.time_s * (1 + NOISE)]


def cifar10_s(row: Row, gradients: int = GRADIENTS, **constants: Any) -> float:
    """Predicted seconds of 140 epochs on CIFAR-10; `constants` replace keys of the preset."""
    return predict(_cifar10(row, constants), updates=_updates(row, gradients), known=_images()).epoch_s * EPOCHS


def imagenet_s(row: Row, gradients: int = GRADIENTS, **constants: Any) -> float:
    """Predicted seconds of one epoch on ImageNet; `constants` replace keys of the preset."""
    return predict(_imagenet(row, constants), updates=_updates(row, gradients), known=IMAGENET).epoch_s


def computing_s(row: Row) -> float:
    """Seconds for what the row's `time_s` is of, if all but computing were free and nobody waited."""
    if row in table4():
        return _computing_s(_imagenet(row, {}), IMAGENET)
    return _computing_s(_cifar10(row, {}), _images()) * EPOCHS


def _computing_s(job: Job, known: Outline) -> float:
    job, size = cost_files.load(job), job.training.minibatch_size
    model = CostModel(job.simulation, job.plan(nodes_of(job)), size)
    return known.training_samples / sum(size / seconds for seconds in model.compute_s.values())


@cache
def _images() -> Outline:
    """CIFAR-10 and its network."""
    return outline(_cifar10(Row("", 1, 128, 1, 0.0), {}))


def _updates(row: Row, gradients: int) -> int:
    return gradients * max(1, row.sigma) // row.learners  # c = λ / n, which is whole in all rows


def _cifar10(row: Row, constants: Mapping[str, Any]) -> Job:
    return _job(row, constants, model={"name": "cifar10_full"}, data={"name": "cifar10"})


def _imagenet(row: Row, constants: Mapping[str, Any]) -> Job:
    return _job(row, constants, model={"name": "alexnet"})


def _job(row: Row, constants: Mapping[str, Any], **tables: Any) -> Job:
    return Job(
        **tables,
        training={"minibatch_size": row.minibatch_size},
        protocol={"name": "softsync", "n": row.sigma} if row.sigma else {"name": "hardsync"},
        topology={"name": row.topology},
        cluster={"learners": row.learners},
        simulation={"costs": "p775", **constants},
    )


def fit(rounds: int = 3, gradients: int = 3000) -> dict[str, float]:
    """Finds the fitted constants of p775 again, each from its row, in turns until they agree.

    Returns:
        Constant, named as in `Row.fitted` -> value.
    """
    values = {
        "compute_s at μ = 128": 0.4,
        "compute_s at μ = 32": 0.1,
        "node_slowdown": 0.1,
        "gradient_s": 3e-4,
        "compute_s of alexnet at μ = 4": 1.0,
        "bandwidth_bytes_per_s": 4e9,
    }
    rows = {row.fitted: row for rows in (*printed().values(), table4()) for row in rows if row.fitted}
    for _ in range(rounds):
        for name, row in rows.items():
            values[name] = _secant(partial(_with, row, gradients, values, name), values[name], row.time_s)
    return values


def _with(row: Row, gradients: int, values: Mapping[str, float], name: str, value: float) -> float:
    """Seconds of a row with another value for one of the fitted constants."""
    values = {**values, name: value}
    shared = {key: values[key] for key in ("node_slowdown", "bandwidth_bytes_per_s")}
    if row in table4():
        compute_s = alexnet_compute_s(values["compute_s of alexnet at μ = 4"])
        return imagenet_s(row, gradients, compute_s=compute_s, **shared)
    compute_s = {32: values["compute_s at μ = 32"], 128: values["compute_s at μ = 128"]}
    gradient_s = values["gradient_s"]
    update_s = gradient_s * UPDATE_PASSES
    return cifar10_s(row, gradients, compute_s=compute_s, gradient_s=gradient_s, update_s=update_s, **shared)


def alexnet_compute_s(of_4: float) -> dict[int, float]:
    """In proportion to μ from 256 down to 16, and what it takes at μ = 4; the preset says why."""
    return {4: of_4, 16: BASELINE_S / 16, 256: BASELINE_S}


def _secant(function: Callable[[float], float], start: float, wanted: float) -> float:
    """Where a function that is nearly straight has the wanted value."""
    low, high = function(start), function(start * 1.1)
    return start + (wanted - low) * start * 0.1 / (high - low)
