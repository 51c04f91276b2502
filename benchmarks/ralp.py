"""The RALP paper's tables beside ours: skewness, bytes of a step, communication, its rule.

Tables 1 and 2 follow from the shapes of eight networks alone. Figure 2 is predicted with the costs of the preset
"ralp", as Tables 3 and 4 are by the studies `ralp/table3` and `ralp/table4`. Then both rules of `rudra place` choose
cuts for these networks behind links of three rates: in virtual time, is a cut of theirs as good as any, and as none?

Source: Park et al., RALP, §3, §4.3 and §6.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rudra.core.layout import Placed
from rudra.core.placement import Layer, PlacementHardware, choose, skewness
from rudra.findings import Goal, Report
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.simulation.predict import Outline, predict
from rudra.studies.convnets import NETWORKS
from rudra.studies.place import RULES
from rudra.studies.standins import DEVICES

GIB = 2**30
GBIT_S = (1, 10, 56)
LEARNERS = (4, 8, 32)
WORSE = 1.05
"""Times the best that `auto` may be."""


def run(*, quick: bool) -> Report:
    """Compares; `quick`: two networks and fewer steps."""
    report = Report(["", "paper", "ours", "ours / paper", ""])
    paper = _paper()
    _tables_1_and_2(report, paper)
    _figure_2(report, paper["figure2"]["rows"], list(NETWORKS)[-2:-1] if quick else list(NETWORKS))
    _rules(report, ["LeNet", "ResNet-50"] if quick else list(NETWORKS), (4,) if quick else LEARNERS, every=not quick)
    return report


@cache
def _paper() -> Mapping[str, Any]:
    file = shipped_jobs()["ralp/table3"].parent / "paper.toml"
    return tomllib.loads(Path(file).read_text(encoding="utf-8"))


def _short(network: str) -> str:
    return network.replace("-", "")


def _row(report: Report, name: str, theirs: float, ours: float, form: str, note: str = "") -> None:
    report.rows.append((f"  {name}", f"{theirs:{form}}", f"{ours:{form}}", f"{ours / theirs:.2f}", note))


def _tables_1_and_2(report: Report, paper: Mapping[str, Any]) -> None:
    networks = {_short(name): each for name, each in NETWORKS.items()}
    report.rows.append(("Table 1, skewness of the parameters", *[""] * 4))
    off = []
    for row in paper["table1"]["rows"]:
        ours = skewness(networks[row["model"]][0](1000))
        off.append(abs(round(ours, 2) - row["skewness"]))
        _row(report, row["model"], row["skewness"], ours, ".2f")
    report.goals.append(Goal("Table 1: skewness to two decimals", off, at_most=0.001))
    report.rows.append(("Table 2, GiB of tensors a step", *[""] * 4))
    off = []
    for row in paper["table2"]["rows"]:
        make, size = networks[row["model"]]
        found = choose("ralp", make(1000), PlacementHardware(row["learners"], size))
        assert found.cut is not None
        whole = found.server_bytes / 2 / row["learners"]
        taken = {"model": whole, "ring": found.allreduce_bytes, "placed": found.cut.placed_bytes}
        for key, bytes_ in taken.items():
            off.append(abs(bytes_ / GIB - row[f"{key}_gib"]))
            _row(report, f"{row['model']}, {key}", row[f"{key}_gib"], bytes_ / GIB, ".2f", _rounding(off[-1]))
    report.goals.append(Goal("Table 2: GiB to two decimals", off, at_most=0.0055))
    report.notes.append("Table 2: the text says W = 32; its numbers are those of W = 8, in units of 2^30 bytes")


def _rounding(off: float) -> str:
    return "" if off <= 0.005 else f"off by {off:.4f}: rounded from the numbers beside it"


def _figure_2(report: Report, rows: Sequence[Mapping[str, Any]], networks: Sequence[str]) -> None:
    report.rows.append(("Figure 2, communication in a step, mean of the networks", *[""] * 4))
    for row in rows:
        shares = {network: _communication(_short(network), row["workers"]) for network in networks}
        most = max(shares, key=lambda network: shares[network])
        note = f"from {min(shares.values()):.0%} to {shares[most]:.0%} ({most})"
        mean = sum(shares.values()) / len(shares)
        _row(report, f"{row['workers']} workers and servers", row["communication"], mean, ".0%", note)


def _communication(stand_in: str, workers: int) -> float:
    """Share of a step in which a worker does not compute, with as many servers as workers."""
    job = Job(
        model={"name": f"rudra.studies.standins:{stand_in}"},
        data={"name": "rudra.data.noise:noise", "options": {"shape": [1]}, "classes": 1000},
        training={"minibatch_size": next(size for name, (_, size) in NETWORKS.items() if _short(name) == stand_in)},
        protocol={"name": "hardsync"},
        topology={"name": "sharded", "options": {"shards": workers, "apart": True}},
        cluster={"learners": workers},
        simulation={"costs": "ralp", "tensors": False},
    )
    return 1 - predict(job, samples=10**6, updates=40).shares["compute"]


def _rules(report: Report, networks: Sequence[str], learners: Sequence[int], *, every: bool) -> None:
    """How good the cuts are that the rules choose, in virtual time."""
    report.rows.append(("Rules, ms of a step in virtual time", "whole", "auto", "auto / best", ""))
    auto, ralp = [], []
    for network, about, times in _configurations(networks, learners, every=every):
        best = min(times.values())
        auto.append(times["auto"] / best)
        ralp.append(times["ralp"] / best)
        loses = f"ralp takes {ralp[-1]:.2f} times the best" if ralp[-1] > WORSE else ""
        cells = (f"{times['whole'] * 1e3:,.1f}", f"{times['auto'] * 1e3:,.1f}", f"{auto[-1]:.3f}")
        report.rows.append((f"  {network}, {about}", *cells, loses))
    report.goals.append(Goal(f"auto <= {WORSE} times the better of placed and whole", auto, at_most=WORSE))
    lost = sum(each > WORSE for each in ralp)
    report.notes.append(
        f"ralp is worse than {WORSE} times the best in {lost} of {len(ralp)} cases, up to {max(ralp):.2f} times; auto, "
        f"up to {max(auto):.3f} times. The best: of {'all cuts' if every else 'these cuts'} and none, by one server"
    )


def _configurations(
    networks: Sequence[str], learners: Sequence[int], *, every: bool
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Network, link and learners, and seconds of a step: whole, by the cut of each rule, and by all cuts if wanted."""
    for network in networks:
        make, size = NETWORKS[network]
        layers = DEVICES[network].timed(make(1000), size)
        for rate in GBIT_S:
            for count in learners:
                cluster = PlacementHardware(count, size, rate * 1.25e8, 1e-5)
                decisions = {rule: choose(rule, layers, cluster, against=("server",)) for rule in RULES}
                chosen = {rule: None if d.cut is None else d.cut.index for rule, d in decisions.items()}
                places: set[int | None] = {None, *chosen.values()}
                places |= {cut.index for cut in decisions["auto"].cuts} if every else set()
                seconds = {place: step_s(layers, cluster, place) for place in places}
                times: dict[str, float] = {rule: seconds[place] for rule, place in chosen.items()}
                others = {f"cut {place}": each for place, each in seconds.items() if place}
                yield network, f"{rate} Gbit/s, λ = {count}", {"whole": seconds[None], **times, **others}


def step_s(layers: Sequence[Layer], cluster: PlacementHardware, cut: int | None, **costs: Any) -> float:
    """Seconds of a synchronous step in virtual time, through one parameter server.

    Args:
        layers: of the model, with their times.
        cluster: who takes part.
        cut: how many layers learners have; None: all of them.
        costs: keys of `[simulation]` in place of the cluster's.
    """
    size, whole_s = sum(layer.parameters_bytes for layer in layers), sum(layer.seconds for layer in layers)
    placed = None
    if cut is not None:
        front = sum(layer.parameters_bytes for layer in layers[:cut])
        back_s = sum(layer.seconds for layer in layers[cut:])
        crossing = layers[cut - 1].output_bytes * cluster.minibatch_size
        placed = Placed(front / size, crossing / size, back_s / whole_s)
    link = {"bandwidth_bytes_per_s": cluster.bytes_per_s, "latency_s": cluster.latency_s, "sharing": cluster.sharing}
    job = Job(
        model={"name": "lenet"},  # of which nothing counts: its sizes are known
        training={"minibatch_size": cluster.minibatch_size},
        protocol={"name": "hardsync"},
        placement={"cut": 1, "rule": "synchronous"} if cut else {},
        cluster={"learners": cluster.learners},
        simulation={"compute_s": whole_s, "jitter": 0.0, **link, "tensors": False, **costs},
    )
    images = cluster.learners * cluster.minibatch_size
    return images / predict(job, updates=8, known=Outline(10**6, size, placed)).samples_per_s
