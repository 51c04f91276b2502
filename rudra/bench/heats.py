"""The search of `rudra bench tta`: what can be tried, and in which order, so that each contestant runs at its best."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SEED = 1  # of the search


class Goalpost(NamedTuple):
    """What is to be learned, by LeNet.

    Attributes:
        reader: of the data.
        accuracy: of a test, the target.
        epochs: in which it is to be reached, and in which the cosine falls.
    """

    reader: str
    accuracy: float
    epochs: int


DATA = {"fashion-mnist": Goalpost("idx", 0.90, 4), "cifar-10": Goalpost("cifar10", 0.60, 6)}
SIZES = (16, 32, 64, 128)
RATES = (0.01, 0.02, 0.05, 0.1)
SCHEDULES = ("constant", "cosine")
MOVING = 0.02
"""By how much of the way to them weights that are averaged over time move with every update."""


class Contestant(NamedTuple):
    """A way to train: tables of a job; without a protocol DDP, as `averaged` over time as weights may be.

    Attributes:
        protocol: its name.
        topology: table `[topology]`.
        averaging: table `[averaging]`.
        averaged: whether DDP's weights are tested as a moving average of those of all updates.
    """

    protocol: str = ""
    topology: dict[str, Any] = {"name": "replicas"}  # noqa: RUF012
    averaging: dict[str, Any] = {}  # noqa: RUF012
    averaged: bool = False


CONTESTANTS = {
    "sma": Contestant("sma"),
    "easgd": Contestant("easgd"),
    "average": Contestant("average"),
    "diloco": Contestant("diloco"),
    "moving": Contestant(
        "easgd", {"name": "replicas", "options": {"groups": 1}}, {"elasticity": 0.0, "learning_rate": MOVING}
    ),
    "hardsync": Contestant("hardsync", {"name": "groups"}),
    "softsync": Contestant("softsync", {"name": "base"}),
    "ddp": Contestant(),
    "ddp-moving": Contestant(averaged=True),
}


class Point(NamedTuple):
    """A run. `epochs`: at most; it ends where it reaches the target."""

    data: str
    contestant: str
    size: int
    rate: float
    schedule: str = "constant"
    epochs: int = 1
    seed: int = SEED
    compiled: bool = False


class Outcome(NamedTuple):
    """What came of a run: test accuracy after each epoch, and seconds of training until then."""

    accuracy: list[float]
    seconds: list[float]

    def reached(self, target: float) -> tuple[float, int]:
        """Seconds and epochs until the target was reached; infinitely many seconds if it was not."""
        for epoch, (accuracy, seconds) in enumerate(zip(*self, strict=True), 1):
            if accuracy >= target:
                return seconds, epoch
        return math.inf, len(self.accuracy)


Perform = Callable[[Sequence[Point]], dict[Point, Outcome]]


def search(
    data: str,
    contestants: Sequence[str],
    sizes: Sequence[int],
    rates: Sequence[float],
    perform: Perform,
    schedules: Sequence[str] = SCHEDULES,
) -> dict[str, Point]:
    """The first two heats; the fastest point of each contestant, or the one that came furthest.

    A heat that has nothing to choose from is left out.
    """
    goal = DATA[data]
    grid = [Point(data, who, size, rate) for size in sizes for rate in rates for who in contestants]
    if len(rates) > 1:
        grid = _furthest(perform(grid))
    ways = [point._replace(schedule=schedule, epochs=goal.epochs) for point in grid for schedule in schedules]
    if len(ways) == len(contestants):
        return {point.contestant: point for point in ways}
    second = perform(ways)

    def rank(point: Point) -> tuple[float, float]:
        return second[point].reached(goal.accuracy)[0], -max(second[point].accuracy)

    return {who: min((point for point in ways if point.contestant == who), key=rank) for who in contestants}


def _furthest(first: dict[Point, Outcome]) -> list[Point]:
    """Of each mini-batch size and contestant the point whose rate came furthest."""
    best: dict[tuple[int, str], Point] = {}
    for point, outcome in first.items():
        other = best.setdefault((point.size, point.contestant), point)
        if outcome.accuracy[-1] > first[other].accuracy[-1]:
            best[point.size, point.contestant] = point
    return list(best.values())
