"""The form `graphs`: learners compute at the same time, bitwise as each would by itself.

A GPU repeats one recorded graph of the gradient for each learner, on s streams. A CPU has s threads, each with one
torch thread, so the numbers do not depend on the thread that computes. Each learner has a model of its own, because a
model computes at one vector of weights at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Stream
from rudra.compute.executor import arithmetic_of_thread
from rudra.compute.gradients import GradientSource
from rudra.compute.learners import LearnerExecutor
from rudra.data.load import asked_at_once
from rudra.data.samples import Samples
from rudra.data.trees import leaves
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.log import log


def streams_of(job: Job, device: torch.device) -> int:
    """Returns how many learners of a bank compute at the same time.

    Args:
        job: Resolved job.
        device: Device of the bank.
    """
    return job.cluster.streams_of_bank(recorded=kind_of(device).records)


def check_graphs(source: GradientSource) -> None:
    """Checks by a trial that a device can record the steps of a model. Devices without graphs compute any model.

    Args:
        source: Source of the gradients of a learner.

    Raises:
        ConfigError: It cannot. The text says why, and names the place in the code.
    """
    if not kind_of(source.model.device).records:
        return
    shapes = [_shapes(source.minibatch(step, source.work.after(step))) for step in range(2)]
    if shapes[0] != shapes[1]:
        first, second = (", ".join(str(tuple(shape)) for shape in its) for its in shapes)
        raise ConfigError(
            f"[cluster] bank = 'graphs': mini-batches change their shape, from {first} to {second}; use bank = 'loop'"
        )
    if reason := source.not_recorded_because():
        raise ConfigError(
            f"[cluster] bank = 'graphs': the step of this model cannot be recorded: {reason}; use bank = 'loop'"
        )


def _shapes(batch: Any) -> list[torch.Size]:
    return [tensor.shape for tree in batch for tensor in leaves(tree)]


class Drawing(NamedTuple):
    """How the learners of a bank draw random numbers, if threads of a CPU compute them.

    Attributes:
        masks: Whether the model draws masks of dropout.
        in_turn: Why threads cannot compute several gradients at the same time. Empty: they can.
    """

    masks: bool
    in_turn: str = ""


def drawing_of(job: Job, source: GradientSource, samples: Samples) -> Drawing:
    """Finds out by a trial how a model draws random numbers. A device that records draws them on each stream.

    Args:
        job: Resolved job.
        source: Source of the gradients of a learner.
        samples: Training samples.
    """
    if kind_of(source.model.device).records:
        return Drawing(masks=False)
    if job.training.in_16_bits:
        return Drawing(masks=False, in_turn="torch keeps weights in 16 bits for all threads together")
    if asked_at_once(samples):
        return Drawing(masks=False, in_turn="the data set may draw random numbers")
    model, batch = source.model, source.minibatch(0, source.work)
    weights, found = torch.empty(model.size), torch.empty(model.size)
    model.read_into(weights)
    source.of_batch(0, source.work, batch, weights, found)
    usual = found.clone()  # both into the same memory: torch's sums depend on its alignment
    before = torch.default_generator.get_state()
    draws = model.draw_apart(masks=True)
    source.of_batch(0, source.work, batch, weights, found)
    model.draw_as_usual()
    same = torch.equal(usual.view(torch.int32), found.view(torch.int32))
    if not same or not torch.equal(before, torch.default_generator.get_state()):
        return Drawing(masks=False, in_turn="the model draws random numbers, not only by dropout")
    return Drawing(masks=draws.used)


def compute_at_once(job: Job, learners: Sequence[LearnerExecutor], samples: Samples, *, say: bool) -> None:
    """Gives the learners of a bank their streams. If threads cannot compute at the same time, they compute in turn.

    Args:
        job: Settled job.
        learners: Learners.
        samples: Training samples.
        say: Whether to log why they compute in turn.

    Raises:
        ConfigError: The learners share a part of a model.
    """
    sources = [learner.source for learner in learners]
    check_apart(sources)
    drawing = drawing_of(job, sources[0], samples)
    if drawing.in_turn:
        if say:
            log.info(f"{job.name}: the learners of a bank compute one after another ({drawing.in_turn})")
        return
    for learner, stream in zip(learners, own_streams(job, sources, masks=drawing.masks), strict=True):
        learner.use_stream(stream)


def check_apart(sources: Sequence[GradientSource]) -> None:
    """Checks that models share no parameters.

    Raises:
        ConfigError: They do.
    """
    found = [{*map(id, source.model.module.parameters())} for source in sources]
    if sum(map(len, found)) > len(set().union(*found)):
        raise ConfigError(
            "[cluster] bank = 'graphs' needs a model for each learner, and [model] name gives the same one each time; "
            "let it give a new model, or use bank = 'loop'"
        )


def own_streams(job: Job, sources: Sequence[GradientSource], *, masks: bool) -> list[Stream]:
    """Returns a stream for each source, if they can compute at the same time.

    Args:
        job: Resolved job.
        sources: Sources of gradients, each with a model of its own.
        masks: As for `Drawing`.
    """
    device = sources[0].model.device
    kind = kind_of(device)
    if not kind.records:
        for source in sources:
            source.model.draw_apart(masks=masks)
    return kind.streams(device, len(sources), streams_of(job, device), one_thread())


def one_thread() -> Callable[[], None]:
    """Returns a function that gives another thread the arithmetic settings of this one, with one torch thread."""
    adopt = arithmetic_of_thread()

    def begin() -> None:
        adopt()
        torch.set_num_threads(1)

    return begin
