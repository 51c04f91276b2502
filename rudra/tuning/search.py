"""The search of `rudra tune`: prices, then rounds of probes that a strategy asks for, then an answer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rudra.errors import ConfigError, RunError
from rudra.tuning.journal import Journal, outcomes
from rudra.tuning.probes import Probe, Train
from rudra.tuning.rounds import dropped
from rudra.tuning.state import SearchState, Strategy, key_of

Order = Callable[[Sequence[Probe]], Iterable[Probe]]
"""Returns the probes of a round in the order of their training."""


def lead(
    state: SearchState,
    strategy: Strategy,
    journal: Journal,
    train: Train,
    say: Callable[[Probe], Any],
    order: Order = iter,
) -> None:
    """Trains probes until the strategy asks for none.

    The strategy gets outcomes round by round, in the order of asking. So a search that continues from its journal ends
    as if it had not been stopped. The journal also gets every point that is dropped, with the reason.

    Args:
        state: State of the search, without outcomes.
        strategy: Decides what to train.
        journal: Earlier measurements. It is extended.
        train: Trains a probe.
        say: Is called with every probe before it is trained.
        order: Order of training within a round. Default: the order of asking.

    Raises:
        ConfigError: The first evaluation meets the target, and nothing is left to compare.
        RunError: The strategy asks again for probes that have ended.
    """
    known = {(probe.name, probe.epochs): outcome for probe, outcome in outcomes(journal.entries)}
    drops = {key_of(entry["point"]) for entry in journal.of("drop")}
    while asked := strategy(state):
        if all(state.probes.get(probe.name) == probe for probe in asked):
            raise RunError(f"{state.job.name}: the strategy asks again for probes that have ended, and would never end")
        for probe in order(asked):
            if (probe.name, probe.epochs) not in known:
                say(probe)
                outcome = train(probe, state.outcomes.get(probe.name))
                about = {"origin": probe.origin, "epochs": probe.epochs, "seed": probe.seed}
                journal.add(
                    {"kind": "probe", "name": probe.name, **about, "settings": probe.by_key, **outcome._asdict()}
                )
                known[probe.name, probe.epochs] = outcome
        for probe in asked:
            state.tell(probe, known[probe.name, probe.epochs])
        if state.cold is not None and state.first_at_target(state.cold) is not None:
            raise ConfigError(
                f"{state.job.name}: --target: the first evaluation already meets {state.target.text}; use a tighter one"
            )
        for price, reason in dropped(state):
            if (key := key_of(price.point.settings)) not in drops:
                drops.add(key)
                journal.add({"kind": "drop", "point": price.point.settings, "reason": reason})
