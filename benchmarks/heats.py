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
        "easgd", {"name": "replicas", "options": {"groups": 1}}, {"elasticity": 0.0, "outer": {"learning_rate": MOVING}}
    ),
    "hardsync": Contestant("hardsync", {"name": "groups"}),
    "softsync": Contestant("softsync", {"name": "base"}),
    "ddp": Contestant(),
    "ddp-moving": Contestant(averaged=True),
}


class Point(NamedTuple):
    """A run. `epochs`: at most; DDP ends where it reaches the target. A cosine falls in all epochs of the goalpost."""

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
    """The first two heats; the fastest point of each contestant that reached the target, with an epoch to spare.

    A heat that has nothing to choose from is left out. In the second one a contestant's points take turns, the one
    that came furthest first, and each gets no more epochs than would make it the fastest so far, at the quickest pace
    that it was seen to have with mini-batches of that size: a disturbed epoch decides nothing.
    """
    goal = DATA[data]
    grid = [Point(data, who, size, rate) for size in sizes for rate in rates for who in contestants]
    made = perform(grid) if len(rates) > 1 else {}
    grid = _furthest(made) if made else grid
    ways = [point._replace(schedule=schedule, epochs=goal.epochs) for point in grid for schedule in schedules]
    if len(ways) == len(contestants):
        return {point.contestant: point for point in ways}
    pace: dict[tuple[str, int], float] = {}  # seconds an epoch
    for point, outcome in made.items():
        _note(pace, point, outcome)
    best: dict[str, Point] = {}
    least = dict.fromkeys(contestants, math.inf)
    waiting = {who: [point for point in ways if point.contestant == who] for who in contestants}
    while any(waiting.values()):
        turn = []
        for point in (points.pop(0) for points in waiting.values() if points):
            epochs = least[point.contestant] / pace.get((point.contestant, point.size), 1e-9)
            if epochs >= 1:
                turn.append(point._replace(epochs=int(min(epochs, goal.epochs))))
        for point, outcome in perform(turn).items() if turn else ():
            _note(pace, point, outcome)
            seconds, epochs = outcome.reached(goal.accuracy)
            at_pace = epochs * pace[point.contestant, point.size] if math.isfinite(seconds) else math.inf
            if at_pace < least[point.contestant]:
                least[point.contestant] = at_pace
                best[point.contestant] = point._replace(epochs=min(epochs + 1, goal.epochs))
    return {who: best[who] for who in contestants if who in best}


def _note(pace: dict[tuple[str, int], float], point: Point, outcome: Outcome) -> None:
    key = point.contestant, point.size
    pace[key] = min(pace.get(key, math.inf), outcome.seconds[-1] / len(outcome.seconds))


def _furthest(first: dict[Point, Outcome]) -> list[Point]:
    """Of each mini-batch size and contestant the point whose rate came furthest; the furthest of all first."""
    best: dict[tuple[int, str], Point] = {}
    for point in sorted(first, key=lambda point: -first[point].accuracy[-1]):
        best.setdefault((point.size, point.contestant), point)
    return list(best.values())
