"""Jobs, models and data of `rudra bench gpu`, and the hook that counts on a rank what its steps cost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rudra
from benchmarks.gpu_device import MACHINES, StepCounter
from benchmarks.gpu_rows import Setting
from rudra.bench.ranks import MOMENTUM, RATE
from rudra.job.job import Job

SHAPES = {"lenet": (1, 28, 28), "resnet32": (3, 32, 32), "vgg16": (3, 32, 32)}
CLASSES = 10
WARM, COUNTED, PROFILED = 10, 20, 10
"""Steps of a learner: before `watch` counts, while it counts waits and allocations, and while it records copies."""

Pair = tuple[TensorDataset, TensorDataset]


def images(shape: Sequence[int], count: int, largest: int = CLASSES - 1) -> Pair:
    """Returns a training and a test set of noise. Labels are 0 to `largest`."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *shape, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    labels[-1] = largest
    return TensorDataset(inputs, labels), TensorDataset(inputs[:16], labels[:16])


class Hungry(nn.Module):
    """Model that needs more memory than any device has, once it trains."""

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(input_shape[0], classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.empty(1 << 45, dtype=torch.uint8, device=inputs.device)
        output: torch.Tensor = self.last(inputs[:, :, 0, 0])
        return output


def learner_job(
    setting: Setting, model: str, size: int, steps: int, options: dict[str, Any] | None = None, samples: int = 1 << 13
) -> Job:
    """Returns a job of one learner on the measured device, on images of noise, without evaluations.

    Args:
        setting: Setting of the benchmark.
        model: Name of a shipped model for images.
        size: Mini-batch.
        steps: Number of steps at least. The job has whole epochs.
        options: Options of the model.
        samples: Number of samples at most.
    """
    count = max(size, min(steps * size, samples // size * size))
    return Job(
        name="bench",
        model={"name": model, "options": options or {}},
        data={"name": images, "classes": CLASSES, "options": {"shape": list(SHAPES[model]), "count": count}},
        training={"epochs": -(-steps * size // count), "minibatch_size": size, "evaluate": False},
        optimizer={"learning_rate": RATE, "momentum": MOMENTUM},
        protocol={"name": "hardsync", "modulation": "none"},
        cluster={"learners": 1, "device": setting.machine.in_jobs},
    )


counters: dict[str, StepCounter] = {}
"""Counters of this rank by the files that `watch` writes."""


def watch(moment: rudra.Moment, device: str, file: str) -> None:
    """Counts what the steps of a learner cost, as a hook of it. Writes the sums as a JSON file.

    Args:
        moment: Moment after a gradient.
        device: Name in `MACHINES`.
        file: File to write.
    """
    if moment.step == WARM:
        counters[file] = MACHINES[device]().counter()
        counters[file].start()
    elif moment.step == WARM + COUNTED:
        Path(file).write_text(json.dumps(counters[file].stop()), encoding="utf-8")
        counters[file].start_copies()
    elif moment.step == WARM + COUNTED + PROFILED:
        found = json.loads(Path(file).read_text(encoding="utf-8")) | counters[file].stop_copies()
        found["peak MB"] = MACHINES[device]().peak_mb()
        Path(file).write_text(json.dumps(found), encoding="utf-8")
