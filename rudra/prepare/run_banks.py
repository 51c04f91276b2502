"""Times of the banks of a recorded run, whose learners compute together before each average of their replicas."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rudra.core.messages import Rows
from rudra.errors import ConfigError
from rudra.prepare.points import at
from rudra.prepare.run_network import ROWS
from topologies import Plan


class RowsAndBanks(NamedTuple):
    """Mini-batches of single learners, and times of banks.

    Attributes:
        rows: Rows of `records.MINIBATCH`. Their `compute_s` is the time of one learner without the others of its bank.
        seconds: m -> seconds until each of m learners of a bank has computed a mini-batch. Empty: the run has no banks.
    """

    rows: Rows
    seconds: Mapping[int, float]


def without_banks(rows: Rows, plan: Plan, where: str) -> RowsAndBanks:
    """Returns the rows of a run as if each learner had computed without the others of its bank.

    All learners of a bank begin together, after an average. So the longest time of a learner is the time of the bank,
    in any form. Rows of sizes that the run had only for a short time are left out.

    Args:
        rows: All mini-batches of the run.
        plan: Role assignment. It averages replicas without a server.
        where: Beginning of error messages.

    Raises:
        ConfigError: The run is too short.
    """
    host = hosts(plan)[rows["learner"]]
    rows = rows[order := np.lexsort((rows["timestamp"], host))]
    starts = np.flatnonzero(np.diff(host[order], prepend=-1) | np.diff(rows["timestamp"], prepend=-1))
    sizes = np.diff(starts, append=len(rows))
    longest = np.maximum.reduceat(rows["compute_s"], starts) if len(rows) else np.empty(0)
    known = {int(m): longest[sizes == m] for m in np.unique(sizes)}
    seconds = {m: float(np.median(times)) for m, times in known.items() if len(times) >= ROWS}
    if not seconds:
        raise ConfigError(f"{where}: costs need {ROWS} updates of a bank; use a longer run")
    alone_s = at(seconds, 1)
    shorter = np.array([alone_s / seconds[m] if m in seconds else np.nan for m in sizes.tolist()])
    rows["compute_s"] = np.repeat(longest * shorter, sizes)
    rows = rows[np.argsort(order)]
    return RowsAndBanks(rows[np.isfinite(rows["compute_s"])], seconds)


def hosts(plan: Plan) -> npt.NDArray[np.int64]:
    """Returns the world rank of each learner, by its number."""
    found = np.zeros(plan.learner_numbers, np.int64)
    for role in plan.learners:
        found[plan.roles[role].index] = plan.roles[role].world_rank
    return found
