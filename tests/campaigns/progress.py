"""Progress of a campaign: a bar on a terminal, and plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from tqdm import tqdm

AT_ONCE = 2
"""Runs in parallel: each waits now and then, and more of them would only be slow."""

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
        """Counts faults whose runs have ended; `about` names them and their outcome."""
        self._done += faults
        self._bar.update(faults)
        if self._bar.disable:
            minutes = (time.monotonic() - self._began) / 60
            self.note(f"{self._done} of {self._total} faults, {minutes:.1f} min: {about}")

    def note(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._bar.write(f"campaign: {text}", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        self._bar.close()


def side_by_side(
    run: Callable[[Task], Result], tasks: Sequence[Task], tell: Callable[[Task, Result], str]
) -> Iterator[tuple[Task, Result]]:
    """Runs tasks, a few at a time, and yields each task with its result, in order.

    Args:
        run: runs a task.
        tasks: one task for each fault.
        tell: describes a task and its result in a few words.
    """
    progress = Progress(len(tasks))
    with ThreadPoolExecutor(AT_ONCE) as pool, ExitStack() as stack:
        stack.callback(progress.close)
        stack.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C waits only for runs that have begun
        for task, result in zip(tasks, pool.map(run, tasks), strict=True):
            progress.done(tell(task, result))
            yield task, result
