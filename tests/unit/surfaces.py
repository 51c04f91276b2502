"""Invented surfaces: what a sample is worth and how fast samples are, without training anything."""

import itertools
import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rudra.job.job import Job
from rudra.job.target import Target
from rudra.tuning import space
from rudra.tuning.answer import answer_of
from rudra.tuning.batches import batch_of
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.prices import Price, dominated
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.rounds import MOMENTA, MOMENTUM, RATE, rates
from rudra.tuning.ruler import Mark
from rudra.tuning.search import Order, lead
from rudra.tuning.space import OF_STRATEGIES, Candidate, Settings
from rudra.tuning.state import SearchState
from rudra.tuning.strategies import shipped

EPOCH = 1000
TARGET = Target("validation", "accuracy", True, 0.9)
JOB = Job(
    name="invented",
    model={"name": "mlp"},
    training={"epochs": 40, "minibatch_size": 8},
    optimizer={"learning_rate": 0.01, "momentum": 0.9},
    cluster={"learners": 8, "threads_per_rank": 1},
)

LENGTH = 8
"""Epochs of the best settings in which the loss falls to 1/e. The target is at 0.92 of it."""

OPTIMUM = 0.5
"""Best effective learning rate of all surfaces."""

AT_ONCE = 0.3
"""Epochs of the best settings that a probe gains once, in its first epoch, if its effective learning rate is 1/e of the
cold start's. On recorded curves of LeNet and cifar10_full it is 0.2 to 0.8 (`rudra bench strategies`)."""


def stale(job: Job) -> float:
    """Updates between reading and writing: as many as there are others that update alone."""
    protocol = job.make_protocol()
    if protocol.averages or protocol.ordered:
        return 0.0
    if job.topology.name == "groups":
        return float(job.topology.options.get("groups", 1)) - 1
    return float(job.learners / protocol.gradients_per_update) - 1


@cache
def points() -> list[tuple[Candidate, float]]:
    """All points with their staleness, first the job as given."""
    found = space.points(JOB, [d for d in space.chosen({}) if d.timed], [])
    return [(point, stale(point.job)) for point in [Candidate({}, JOB), *found]]


class Surface(NamedTuple):
    """A surface.

    Attributes:
        speed: Point and staleness -> samples per second.
        value: Point and staleness -> factor on the worth of its samples, apart from rates and mini-batches.
        size: Exponent of the mini-batch size in the worth of its samples.
        width: Change of the logarithm of the effective rate at which a sample loses 40 % of its worth.
        only: Protocols of the surface. Empty: all.
        cliff: Effective rate from which on a probe diverges.
        lost: Effective rate from which on replicas lose all that they have learned, and learn nothing.
    """

    speed: Callable[[Candidate, float], float]
    value: Callable[[Candidate, float], float] = lambda point, sigma: 1.0
    size: float = -0.5
    width: float = 2.0
    only: tuple[str, ...] = ()
    cliff: float = 4 * OPTIMUM
    lost: float = math.inf

    def has(self, point: Candidate) -> bool:
        return not (point.settings and self.only) or point.settings["protocol.name"] in self.only

    def worth(self, price: Price, rate: float, momentum: float) -> float:
        """Progress per epoch. Zero: diverges."""
        effective = effective_rate(price, rate, momentum)
        if effective > self.cliff:
            return 0.0
        off = math.log(effective / OPTIMUM) / self.width
        size = price.point.job.training.minibatch_size / JOB.training.minibatch_size
        return self.value(price.point, price.staleness) * math.exp(-(off**2) / 2) * size**self.size

    def of(self, state: SearchState, settings: Settings) -> float:
        """Progress per epoch with settings. Another outer optimiser or average over time makes it slower."""
        price = state.price(settings)
        rate, momentum = rate_and_momentum(settings)
        others = settings.keys() - price.point.settings.keys() - OF_STRATEGIES
        return self.worth(price, rate, momentum) * 0.9 ** len(others)

    def time(self, state: SearchState, settings: Settings) -> float:
        """Relative time to the target with settings. Infinity: diverges."""
        worth = self.of(state, settings)
        return 1 / (worth * state.rate(settings)) if worth else math.inf

    def best(self, state: SearchState) -> float:
        """Least relative time of all points that a search may try."""
        return best_of(self, tuple(rates(state)))


@cache
def best_of(surface: Surface, series: tuple[float, ...]) -> float:
    tried = itertools.product(prices_of(surface), series, MOMENTA)
    speeds = (surface.worth(price, rate, momentum) * price.samples_per_s for price, rate, momentum in tried)
    return 1 / max(speeds)


def effective_rate(price: Price, rate: float, momentum: float) -> float:
    """Staleness acts as momentum."""
    return rate * modulated(price.point) * (1 + price.staleness) / (1 - momentum)


def modulated(point: Candidate) -> float:
    """Factor on the learning rate by the point's protocol; searches ask thousands of times."""
    if id(point) not in _FACTORS:
        _FACTORS[id(point)] = batch_of(point.job).factor, point
    return _FACTORS[id(point)][0]


_FACTORS: dict[int, tuple[float, Candidate]] = {}
"""Identity of a point -> its factor, and the point itself, which stays alive."""


def rate_and_momentum(settings: Settings) -> tuple[float, float]:
    return settings.get(RATE, JOB.optimizer.learning_rate), settings.get(MOMENTUM, JOB.optimizer.momentum)


def _groups(point: Candidate) -> int:
    return int(point.settings.get("topology.options.groups", 1))


def averages(point: Candidate) -> bool:
    """Whether the protocol averages replicas; searches ask thousands of times."""
    name = str(point.job.protocol.name)
    if name not in _AVERAGES:
        _AVERAGES[name] = point.job.make_protocol().averages
    return _AVERAGES[name]


_AVERAGES: dict[str, bool] = {}


SURFACES = {
    "monotone": Surface(lambda point, sigma: 100 * (1 + sigma)),
    "valley in g": Surface(lambda point, sigma: 600 if _groups(point) == 4 else 100 + 10 * sigma),
    "cliff": Surface(lambda point, sigma: 100 * math.sqrt(1 + sigma), cliff=1.2 * OPTIMUM),
    "ridge of rate and momentum": Surface(lambda point, sigma: 100 + 20 * sigma, width=0.8),
    "speed misleads": Surface(lambda point, sigma: 100 * math.sqrt(1 + sigma), lambda point, sigma: 1 / (1 + sigma)),
    "replicas are worth more": Surface(lambda point, sigma: 100, lambda point, sigma: 1.0 + averages(point)),
    "replicas are fast": Surface(lambda point, sigma: 400 if averages(point) else 100),
    "flat": Surface(lambda point, sigma: 100, size=0, width=math.inf, cliff=math.inf),
}


class Trained:
    """Trains probes of a surface: the loss falls by worth, with noise that probe, epoch and seed decide."""

    def __init__(
        self,
        state: SearchState,
        surface: Surface,
        noise: float = 0.03,
        seed: int = 0,
        measured: ProbeNoise | None = None,
        at_once: float = 0.0,
    ) -> None:
        self._state, self._surface, self._noise, self._seed, self._measured = state, surface, noise, seed, measured
        self._at_once = at_once
        self.trained = 0

    def _progress(self, probe: Probe, epochs: int) -> float:
        price = self._state.price(probe.by_key)
        if averages(price.point) and self._effective_rate(probe) > self._surface.lost:
            return 0.0
        made = self._surface.of(self._state, probe.by_key) * epochs
        if not probe.origin:
            return made
        cold = self._state.probes[probe.origin.rpartition("-")[0]]
        lower = self._effective_rate(cold) / self._effective_rate(probe)
        return self._progress(cold, cold.epochs) + self._at_once * math.log(lower) + made

    def _effective_rate(self, probe: Probe) -> float:
        return effective_rate(self._state.price(probe.by_key), *rate_and_momentum(probe.by_key))

    def __call__(self, probe: Probe, before: Outcome | None) -> Outcome:
        self.trained += 1
        if self._surface.of(self._state, probe.by_key) == 0:
            return Outcome((), "the loss of mini-batch 3 is nan")
        marks = []
        for epoch in range(1, probe.epochs + 1):
            luck = random.Random(f"{self._seed} {probe.name} {epoch}").gauss(0, self._noise)
            loss = math.exp(-max(0.0, self._progress(probe, epoch) + luck) / LENGTH)
            marks.append(Mark(epoch * EPOCH, loss, 1 - loss / 4, epoch * EPOCH / self._state.rate(probe.by_key)))
        return Outcome(tuple(marks), noise=None if probe.origin or probe.seed else self._measured)


@cache
def prices_of(surface: Surface) -> list[Price]:
    return dominated(
        [Price(point, surface.speed(point, sigma), sigma, "compute") for point, sigma in points() if surface.has(point)]
    )


def new_state(surface: Surface, budget: float = 8.0) -> SearchState:
    """Returns the state of a search that has not begun."""
    return SearchState(
        JOB,
        TARGET,
        prices_of(surface),
        untimed=space.untimed({}),
        training_samples=EPOCH,
        budget=budget,
        longest=JOB.training.epochs,
    )


class Search:
    """A search on a surface.

    Args:
        path: Directory of the journal.
        strategy: Name of the strategy.
        surface: The surface.
        budget: Reference runs whose samples may be trained.
        noise: Standard deviation of a probe's progress, in epochs of the best settings.
        seed: Seed of the noise.
        measured: Gradient noise scale of the cold start.
        at_once: What lower learning rates gain at once, see `AT_ONCE`.
    """

    def __init__(
        self,
        path: Path,
        strategy: str,
        surface: Surface,
        budget: float = 8.0,
        noise: float = 0.03,
        seed: int = 0,
        measured: ProbeNoise | None = None,
        at_once: float = 0.0,
    ) -> None:
        self._measured, self._at_once = measured, at_once
        self.path, self._strategy = path / NAME, shipped()[strategy]
        self.surface, self._budget, self._noise, self._seed = surface, budget, noise, seed
        self.within: float = math.inf

    def run(self, dies_after: int | None = None, order: Order = iter) -> SearchState:
        """Searches, or continues a search.

        Args:
            dies_after: Number of probes after which it is killed. None: it is not.
            order: Order of training within a round.
        """
        state = new_state(self.surface, self._budget)
        trained = Trained(state, self.surface, self._noise, self._seed, self._measured, self._at_once)

        def train(probe: Probe, before: Outcome | None) -> Outcome:
            if trained.trained == dies_after:
                raise KeyboardInterrupt
            self._look(state)
            return trained(probe, before)

        lead(state, self._strategy, Journal(self.path, {"job": "invented"}), train, lambda probe: None, order)
        self._look(state)
        return state

    def _look(self, state: SearchState) -> None:
        """Notes since when the best estimate has been within 5 % of the best point, in reference runs."""
        if not state.cold or not state.reference or not math.isfinite(state.reference_samples):
            return
        late = self.surface.time(state, state.estimates()[0].settings) / self.surface.best(state)
        self.within = min(self.within, state.spent / state.one_run) if late <= 1.05 else math.inf

    def lateness(self, state: SearchState) -> float:
        """Returns the ratio of the time of the answer to the time of the best point."""
        winner = answer_of(state, JOB).winner
        return math.inf if winner is None else self.surface.time(state, winner.settings) / self.surface.best(state)
