"""Goals of a training run and its kept epochs: decisions that follow from evaluations of the weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rudra.core import records
from rudra.core.actions import Action, Record, Send
from rudra.core.messages import PlateauReached, TargetReached
from rudra.job.job import Job
from rudra.job.target import Best, Target, Watch

Scores = Mapping[str, float | None]


class Goals:
    """Target, patience and plateau of a training.

    Args:
        role: id of the statistics server.
        server: id of the owner of the weights, which receives the decisions.
        job: resolved job.
    """

    def __init__(self, role: int, server: int, job: Job) -> None:
        self._role, self._server = role, server
        target = job.training.target
        self._target, self._stops_at_target = target, job.training.stop_at_target
        self._watch = None if target is None else Watch(Target.parse(target), job.training.target_window)
        self._patience, self._plateau = job.training.patience, job.optimizer.plateau
        self._progress = Best(target)  # for patience and plateau
        self._worse = self._lowered = 0  # evaluations since progress or a drop of the rate, and number of drops
        self._ended = False  # whether the training had to end before it was resumed

    @property
    def split(self) -> str:
        """Data split whose evaluations decide."""
        return "test" if self._target is None else Target.parse(self._target).split

    def recall(self, scores: Scores) -> None:
        """Takes note of an evaluation from before the checkpoint that the run resumes from."""
        reached = self._reached(scores) and self._stops_at_target
        tired, _ = self._look_for_progress(scores)
        self._ended |= reached or tired

    def resume(self) -> list[Action]:
        """Sends the owner the decisions from before the run was resumed."""
        lowered = [self._lower()] if self._lowered else []
        return [*lowered, *([self._end()] if self._ended else ())]

    def judge(self, row: np.void, scores: Scores) -> list[Action]:
        """Decides after the evaluation of an epoch, notifies the owner and records the decision.

        Args:
            row: row of the epoch, `records.EPOCH`.
            scores: scores on `split`.
        """
        actions: list[Action] = []
        if self._reached(scores):
            actions.append(_event("target", row, f"{self._target}: reached with epoch {row['epoch']}"))
            actions += [self._end()] if self._stops_at_target else []
        tired, lowers = self._look_for_progress(scores)
        if lowers:
            actions.append(self._lower())
        if tired:
            tests = f"the last {self._patience} evaluations, up to epoch {row['epoch']}, brought no new best"
            actions += [_event("patience", row, f"patience = {self._patience}: {tests}"), self._end()]
        return actions

    def _reached(self, scores: Scores) -> bool:
        """Returns whether an evaluation reaches the target for the first time."""
        if self._watch is None or not self._watch.reached(self._watch.target.of(scores)):
            return False
        self._watch = None
        return True

    def _look_for_progress(self, scores: Scores) -> tuple[bool, bool]:
        """Returns whether an evaluation ends the training for lack of progress, and whether it lowers the rate."""
        better = self._progress.improved(scores)
        self._worse = 0 if better else self._worse + 1
        lowers = self._worse == self._plateau
        if lowers:
            self._worse, self._lowered = 0, self._lowered + 1
        return not better and self._progress.since == self._patience, lowers

    def _lower(self) -> Action:
        return Send(self._server, PlateauReached(self._role, self._lowered))

    def _end(self) -> Action:
        return Send(self._server, TargetReached(self._role))


class KeptEpochs:
    """Epochs whose weights are kept in the results.

    Args:
        job: resolved job.

    Attributes:
        last: last epoch of the training, with the final weights.
    """

    def __init__(self, job: Job) -> None:
        self.last = job.training.epochs
        self._every = job.results.keep_every
        self._best = Best(job.training.target) if job.results.keep_best else None
        self._best_epoch = 0
        self._surpassed: list[int] = []  # former best epochs whose weights are still kept

    def is_kept(self, epoch: int) -> bool:
        """Returns whether the weights of an epoch are kept regardless of their scores."""
        return epoch == self.last or (self._every is not None and epoch % self._every == 0)

    def is_best(self, epoch: int, scores: Scores) -> bool:
        """Returns whether the weights of an epoch are kept only because they are the best ones yet."""
        if self._best is None or not self._best.improved(scores):
            return False
        if self._best_epoch and not self.is_kept(self._best_epoch):
            self._surpassed.append(self._best_epoch)
        self._best_epoch = epoch
        return not self.is_kept(epoch)

    def surpassed(self) -> tuple[int, ...]:
        """Returns the epochs whose weights are no longer kept, each only once."""
        surpassed, self._surpassed = tuple(self._surpassed), []
        return surpassed


def scores_of(row: np.void, metrics: list[tuple[Any, ...]], split: str) -> dict[str, float]:
    """Returns the scores of an epoch on a split."""
    scores = {name: float(row[f"{split}_{name}"]) for name in ("loss", "error")}
    return scores | {name: value for _, _, of, name, value in metrics if of == split}


def _event(kind: str, row: np.void, text: str) -> Record:
    """Returns an action that records an event of an epoch."""
    about = (kind.encode(), -1, 0, row["timestamp"], 0, row["time_s"], 0.0, text.encode()[:512])
    return Record("events", np.array([about], records.EVENT))
