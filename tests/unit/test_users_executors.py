"""Models as users write them: every executor that accepts a model moves the weights by plain torch's gradient."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from clusters import train
from plain_gradients import initial, mean_gradient
from users_models import CLASSES, MODELS, batch, made

import rudra
from rudra.compute import first_gradient
from rudra.compute.cuts import chain
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.prepare.resolve import settle

SAMPLES = 12
RATE = 1024.0
"""So large that weights become their gradient, which rounding to float32 leaves as it is."""

NO_TEST = {"gradient penalty", "hook on an activation"}
"""What these models do in `forward` needs autograd, which is off in tests."""

BUFFERS = {"large with norms", "spectral norm", "orthogonal", "buffers made anew"}

NO_CHAIN = {
    *("attention", "encoder", "gru, packed", "rnn, packed", "buffers made anew", "experts"),
    *("second derivative", "second derivative, small", "double weights of one layer", "views of a parameter"),
}
"""What crosses is not one tensor, or torch.fx cannot trace `forward`."""


class Way(NamedTuple):
    """A way to train.

    Attributes:
        tables: of the job.
        part: of a step that the weights go.
        updates: until they have gone it.
        refused: models, with a part of the message.
    """

    tables: dict[str, Any]
    part: float = 1.0
    updates: int = 1
    refused: Mapping[str, str] = MappingProxyType({})


REPLICAS = {"name": "replicas"}
SERVED = {"name": "replicas", "options": {"parameter_server": True}}
BLOCK = {"name": "hierarchical", "options": {"blocks": 1}}
ALONE = {"learners": 1}

WAYS = {
    "server": Way({"protocol": {"name": "hardsync"}}),
    "window": Way(
        {
            "protocol": {"name": "hogbatch"},
            "hogbatch": {
                "weights": "shared",
                "locking": True,
                "workers": [{"kind": "large", "min": SAMPLES, "max": SAMPLES}],
            },
            "cluster": ALONE,
        },
        refused=dict.fromkeys(BUFFERS, "models without BatchNorm"),
    ),
    "placed": Way(
        {"protocol": {"name": "hardsync"}, "placement": {"rule": "synchronous"}},
        refused=dict.fromkeys(NO_CHAIN, "cannot be cut, as ")
        | {
            "custom function": "the gradient of the two pieces differs from the model's by 0.1 of its norm",
            "part without gradients": "the gradient of the two pieces differs from the model's by ",
            "detached part": "the output of the first layers has no gradient",
        },
    ),
    "average": Way({"protocol": {"name": "average"}, "topology": REPLICAS}),
    "easgd": Way({"protocol": {"name": "easgd"}, "topology": REPLICAS}, 2 / 3, 2),
    "easgd, hierarchical": Way({"protocol": {"name": "easgd"}, "topology": BLOCK}, 1 / 3, 2),
    "easgd, server": Way({"protocol": {"name": "easgd"}, "topology": SERVED, "cluster": ALONE}, 1 / 2),
}


def data() -> tuple[Any, Any]:
    return (set_ := torch.utils.data.TensorDataset(*batch(SAMPLES))), set_


def job_of(name: str, way: Way) -> rudra.Job:
    tables = {"cluster": {"learners": 2}, **way.tables}
    learners = tables["cluster"]["learners"]
    if "placement" in tables:
        tables["placement"] = {"cut": place(name), **tables["placement"]}
    job = rudra.Job(
        model={"name": MODELS[name]},
        data={"name": data, "classes": CLASSES},
        training={"epochs": way.updates, "minibatch_size": SAMPLES // learners, "seed": 1, "evaluate": False},
        optimizer={"learning_rate": RATE, "momentum": 0.0},
        **{
            **tables,
            "protocol": {**tables["protocol"], "modulation": "none"},
            "cluster": {**tables["cluster"], "threads_per_rank": 1, "device": "cpu"},
        },
    ).resolved()
    gradients = first_gradient.try_first_gradient(job, job.plan(), load(job.data, seed=1))
    return settle(job, gradients=gradients)


def place(name: str) -> int:
    """The middle one of all places where a model can be cut; 1 where there is none."""
    try:
        places = chain(made(name), batch()[0]).admissible()
    except (ConfigError, RuntimeError):
        return 1
    return places[len(places) // 2]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a reentrant checkpoint
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_weights_move_by_the_gradient_of_plain_torch_or_the_model_is_refused(name: str, way: str) -> None:
    how = WAYS[way]
    refused = {**how.refused, **dict.fromkeys(NO_TEST, "does not take inputs of shape")}
    if name in refused:
        with pytest.raises(ConfigError) as error:
            train(job_of(name, how))
        assert refused[name] in str(error.value)
        assert "\n" not in str(error.value)
        return
    job = job_of(name, how)
    trained = train(job)
    owners = [trained.executors[owner] for owner in trained.plan.owners]
    weights = torch.cat([owner.buffer("weights").vector[: owner.parameters] for owner in owners])
    rate = float(trained.rows["updates"]["learning_rate"][-1]) * how.part
    wanted = mean_gradient(job)
    assert len(trained.rows["updates"]) == how.updates
    assert float(((initial(job) - weights) / rate - wanted).norm() / wanted.norm()) <= 1e-6
