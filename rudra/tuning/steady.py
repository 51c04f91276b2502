"""Whether the machine stays as fast as it was: times of probes on real ranks can only be compared if it does.

The journal keeps what was measured. The answer says if the speed has changed.
"""

from collections.abc import Callable

from rudra.log import log
from rudra.tuning.journal import Journal
from rudra.tuning.probes import Outcome, Probe, Train

EVERY = 8
"""Number of probes between two measurements."""

DRIFT = 0.1
"""Largest change that needs no note, as a fraction."""


def watched(train: Train, timed: Callable[[], float], journal: Journal, name: str) -> Train:
    """Returns a function that trains probes, and measures the speed of the machine before every 8th one.

    A measurement that differs by more than 10 % is repeated, and the better one counts. Entries "drift" of the journal.

    Args:
        train: Trains a probe.
        timed: Trains the same few samples each time, and returns the seconds.
        journal: Journal of the search.
        name: Name of the job, for messages.
    """

    def trained(probe: Probe, before: Outcome | None) -> Outcome:
        count = sum(1 for _ in journal.of("probe"))
        if count % EVERY == 0 and all(entry["at"] != count for entry in journal.of("drift")):
            seconds = [timed()]
            if count == 0 or abs(_drift(journal, seconds)) > DRIFT:
                seconds.append(timed())
            journal.add({"kind": "drift", "at": count, "seconds": seconds})
            if abs(now := _drift(journal, seconds)) > DRIFT:
                log.warning(f"{name}: the machine is {_text(now)} than when the search began")
        return train(probe, before)

    return trained


def notes(journal: Journal) -> tuple[str, ...]:
    """Returns what an answer says about the speed of the machine. Empty: it was steady."""
    drifts = [_drift(journal, entry["seconds"]) for entry in journal.of("drift")]
    busy = [drift for drift in drifts if abs(drift) > DRIFT]
    if not busy:
        return ()
    worst = _text(max(busy, key=abs))
    return (f"the machine was up to {worst} than when the search began, at {len(busy)} of {len(drifts)} measurements",)


def _drift(journal: Journal, seconds: list[float]) -> float:
    """Returns how much longer than at the beginning of the search the same samples take, as a fraction."""
    first = next(journal.of("drift"), None)
    return 0.0 if first is None else min(seconds) / min(first["seconds"]) - 1


def _text(drift: float) -> str:
    return f"{abs(drift):.0%} {'slower' if drift > 0 else 'faster'}"
