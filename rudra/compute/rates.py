"""Learning rates in the memory of a device: a recorded step that reads them there serves any rate."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from rudra.compute.optim import Rates

ODD = 1 + 2**-30
"""Factor of the rate in a trial. It gives a rate that float32 rounds."""


def rounds_alike(
    step: Callable[[float, Rates], None], state: Sequence[torch.Tensor], rates: Sequence[float], rate: float
) -> bool:
    """Finds out by a trial whether an optimiser that reads its rates in memory rounds as usual.

    Args:
        step: (rate, memory with the rates, or nothing) -> None. Makes a step.
        state: All tensors that a step changes. They are the same afterwards.
        rates: Numbers for that memory at `rate`. Empty: rates cannot be in memory.
        rate: Rate of the trial.
    """
    if not rates:
        return False
    before = [each.clone() for each in state]
    found = []
    for memory in ((), tuple(torch.tensor(each, dtype=torch.float32, device=state[0].device) for each in rates)):
        with suppress(RuntimeError, TypeError, ValueError):  # torch refuses such rates
            step(rate, memory)
            found.append([each.clone() for each in state])
        for now, saved in zip(state, before, strict=True):
            now.copy_(saved)
    return len(found) == 2 and all(torch.equal(*pair) for pair in zip(*found, strict=True))
