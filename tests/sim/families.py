"""One job of each family of roles, and of each that is synchronous."""

from typing import Any

from rudra.job.job import Job

ALONE = {"name": "groups", "options": {"groups": 1}}
MOVING = {"learning_rate": 0.25, "momentum": 0.5}
AT = 2
"""Number of epochs before the branch."""

FAMILIES: dict[str, dict[str, Any]] = {
    "server": {"protocol": {"name": "softsync"}, "optimizer": MOVING},
    "groups": {
        "protocol": {"name": "async"},
        "topology": {"name": "groups", "options": {"groups": 2}},
        "optimizer": MOVING,
    },
    "replicas": {"protocol": {"name": "sma"}, "optimizer": MOVING},
    "placed": {
        "protocol": {"name": "hardsync"},
        "placement": {"cut": "3", "rule": "synchronous"},
        "optimizer": {"learning_rate": 0.5, "momentum": 0.5},
    },
    "hogbatch": {
        "protocol": {"name": "hogbatch"},
        "hogbatch": {"workers": [{"kind": "small", "min": 8}]},
        "optimizer": {"learning_rate": 1.8, "momentum": 0.0},
    },
}
"""Each with a rate that suits it."""

SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "server": {"protocol": {"name": "hardsync"}, "optimizer": MOVING},
    "groups": {"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}, "optimizer": MOVING},
    "allreduce": {"protocol": {"name": "hardsync"}, "topology": ALONE, "optimizer": MOVING},
    "sma": FAMILIES["replicas"],
    "diloco": {"protocol": {"name": "diloco"}, "averaging": {"period": 3}, "optimizer": MOVING},
    "hierarchical": {
        "protocol": {"name": "sma"},
        "topology": {"name": "hierarchical", "options": {"blocks": 2}},
        "optimizer": MOVING,
    },
    "placed": {
        "protocol": {"name": "hardsync"},
        "placement": {"cut": "3", "rule": "synchronous"},
        "optimizer": MOVING,
    },
}


def small(tables: dict[str, Any], **more: Any) -> Job:
    return Job(
        model={"name": "mlp"},
        data={"train_limit": 192},
        training={"minibatch_size": 8, "epochs": AT + 1, "seed": 5, "evaluate": False},
        cluster={"learners": 4, "threads_per_rank": 1},
        simulation={"jitter": 0.5},
        results={"keep_checkpoints": f"{AT} epochs"},
        **tables,
    ).with_(**more)
