"""Prices of points: predicted samples per second, without training anything.

Rates and momenta do not change the time of a sample, so a search has a few hundred prices and many more points.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.log import only_errors
from rudra.simulation.predict import Outline, outline, predict
from rudra.tuning.space import Candidate, Refused, trajectory

SEVERAL = 64
"""Least number of points that are worth more processes."""

AT_ONCE = 8
"""Number of points that a process predicts before it returns them."""


class Price(NamedTuple):
    """Price of a point.

    Attributes:
        point: The point.
        samples_per_s: Rate of all learners together.
        staleness: Mean staleness of the gradients.
        bound: Limit of the rate: "compute", "server" or "link".
        dominated: A point with the same weights after the same samples that is faster. None: there is none.
    """

    point: Candidate
    samples_per_s: float
    staleness: float
    bound: str
    dominated: Candidate | None = None


def priced(
    points: Sequence[Candidate], refused: list[Refused], done: Callable[[int], object], cores: int
) -> list[Price]:
    """Predicts every point.

    Args:
        points: Points whose settings may change the time of a sample.
        refused: Is extended by the points that do not fit the cluster of the job.
        done: Is called with the number of points that are done since the last call.
        cores: Number of processes that may predict at a time.
    """
    found: list[Price] = []
    for point, price in zip(points, _predicted(points, cores), strict=True):
        if isinstance(price, str):
            refused.append(Refused(point.settings, price))
        else:
            found.append(Price(point, *price))
        done(1)
    return dominated(found)


def _predicted(points: Sequence[Candidate], cores: int) -> Iterator[tuple[float, float, str] | str]:
    known = {learners: outline(job) for learners, job in {point.job.learners: point.job for point in points}.items()}
    arguments = [(point.job, known[point.job.learners]) for point in points]
    if cores == 1 or len(points) < SEVERAL:
        yield from map(_price, arguments)
        return
    pool = ProcessPoolExecutor(cores, get_context("spawn"))
    try:
        starts = range(0, len(arguments), AT_ONCE)
        parts = [pool.submit(_prices, arguments[start : start + AT_ONCE]) for start in starts]
        for part in parts:
            yield from part.result()
    except BrokenProcessPool:
        raise ConfigError(
            "predictions start processes, which import your script; put its calls under if __name__ == '__main__'"
        ) from None
    finally:  # only the pool may cancel: a signal may have ended its processes, and then it sets exceptions
        pool.shutdown(cancel_futures=True)


def _prices(arguments: Sequence[tuple[Job, Outline]]) -> list[tuple[float, float, str] | str]:
    return [_price(each) for each in arguments]


def _price(about: tuple[Job, Outline]) -> tuple[float, float, str] | str:
    """Returns rate, staleness and limit of a job, or the reason why it does not work."""
    job, known = about
    try:
        with only_errors():
            found = predict(job, known=known)
    except ConfigError as error:
        return str(error)
    return found.samples_per_s, found.mean_staleness, found.bound


def dominated(prices: Sequence[Price]) -> list[Price]:
    """Marks each point whose weights a faster one also makes: see `trajectory`. The job as given is no point."""
    alike = [trajectory(price.point.job) if price.point.settings else "" for price in prices]
    best: dict[str, Price] = {}
    for key, price in zip(alike, prices, strict=True):
        if key not in best or price.samples_per_s > best[key].samples_per_s:
            best[key] = price
    return [
        price if best[key] is price else price._replace(dominated=best[key].point)
        for key, price in zip(alike, prices, strict=True)
    ]
