"""The grid of `rudra bench tta` for torch DDP, and the order that finds the best settings of each method in it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SEED = 1  # seed of the search


class Goalpost(NamedTuple):
    """A task for LeNet.

    Attributes:
        reader: reader of the data.
        accuracy: target of the test accuracy.
        epochs: number of epochs within which to reach the target. The cosine schedule falls over this number.
    """

    reader: str
    accuracy: float
    epochs: int


DATA = {"fashion-mnist": Goalpost("idx", 0.90, 4), "cifar-10": Goalpost("cifar10", 0.60, 6)}
SIZES = (16, 32, 64, 128)
RATES = (0.01, 0.02, 0.05, 0.1)
SCHEDULES = ("constant", "cosine")
MOVING = 0.02
"""Share of the distance to the current weights that a moving average covers with every update."""


class Contestant(NamedTuple):
    """A training method: torch DDP, or what `rudra tune` finds.

    Attributes:
        space: Key -> values of the search. None: it is DDP, which gets the best of a grid.
        averaged: Whether DDP's evaluations use a moving average of the weights over all updates.
    """

    space: Mapping[str, Sequence[Any]] | None = None
    averaged: bool = False


CONTESTANTS = {
    "tuned": Contestant({}),
    **{
        name: Contestant({"protocol.name": [name]})
        for name in ("hardsync", "softsync", "sma", "easgd", "average", "diloco")
    },
    "ddp": Contestant(),
    "ddp-moving": Contestant(averaged=True),
}


class Point(NamedTuple):
    """One run.

    `epochs` is a maximum: DDP ends when it reaches the target. A cosine always spans the task's epochs. `file` is the
    job file of a run of Rudra.
    """

    data: str
    contestant: str
    size: int
    rate: float
    schedule: str = "constant"
    epochs: int = 1
    seed: int = SEED
    compiled: bool = False
    file: str = ""


class Outcome(NamedTuple):
    """Results of a run: test accuracy after each epoch, and seconds of training until then."""

    accuracy: list[float]
    seconds: list[float]

    def reached(self, target: float) -> tuple[float, int]:
        """Returns seconds and epochs until the target. The seconds are infinite if it was not reached."""
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
    """Runs the first two rounds. Returns the fastest point of each method that reached the target, plus a spare epoch.

    A round without a choice is left out. In the second round the points of a method run in turns, the one with the
    highest accuracy first. A point gets only as many epochs as can still make it the fastest. This number assumes the
    shortest seconds per epoch seen with this mini-batch size, so that a disturbed epoch decides nothing.
    """
    goal = DATA[data]
    grid = [Point(data, who, size, rate) for size in sizes for rate in rates for who in contestants]
    made = perform(grid) if len(rates) > 1 else {}
    grid = _furthest(made) if made else grid
    ways = [point._replace(schedule=schedule, epochs=goal.epochs) for point in grid for schedule in schedules]
    if len(ways) == len(contestants):
        return {point.contestant: point for point in ways}
    pace: dict[tuple[str, int], float] = {}  # seconds per epoch
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
    """Returns the point with the best rate for each mini-batch size and method, ordered by accuracy."""
    best: dict[tuple[int, str], Point] = {}
    for point in sorted(first, key=lambda point: -first[point].accuracy[-1]):
        best.setdefault((point.size, point.contestant), point)
    return list(best.values())
