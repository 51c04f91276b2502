"""The bias of short probes on a noisy quadratic: raw losses prefer rates that are too small, averaged weights do not.

60 curvatures from 1 to 0.001, and gradients with the noise of a mini-batch: its covariance is proportional to the
curvature. Source: Wu et al. 2018, arXiv 1803.02021, §2.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from surfaces import JOB, Surface, prices_of

from rudra.job.target import Target
from rudra.tuning.answer import answer_of
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.probes import Outcome, Probe
from rudra.tuning.rounds import MOMENTUM, RATE, rates
from rudra.tuning.ruler import Mark
from rudra.tuning.search import lead
from rudra.tuning.state import SearchState
from rudra.tuning.strategies import guided

EPOCH = 100
"""Updates of an epoch."""

CURVATURES = np.logspace(0, -3, 60)
FIRST = 1 / CURVATURES
NOISE = 4 * np.sqrt((CURVATURES * FIRST**2).sum() / 60)
LEVEL = 0.3 * float((CURVATURES * FIRST**2).sum()) / 2
MOST = 8000
"""Updates after which a rate counts as never reaching the level."""

Numbers = NDArray[np.float64]


def loss(weights: Numbers) -> Numbers:
    return (CURVATURES * weights**2).sum(-1) / 2


class Descents:
    """Descents from the same weights with the same noise, one for each of several rates."""

    def __init__(self, rates: list[float], seed: int) -> None:
        self.rates, self._chance = np.array(rates)[:, None], np.random.default_rng(seed)
        self.weights = np.tile(FIRST, (len(rates), 1))
        self.averages = self.weights.copy()

    def step(self) -> None:
        noise = NOISE * np.sqrt(CURVATURES) * self._chance.standard_normal(len(CURVATURES))
        self.weights -= self.rates * (CURVATURES * self.weights + noise)
        self.averages += (self.weights - self.averages) / (EPOCH / 4)


def steps_to_level(rates: list[float], seed: int) -> dict[float, int]:
    """Updates after which the averaged weights are at the level, by rate."""
    descents, found = Descents(rates, seed), dict.fromkeys(rates, MOST)
    for step in range(MOST):
        descents.step()
        for rate, value in zip(rates, loss(descents.averages), strict=True):
            if value <= LEVEL:
                found[rate] = min(found[rate], step)
        if step % 100 == 0 and max(found.values()) < MOST:
            break
    return found


class Trainer:
    """Trains probes of the quadratic, from the place where the probe before them ended."""

    def __init__(self, state: SearchState, seed: int) -> None:
        self._state, self._seed = state, seed

    def __call__(self, probe: Probe, before: Outcome | None) -> Outcome:
        first = self._state.probes[probe.origin.rpartition("-")[0]] if probe.origin else None
        own, descents = probe.by_key.get(RATE, JOB.optimizer.learning_rate), Descents([0.0], self._seed + probe.seed)
        marks = []
        for epoch in range(1, probe.begins_at + probe.epochs + 1):
            descents.rates[:] = first.by_key[RATE] if first and epoch <= probe.begins_at else own
            for _ in range(EPOCH):
                descents.step()
            value = float(loss(descents.averages)[0])
            marks.append(Mark((epoch - probe.begins_at) * EPOCH, value, value, float(epoch)))
        return Outcome(tuple(marks[probe.begins_at :]))


@pytest.mark.parametrize("seed", range(2))
def test_short_probes_judge_by_averaged_weights(tmp_path: Path, seed: int) -> None:
    job = JOB.with_(optimizer={"learning_rate": 0.015})
    prices = prices_of(Surface(lambda point, sigma: 100.0, only=("hardsync",)))
    given, *others = prices
    own = next(p for p in others if p.dominated is None and p.point.job.training.minibatch_size == 8)
    target = Target("validation", "loss", False, LEVEL)
    sizes: dict[str, Any] = {"training_samples": EPOCH, "budget": 8, "longest": MOST // EPOCH}
    only = {MOMENTUM: [0.9], "optimizer.average.window": [None]}
    state = SearchState(job, target, [given, own], untimed={RATE, MOMENTUM}, given=only, **sizes)
    lead(state, guided.ask, Journal(tmp_path / NAME, {}), Trainer(state, seed), lambda probe: None)
    winner = answer_of(state, job).winner
    assert winner is not None

    stable = [rate for rate in rates(state) if 1e-3 < rate < 2]
    probes = Descents(stable, seed)
    for _ in range(EPOCH):
        probes.step()
    raw = stable[int(loss(probes.weights).argmin())]
    steps = steps_to_level(stable, seed + 10)
    assert steps[raw] >= 10 * min(steps.values())
    assert steps[winner.settings[RATE]] <= 1.5 * min(steps.values())
