"""Bayesian optimisation: Optuna's Gaussian process chooses the next point of each protocol. Needs the extra `tune`.

Every protocol has a study of its own, because protocols have different settings. A round asks each study for one point,
as long as the best point of its protocol may still win. Studies are made from the state in every round, and kept in
memory. So a search that was stopped continues as if it had not been.

Source: Watanabe et al., `optuna.samplers.GPSampler`.
"""

import importlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rudra.errors import ConfigError
from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    MOMENTUM,
    RATE,
    from_common,
    in_order,
    momenta,
    prolonged,
    promising,
    rates,
    started,
)
from rudra.tuning.space import Settings
from rudra.tuning.state import SearchState, key_of

APART = 1.5
"""Largest ratio of the time of a protocol to the time of the best one. Beyond it, a protocol gets no more probes."""

DIVERGED = math.log(4)
"""Distance of points that diverge, which have no time, from the latest time, in logarithms of seconds."""

STARTS = 3
"""Points of a protocol before its Gaussian process chooses."""

NEAR = 2
"""Steps of the learning rate around the rate of the cold start."""

Coordinates = tuple[float, ...]
"""λ, gradients in an update, μ, period, learning rate and momentum of a point."""


def ask(state: SearchState) -> list[Probe]:
    optuna = _optuna()
    return in_order(state, lambda now: _round(optuna, now), prolonged)


def _optuna() -> Any:
    """Returns Optuna.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        found: Any = importlib.import_module("optuna")
    except ImportError:
        raise ConfigError("--strategy bayes needs optuna: pip install 'rudra[tune]'") from None
    found.logging.set_verbosity(found.logging.ERROR)
    return found


def _round(optuna: Any, state: SearchState) -> Iterator[Probe]:
    """One point of each protocol that may still win."""
    times = _times(state)
    for price in {price.point.settings["protocol.name"]: price for price in promising(state)[::-1]}.values():
        protocol = price.point.settings["protocol.name"]
        known = times.get(protocol, {})
        if not known:
            yield from_common(state, started(state, price), 1)
        elif min(known.values()) <= math.log(APART) + min(min(each.values()) for each in times.values()):
            settings = _suggested(optuna, _candidates(state, protocol), known, len(state.probes))
            if settings is not None:
                yield from_common(state, settings, 1)


def _times(state: SearchState) -> dict[str, dict[Coordinates, float]]:
    """Returns the logarithm of the time of every point that was tried, by protocol."""
    found = {probe.settings: math.inf for probe in state.probes.values() if probe.origin}
    found |= {key_of(estimate.settings): estimate.time_s for estimate in state.estimates()}
    latest = max(time_s for time_s in found.values() if math.isfinite(time_s))
    times: dict[str, dict[Coordinates, float]] = {}
    for key, time_s in found.items():
        settings = Probe(key, "", 0).by_key
        value = math.log(time_s) if math.isfinite(time_s) else math.log(latest) + DIVERGED
        times.setdefault(settings["protocol.name"], {})[_coordinates(state, settings)] = value
    return times


def _candidates(state: SearchState, protocol: str) -> dict[Coordinates, Settings]:
    """Returns the points of a protocol that a study may choose, each on the fastest topology."""
    assert state.cold is not None
    series = rates(state)
    place = series.index(state.cold.by_key[RATE])
    near = series[max(0, place - NEAR) : place + NEAR + 1]
    own_momenta: list[Any] = momenta(state) or [None]
    found: dict[Coordinates, Settings] = {}
    for price in sorted(state.prices, key=lambda price: -price.samples_per_s):
        if price.point.settings["protocol.name"] == protocol:
            for rate, momentum in itertools.product(near, own_momenta):
                settings = {**price.point.settings, RATE: rate}
                settings |= {} if momentum is None or MOMENTUM in settings else {MOMENTUM: momentum}
                found.setdefault(_coordinates(state, settings), settings)
    return found


def _coordinates(state: SearchState, settings: Settings) -> Coordinates:
    job = state.price(settings).point.job
    size, own = job.training.minibatch_size, job.optimizer
    gradients, period = state.batch(settings).samples // size, settings.get("averaging.period") or 0
    rate, momentum = settings.get(RATE, own.learning_rate), settings.get(MOMENTUM, own.momentum)
    return job.learners, gradients, size, period, rate, momentum


def _suggested(
    optuna: Any, candidates: Mapping[Coordinates, Settings], known: Mapping[Coordinates, float], seed: int
) -> Settings | None:
    """Returns the candidate without a probe that is nearest to what a study suggests. None: there is none."""
    free = [each for each in candidates if each not in known]
    if not free:
        return None
    axes = [sorted({*values}) for values in zip(*candidates, *known, strict=True)]

    def places(point: Coordinates) -> list[int]:
        return [axis.index(value) for axis, value in zip(axes, point, strict=True)]

    kinds = {
        str(i): optuna.distributions.IntDistribution(0, len(axis) - 1) for i, axis in enumerate(axes) if len(axis) > 1
    }
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTS)
    study = optuna.create_study(sampler=sampler)
    for point, value in known.items():
        parameters = {str(i): place for i, place in enumerate(places(point)) if str(i) in kinds}
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=kinds, value=value))
    wanted = study.ask(kinds).params

    def off(point: Coordinates) -> int:
        return sum((places(point)[int(name)] - place) ** 2 for name, place in wanted.items())

    return candidates[min(free, key=off)]
