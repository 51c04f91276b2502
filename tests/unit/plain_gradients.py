"""What a job's first mini-batches come to in plain torch, for tests of everything that computes gradients."""

import numpy as np
import torch
from torch.nn import functional

from rudra.compute import models
from rudra.core.work import DEALT
from rudra.data.load import load
from rudra.data.sampling import Sampler, mix, seed_all
from rudra.job.job import Job

Gradient = list[torch.Tensor]
"""Of each parameter that is trained."""


def flattened(tensors: Gradient) -> torch.Tensor:
    return torch.cat([tensor.detach().to_dense().flatten() for tensor in tensors])


def initial(job: Job) -> torch.Tensor:
    """The parameters that are trained, before training."""
    info = load(job.data, test=False, seed=job.training.seed).info
    return flattened([p for p in models.build(job.model, info, job.training.seed).parameters() if p.requires_grad])


def first_gradients(job: Job, microbatches: int = 1) -> list[Gradient]:
    """The gradient of each learner's first mini-batch, added up over its parts one after another.

    A learner of protocol hogbatch is dealt `training.minibatch_size` samples.
    """
    data, seed, size = (
        load(job.data, test=False, seed=job.training.seed),
        job.training.seed,
        job.training.minibatch_size,
    )
    split, found = data.training, []
    for learner in range(job.learners):
        model = models.build(job.model, data.info, seed).train()
        sampler = Sampler(seed, DEALT if job.scheduled else learner, len(split))
        inputs, target = split.batch(sampler.indices(0, size))
        seed_all(mix(seed, learner, 0))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for part in np.array_split(np.arange(size), microbatches):
            model.zero_grad()
            functional.cross_entropy(model(inputs[part]), target[part]).backward()
            for sums, parameter in zip(total, parameters, strict=True):
                if parameter.grad is not None:
                    sums.add_(parameter.grad.to_dense(), alpha=len(part) / size)
        found.append(total)
    return found


def mean_gradient(job: Job, microbatches: int = 1) -> torch.Tensor:
    """The mean over all learners, (parameters,)."""
    return torch.stack([flattened(gradient) for gradient in first_gradients(job, microbatches)]).mean(0)
