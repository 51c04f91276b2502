"""What ranks on two hosts do."""

import socket
import time
from pathlib import Path
from typing import Any

from point_data import prompt
from small_models import network

import rudra


def over_the_link(comm: Any, directory: Path) -> dict[str, Any]:
    """Where a rank is, what its host has sent, and how fast that was."""
    from benchmarks.links import link_rate, sent_bytes

    before, seconds, gbit_s = sent_bytes(), 0.3, 0.1
    rate = link_rate(comm, seconds, gbit_s)
    sent = sent_bytes() - before
    return {"host": socket.gethostname(), "rate": rate, "sent": sent, "bytes": seconds * gbit_s * 1e9 / 8 * 0.8}


def staying(comm: Any, directory: Path, there: str) -> dict[str, Any]:
    """Ranks that say when they are there, and do not end."""
    comm.Barrier()
    Path(there).touch()
    time.sleep(600)
    return {}


def windows_of_two_hosts(comm: Any, directory: Path) -> dict[str, Any]:
    """Trains with a worker on each of two hosts, whose windows are averaged."""
    from rudra.bench.ranks import train

    job = rudra.Job(
        model={"name": network},
        data={"name": prompt},
        training={"epochs": 4, "seed": 7, "evaluate": "workers"},
        optimizer={"learning_rate": 0.05},
        protocol={"name": "hogbatch", "reference_batch_size": 4},
        cluster={"learners": 2, "threads_per_rank": 1},
        hogbatch={"weights": "shared", "workers": [{"kind": "small", "threads": 2, "min": 4, "max": 4}]},
    )
    with train(job, directory / "out.h5", comm) as results:
        gradients, epochs = results.gradients, results.epochs
        return {
            "host": socket.gethostname(),
            "nodes": [int(role["node"]) for role in results.roles if role["kind"] == b"learner"],
            "counts": [int((gradients["learner"] == learner).sum()) for learner in (0, 1)],
            "samples": int(results.totals[0]["samples"]),
            "losses": epochs["test_loss"].tolist(),
        }
