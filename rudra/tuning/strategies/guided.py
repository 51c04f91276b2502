"""Guided by prices, by the momentum that asynchrony adds, and by the noise of gradients: the default.

1. Cold start and reference run.
2. One epoch of the fastest point of every protocol, and of families that are faster than the best point. A family has
   the same number of gradients in an update. Each point has the effective rate of the cold start, and as much less
   momentum as its staleness adds. Much faster families have longer probes, because their samples cost little time.
3. Neighbours of the best point: other learning rates, momenta, mini-batch sizes and periods, until none is better. Then
   the other families, and neighbours of the next points. Last come smaller steps of rate and momentum,
   the outer optimiser, and the average over time. A new best point has a second epoch before others are compared with
   it.
4. The best three are prolonged, each by as much as it has, until one has reached the target and no other can be sooner.
5. Winner, runner-up and the job as given are trained from the initial weights to the target, with fresh seeds.

Steps 2 and 3 ask for one probe at a time, because each one drops others. A point is dropped if it would be later than
the best prediction even with samples that are worth 1.25 times the best known worth, or if a probe diverged that was no
harder in any respect.

Source of the momentum rule: omnivore.txt §IV-C, theorem 1: g groups act like a momentum of 1 - 1/g.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rudra.tuning.probes import Probe
from rudra.tuning.rounds import (
    FINALISTS,
    LATER,
    MARGIN,
    MOMENTUM,
    RATE,
    SIZE,
    Bound,
    around,
    diverges,
    from_common,
    in_order,
    lower,
    momenta,
    prolonged,
    promising,
    rates,
    started,
    suited,
)
from rudra.tuning.space import OF_STRATEGIES, PER_DEVICE, Settings, finest
from rudra.tuning.state import SURE, SearchState, key_of

FINER_RATES, FINER_MOMENTA = (1.5, 1 / 1.5), (0.1, -0.1)
"""Factors on the learning rate, and differences of the momentum, of the last neighbours."""

FASTER, LONG = 4.0, 4
"""A family with over `FASTER` times the samples per second of the best point has probes of `LONG` epochs or more."""

ATTEMPTS = 2
"""Number of first probes of a family that may fail. If the first one diverged, the second has a lower learning rate.
If it is worse than the common checkpoint after `LONG` epochs, the second has no momentum: a tenth of its effective
rate."""


def ask(state: SearchState) -> list[Probe]:
    return in_order(state, _next, prolonged)


def _next(state: SearchState) -> list[Probe]:
    """Returns the probe of a new best point, longer, or else the most promising one that has not been tried.

    It is one probe, because each one prunes others.
    """
    if not (best := state.estimates()[0]).sure:
        return [from_common(state, best.settings, SURE)]
    first, others = _families(state)
    if not first and (longer := next(_too_short(state), None)):
        return [longer]
    near = _neighbours(state)
    wanted = itertools.chain(first, next(near, ()), others, *near, _finer(state))
    return [from_common(state, settings, 1) for settings in itertools.islice(wanted, 1)]


def _too_short(state: SearchState) -> Iterator[Probe]:
    """Best probes of families that are much faster than the best point, twice as long, up to the reference's samples.

    Their samples cost little time, and may be worth more later.
    """
    best, *others = state.estimates()
    most = max(LONG, math.ceil(state.reference_samples / state.training_samples))
    seen = {state.batch(best.settings).family}
    for estimate in others:
        family = state.batch(estimate.settings).family
        if _is_lost(state, state.probes[from_common(state, estimate.settings, 1).name]):
            continue
        faster = state.rate(estimate.settings) > FASTER * state.rate(best.settings)
        if family not in seen and faster and not estimate.certain and estimate.epochs < most:
            yield from_common(state, estimate.settings, min(2 * estimate.epochs, most))
        seen.add(family)


def _families(state: SearchState) -> tuple[list[Settings], list[Settings]]:
    """Returns the first settings of the families without a probe that may win, and first of all the obvious ones.

    Those belong to a protocol without a probe, or would be sooner than the best one with samples of the same worth.
    """
    bound, estimates = Bound.of(state), state.estimates()
    tried = [probe for probe in state.probes.values() if probe.origin]
    diverged = Counter(state.batch(p.by_key).family for p in tried if not state.outcomes[p.name].marks)
    lost = Counter(state.batch(p.by_key).family for p in tried if _is_lost(state, p))
    count = Counter(state.batch(estimate.settings).family for estimate in estimates)
    families = {family for family in count if not 0 < lost[family] == count[family] < ATTEMPTS}
    families |= {family for family, times in diverged.items() if times >= ATTEMPTS}
    protocols = {probe.by_key["protocol.name"] for probe in tried}
    least = LATER * state.rate(estimates[0].settings)
    found: tuple[list[Settings], list[Settings]] = ([], [])
    for price in promising(state):
        settings = price.point.settings
        family = state.batch(settings).family
        if family not in families and not bound.excludes(price):
            obvious = price.samples_per_s > least or settings["protocol.name"] not in protocols
            first = started(state, price)
            if lost[family] and MOMENTUM in first and MOMENTUM not in state.given:
                first[MOMENTUM] = 0.0
            found[not obvious].append({**first, RATE: lower(state, first[RATE], diverged[family])})
    return found


def _is_lost(state: SearchState, probe: Probe) -> bool:
    """Returns whether a long probe is still worse than the common checkpoint: its steps are much too large."""
    marks = state.outcomes[probe.name].marks
    return len(marks) >= LONG and marks[-1].loss > state.common_loss


def _neighbours(state: SearchState) -> Iterator[list[Settings]]:
    """Neighbours of the best, then of the next ones, as far as they have not been tried and may win.

    A key whose neighbour on the other side was tried comes first: the best point is better than that neighbour, so the
    next step has a good direction. If the noise scale is known, batches near it come first.
    """
    bound = Bound.of(state)
    tried = {probe.settings for probe in state.probes.values() if probe.origin}
    for estimate in state.estimates()[:FINALISTS]:
        usual = estimate.settings.keys() <= OF_STRATEGIES | state.price(estimate.settings).point.settings.keys()
        if usual and estimate.time_s <= MARGIN * LATER * bound.soonest_s:
            near = [*_around(state, estimate.settings)]
            known = {key for key, settings in near if key_of(settings) in tried}
            new = [
                (key, settings)
                for key, settings in near
                if key_of(settings) not in tried
                and not bound.excludes(state.price(settings))
                and not diverges(state, settings)
            ]
            new.sort(key=lambda each: (each[0] not in known, _off(state, each[1]), -state.rate(each[1])))
            yield [settings for _, settings in new]


def _finer(state: SearchState) -> Iterator[Settings]:
    """Smaller steps of rate and momentum from the best point, then its outer optimiser and its average over time."""
    tried = {probe.settings for probe in state.probes.values() if probe.origin}
    best = state.estimates()[0].settings
    steps = [] if RATE in state.given else [{RATE: float(f"{best[RATE] * each:.3g}")} for each in FINER_RATES]
    if MOMENTUM in best and MOMENTUM not in state.given:
        near = (round(best[MOMENTUM] + each, 2) for each in FINER_MOMENTA)
        steps += [{MOMENTUM: momentum} for momentum in near if 0 <= momentum < 1]
    others = finest(best, state.job_with(best), state.given)
    for settings in itertools.chain(({**best, **step} for step in steps), others):
        if key_of(settings) not in tried and not diverges(state, settings):
            yield settings


def _off(state: SearchState, settings: Settings) -> float:
    """Returns how far a batch is from the noise scale, as the logarithm of their ratio. Zero: unknown."""
    return abs(math.log(state.batch(settings).samples / state.noise.samples)) if state.noise else 0.0


def _around(state: SearchState, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Settings that differ from some settings by one step of one key, with this key.

    The learning rate suits the step: the noise of another batch, or another momentum, so that rate / (1 - momentum)
    stays.
    """
    series: dict[tuple[str, ...], Sequence[Any]] = {
        (key,): [(value,) for value in values] for key, values in ((RATE, rates(state)), (MOMENTUM, momenta(state)))
    }
    outer = ("averaging.outer.learning_rate", "averaging.outer.momentum")
    for keys in ((SIZE,), ("averaging.period",), *((key,) for key in outer), PER_DEVICE):
        if not settings.keys() >= {*keys}:
            continue
        found = {
            tuple(price.point.settings[key] for key in keys)
            for price in state.prices
            if price.dominated is None
            and all(settings.get(k) == v for k, v in price.point.settings.items() if k not in keys)
            and {*keys} <= price.point.settings.keys()
        }
        series[keys] = sorted(found, key=lambda values: values[-1])
    for keys, values in series.items():
        own = tuple(settings.get(key) for key in keys)
        if own in values:
            for other in around(values, own):
                if other != own:
                    changed = {**settings, **dict(zip(keys, other, strict=True))}
                    if keys != (RATE,):
                        changed[RATE] = suited(state, settings, changed)
                    yield keys[0], changed
