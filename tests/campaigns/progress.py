"""How far a campaign is: a bar on a terminal, and plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from tqdm import tqdm

AT_ONCE = 2
"""Runs side by side, because each waits now and then; more of them would only be slow."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class Progress:
    """Counts the faults of a campaign.

    Args:
        total: number of faults.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._bar = tqdm(total=total, unit=" faults", leave=False, disable=None)  # None: no bar but on a terminal

    def done(self, about: str, faults: int = 1) -> None:
        """Some faults are over; `about` says which, and what came of them."""
        self._done += faults
        self._bar.update(faults)
        if self._bar.disable:
            minutes = (time.monotonic() - self._began) / 60
            self.note(f"{self._done} of {self._total} faults, {minutes:.1f} min: {about}")

    def note(self, text: str) -> None:
        """Says something that is to be seen, beside the bar too."""
        self._bar.write(f"campaign: {text}", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        self._bar.close()


def side_by_side(
    run: Callable[[Task], Result], tasks: Sequence[Task], tell: Callable[[Task, Result], str]
) -> Iterator[tuple[Task, Result]]:
    """Runs tasks, a few at a time, and yields each with what came of it, in order.

    Args:
        run: runs a task.
        tasks: one for each fault.
        tell: says in a few words what came of a task.
    """
    progress = Progress(len(tasks))
    with ThreadPoolExecutor(AT_ONCE) as pool, ExitStack() as stack:
        stack.callback(progress.close)
        stack.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C waits for those under way alone
        for task, result in zip(tasks, pool.map(run, tasks), strict=True):
            progress.done(tell(task, result))
            yield task, result
