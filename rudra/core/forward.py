"""Overlap of a forward pass with the arrival of its weights.

A forward pass needs its weights layer by layer, usually the first layers first. So it may begin when the first ones are
there, while others are under way. They come in parts: of an average by which a learner updates its own weights, or of
weights from a server. The simulator and the choice of a cut use the same formula (`EarlyTimes.rest_s`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rudra.core.backward import SHARE, TimedLayer
from rudra.core.buckets import ABREAST, COPIED_BYTES_S, kept

NeededAt = Sequence[tuple[int, float]]
"""Numbers of consecutive parameters, and the fraction of a gradient's time after which its forward pass needs them."""


class ForwardTimes:
    """Times in a forward pass when it first needs its parameters.

    Args:
        parameters: Number of parameters.
        steps: Numbers of consecutive parameters, and the fraction of a gradient's time after which the pass needs them.
            Empty: the pass needs parameters at a constant rate, the first ones first.
        share: Fraction of a gradient's time that the pass takes.

    Attributes:
        share: As passed in.
    """

    def __init__(self, parameters: int, steps: NeededAt = (), share: float = 1 - SHARE) -> None:
        self.share = share
        self._parameters = parameters
        self._stops = [*accumulate(count for count, _ in steps)]
        self._needed = [needed for _, needed in steps]

    @classmethod
    def of_layers(cls, layers: Sequence[TimedLayer]) -> "ForwardTimes":
        """Returns the pass over layers, which are in the order of the flat vector. Each needs its parameters at its
        beginning."""
        whole_s = sum(layer.seconds for layer in layers)
        if not whole_s:
            return cls(sum(layer.parameters_bytes for layer in layers) // 4)
        before_s = [*accumulate((layer.seconds - layer.backward_s for layer in layers), initial=0.0)]
        sizes = [layer.parameters_bytes // 4 for layer in layers]
        steps = [(size, seconds / whole_s) for size, seconds in zip(sizes, before_s, strict=False) if size]
        return cls(sum(sizes), steps, before_s[-1] / whole_s)

    def needed(self, part: slice) -> float:
        """Returns the fraction of a gradient's time after which the pass needs any element of a part.

        It needs elements that are not parameters at once.
        """
        if part.stop > self._parameters:
            return 0.0
        if not self._stops:
            return self.share * float(part.start / self._parameters)
        return min(self._needed[bisect_right(self._stops, part.start) : bisect_left(self._stops, part.stop) + 1])


class EarlyTimes(NamedTuple):
    """Times of a forward pass that begins while parts of its weights are under way.

    Attributes:
        share: Fraction of a gradient's time that the pass takes.
        moments: For each part that may delay the pass: the fraction of a gradient's time after which the pass needs it,
            and the time from its arrival to the arrival of the last part. In the latter, updates by this part and
            later ones do not count: they also delay the pass. Of an average it is in seconds, and of weights from a
            server in units of their transfer time.
    """

    share: float
    moments: tuple[tuple[float, float], ...]

    def rest_s(self, seconds: float, unit_s: float = 1.0) -> float:
        """Returns the time from the arrival of the last part to the end of the pass, with all updates.

        Args:
            seconds: Time of the whole gradient.
            unit_s: Unit of the times in `moments`.
        """
        return max(
            (self.share - needed) * seconds - before * unit_s for needed, before in ((self.share, 0.0), *self.moments)
        )

    def hidden_s(self, seconds: float, unit_s: float = 1.0) -> float:
        """Returns the time of the pass before the arrival of the last part. The arguments are those of `rest_s`."""
        return self.share * seconds - self.rest_s(seconds, unit_s)


def step_s(seconds: float, average_s: float, early: EarlyTimes | None) -> float:
    """Returns the time from one gradient to the next, with the update if the pass begins early.

    Args:
        seconds: Time of a gradient.
        average_s: Time from the end of a backward pass to the arrival of the last part.
        early: Times of the next forward pass. None: it begins after the last part.
    """
    return seconds + average_s - (0.0 if early is None else early.hidden_s(seconds))


def early_times(
    times: ForwardTimes,
    parts: Sequence[slice],
    arrived_s: Sequence[float],
    copies: float,
    update_s: float = 0.0,
    *,
    seconds: float = 0.0,
) -> EarlyTimes | None:
    """Returns the times of a pass after an average that arrives in parts. None: it begins after the last arrival.

    As in runs, it begins when the first parameters are there, if a learner waits for averages for longer than it
    computes, and the parts under way need longer than the copies of weights and optimiser state. The pass waits for
    each part that it needs. While it waits, it updates weights by other parts.

    Args:
        times: Times in the pass.
        parts: Parts of the flat vector.
        arrived_s: Arrival of each part, in seconds after the end of the backward pass.
        copies: Number of vectors that are copied (`rudra.core.buckets.copied`).
        update_s: Time of the update by all parts.
        seconds: Time of a gradient.
    """
    size, last_s = sum(part.stop - part.start for part in parts), max(arrived_s)
    if last_s < seconds:
        return None
    first = min(range(len(parts)), key=lambda number: parts[number].start)
    begins_s = arrived_s[first]
    if (last_s - begins_s) * COPIED_BYTES_S <= 4 * size * copies:
        return None
    found = [(0.0, last_s - begins_s - update_s)]
    later = 0
    for number in sorted(range(len(parts)), key=lambda number: arrived_s[number], reverse=True):
        if arrived_s[number] <= begins_s:
            break
        later += parts[number].stop - parts[number].start
        found.append((times.needed(parts[number]), last_s - arrived_s[number] - update_s * later / size))
    return EarlyTimes(times.share, _that_delay(found))


def pulled_times(times: ForwardTimes, parts: Sequence[slice]) -> EarlyTimes:
    """Returns the times of a pass whose weights come from a server in parts, in units of their transfer time.

    As in runs, the parts leave in their order, and a few travel at a time. The pass begins when the first parameters
    of the model are there, and waits for each part that it needs.

    Args:
        times: Times in the pass.
        parts: Parts of the flat vector that this server gives, in the order of their transfers
            (`rudra.core.bucket_rules.pull_parts`).
    """
    arrived = _crossed_s(parts, range(len(parts)), [0.0] * len(parts), 1.0)
    needed = (0.0 if part.start == 0 else times.needed(part) for part in parts)
    return EarlyTimes(times.share, _that_delay([(need, 1.0 - at) for need, at in zip(needed, arrived, strict=True)]))


def _that_delay(moments: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the moments of `EarlyTimes` that may delay a pass.

    A part that is needed later than one that arrives after it delays nothing.
    """
    ordered = sorted(moments, key=lambda moment: moment[1])
    least = [min((needed for needed, _ in ordered[:place]), default=1.0) for place in range(len(ordered))]
    return tuple(moment for moment, before in zip(ordered, least, strict=True) if moment[0] < before)


def arrivals_s(parts: Sequence[slice], final_s: Sequence[float], transfer_s: float) -> list[float]:
    """Returns when each part of an average arrives if the next forward pass may begin early, as in runs.

    Parts begin in the order of the vector as soon as they are final, but buffers before the parameters. Some parts of
    the last layers begin after all others, or when the link is free again after another part. Only a few parts travel
    at a time. They share a link that is otherwise free.

    Args:
        parts: Parts of the flat vector, those of the last layers first, buffers last (`rudra.core.buckets.parts`).
        final_s: Time when each part is final, in seconds after the end of the backward pass. It may be negative.
        transfer_s: Time of all parts on the link.

    Returns:
        Seconds after the end of the backward pass. 0: a part arrives during the pass.
    """
    late = kept(len(parts))
    last = len(parts) - 1  # the first layers or buffers, which a pass needs first
    order = sorted(range(len(parts)), key=lambda number: (number in late, number != last, parts[number].start))
    return [max(arrived_s, 0.0) for arrived_s in _crossed_s(parts, order, final_s, transfer_s, late)]


def _crossed_s(
    parts: Sequence[slice],
    order: Sequence[int],
    final_s: Sequence[float],
    transfer_s: float,
    late: frozenset[int] = frozenset(),
) -> list[float]:
    """Returns when each part has crossed a link that is otherwise free, and that a few parts share at a time.

    Args:
        parts: Parts of the flat vector.
        order: Numbers of the parts, those with priority first.
        final_s: Time when each part may begin.
        transfer_s: Time of all parts on the link.
        late: Numbers of the parts that begin after all others, or when the link is free again after another part.
    """
    size = sum(part.stop - part.start for part in parts)
    left_s = [transfer_s * (part.stop - part.start) / size for part in parts]
    waiting, active = [*order], list[int]()
    arrived_s, now, crossed = [0.0] * len(parts), min(final_s), False
    while waiting or active:
        for number in [*waiting]:
            may = number not in late or late.issuperset(waiting) or (crossed and not active)
            if len(active) < ABREAST and final_s[number] <= now and may:
                waiting.remove(number)
                active.append(number)
        coming_s = min((final_s[number] for number in waiting if final_s[number] > now), default=None)
        taken_s = min((left_s[number] for number in active), default=0.0) * len(active)
        elapsed_s = taken_s if coming_s is None or (active and now + taken_s <= coming_s) else coming_s - now
        now += elapsed_s
        for number in [*active]:
            left_s[number] -= elapsed_s / len(active)
        for number in [number for number in active if left_s[number] <= 1e-12 * transfer_s]:
            arrived_s[number], crossed = now, True
            active.remove(number)
    return arrived_s
