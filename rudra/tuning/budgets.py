"""The budget of a search: how many samples its probes may train, as reference runs or as minutes.

Minutes become samples once, by the wall time of the first probe. Nothing depends on the clock afterwards: the journal
keeps the number.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from rudra.errors import ConfigError
from rudra.log import log
from rudra.tuning.journal import Journal
from rudra.tuning.probes import Outcome, Probe, Train
from rudra.tuning.rounds import reference
from rudra.tuning.state import SearchState

_UNITS = {"m": 1.0, "h": 60.0}


class Budget(NamedTuple):
    """Budget of a search.

    Attributes:
        text: As the user wrote it.
        runs: Number of reference runs whose samples may be trained. Infinity: only the minutes count.
        minutes: Wall time. None: only the reference runs count.
    """

    text: str
    runs: float
    minutes: float | None = None

    @classmethod
    def parse(cls, text: str | float) -> "Budget":
        """Returns a budget from a text such as 8x, 15m or 2h, or from a number of reference runs.

        Raises:
            ConfigError: It is no budget, or less than one reference run.
        """
        text = text if isinstance(text, str) else f"{text:.15g}x"
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([xmh])", text)
        if found is None or not float(found[1]):
            raise ConfigError(
                f"--budget {text}: is no budget; use reference runs such as 8x, or a time such as 15m or 2h"
            )
        number, unit = float(found[1]), found[2]
        if unit != "x":
            return cls(text, math.inf, number * _UNITS[unit])
        if number < 1:
            raise ConfigError(f"--budget {text}: is less than one reference run; use 1x or more")
        return cls(text, number)


def metered(
    train: Train, budget: Budget, state: SearchState, journal: Journal, wall_s: Callable[[Probe], float]
) -> Train:
    """Returns a function that trains probes within the budget.

    The first probe that has trained converts minutes to samples: entry "budget" of the journal.

    Args:
        train: Trains a probe.
        budget: Budget of the search.
        state: State of the search, without outcomes. It gets the limit.
        journal: Journal of the search.
        wall_s: Returns how long a probe was trained, in seconds.

    Raises:
        ConfigError: The minutes are too few for a reference run. The returned function also raises it.
    """

    def limit() -> None:
        for entry in journal.of("budget"):
            state.limit = entry["samples"]
            if state.limit < (least := 2 * state.training_samples):
                raise _too_small(budget, least, entry["samples_per_s"])

    def trained(probe: Probe, before: Outcome | None) -> Outcome:
        outcome = train(probe, before)
        if budget.minutes is not None and outcome.marks and state.limit == math.inf:
            rate = outcome.marks[-1].samples / max(wall_s(probe), 1e-9)
            samples = round(60 * budget.minutes * rate)
            journal.add({"kind": "budget", "samples": samples, "samples_per_s": rate})
            epochs = samples / state.training_samples
            log.info(f"{state.job.name}: --budget {budget.text} means {samples:,} samples, or {epochs:.1f} epochs")
            limit()
        return outcome

    limit()
    return trained


def check_reference(budget: Budget, state: SearchState, journal: Journal) -> None:
    """Raises ConfigError if a search has ended because its minutes are too few for the reference run."""
    entry = next(journal.of("budget"), None)
    if entry is None or state.cold is None:
        return
    for wanted in () if state.affordable(probes := reference(state)) else probes:
        done = state.outcomes.get(wanted.name)
        more = wanted.epochs - (len(done.marks) if done else 0)
        raise _too_small(budget, state.spent + more * state.training_samples, entry["samples_per_s"])


def _too_small(budget: Budget, least: float, samples_per_s: float) -> ConfigError:
    minutes = math.ceil(10 * least / samples_per_s / 60) / 10
    return ConfigError(
        f"--budget {budget.text}: is less than one reference run, which needs {least:,} samples or more; "
        f"use {minutes:g}m or more"
    )
