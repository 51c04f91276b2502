"""Hardsync through the parameter server against torch's DistributedDataParallel on gloo."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import rudra
from rudra.compute import models
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.mpi.launch import launch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

LEARNERS, UPDATES = 2, 50


def ddp(job: rudra.Job, directory: Path) -> int:
    """One rank of plain DDP: the same samples, rate and optimiser."""
    import os

    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(directory / "store"), LEARNERS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=LEARNERS)
    split, _, info, _ = load(job.data, test=False)
    assert split is not None
    module = nn.parallel.DistributedDataParallel(models.build(job.model, info, job.training.seed))
    size = job.training.minibatch_size
    rate = job.optimizer.learning_rate * (LEARNERS * size / job.protocol.reference_batch_size) ** 0.5
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=job.optimizer.momentum)
    sampler = Sampler(job.training.seed, rank, len(split))
    for step in range(UPDATES):
        inputs, labels = split.batch(sampler.indices(step * size, size))
        optimizer.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    if rank == 0:
        np.save(directory / "ddp.npy", torch.cat([p.detach().flatten() for p in module.parameters()]).numpy())
    torch.distributed.destroy_process_group()
    return 0


def test_hardsync_equals_ddp(tmp_path: Path) -> None:
    size = 7
    job = rudra.Job(
        data={"name": "digits", "train_limit": UPDATES * LEARNERS * size},
        training={"epochs": 1, "minibatch_size": size, "seed": 11, "evaluate": False},
        optimizer={"learning_rate": 0.005, "momentum": 0.9},
        protocol={"name": "hardsync", "reference_batch_size": 8},
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
    )
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        weights = results.weights
        assert results.summary()["updates"] == UPDATES
    roles = [f"DDP rank {i}" for i in range(LEARNERS)]
    assert launch(job, tmp_path / "ddp.h5", roles=roles, payload=partial(ddp, job, tmp_path)).code == 0
    assert weights is not None
    assert np.abs(weights - np.load(tmp_path / "ddp.npy")).max() <= 1e-5
