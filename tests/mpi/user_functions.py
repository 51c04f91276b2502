"""What jobs name besides models and data: metrics, hooks, decisions, a correction and a task, good and bad."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import rudra
from protocols import Correction, GradientRecord
from rudra.compute import tasks


def always(output: Any, target: torch.Tensor) -> float:
    """A metric that never gets better."""
    return 1.0


def priority(output: Any, target: torch.Tensor) -> float:
    """A metric that is the nice value of the process."""
    return float(os.nice(0))


def note(moment: rudra.Moment, directory: str) -> None:
    """A hook: a line of JSON in a file of its role."""
    told = {name: getattr(moment, name) for name in ("at", "timestamp", "time_s", "epoch", "step", "loss", "row")}
    floats = b"".join(array.tobytes() for array in moment.weights().values())
    told |= {"rank": moment.world_rank, "pid": os.getpid()}
    told["sha256"] = hashlib.sha256(floats).hexdigest() if floats else ""
    with Path(directory, f"{moment.role}.jsonl").open("a") as file:
        print(json.dumps(told), file=file)


def fail(moment: rudra.Moment, at: int = 0, how: str = "raise") -> None:
    """A hook that has a bug: in one epoch, one of a learner's mini-batches, one update, or at the end."""
    number = moment.epoch if moment.at == "epoch" else moment.timestamp if moment.step is None else moment.step
    if moment.at == "end" or at == number:
        if how == "exit":
            sys.exit("enough")
        raise KeyboardInterrupt if how == "interrupt" else ValueError("the user's own bug")


def calm_down(moment: rudra.Moment, after: int) -> dict[str, Any] | None:
    """A function of `[decisions]`: from some epoch on it wants a smaller rate and momentum, and a larger batch."""
    assert len(moment.history) == moment.epoch
    if moment.history[-1]["epoch"] < after:
        return None
    return {"optimizer": {"learning_rate": 0.02, "momentum": 0.5}, "training": {"minibatch_size": 4}}


def decide_badly(moment: rudra.Moment, after: int) -> dict[str, Any]:
    return {"optimizer": {"speed": after}}


class Wrong(Correction):
    """Adds vectors of different lengths."""

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        if (record.learner, record.step) == (1, 2):
            gradient += weights[:7]


STEEP = 1e8


class Steep(tasks.Classification):
    """Gradients have numbers that float16 has no room for."""

    def loss(self, output: Any, target: Any, reduction: tasks.LossReduction = "mean") -> torch.Tensor:
        return STEEP * super().loss(output, target, reduction)
