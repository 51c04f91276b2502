"""Models that fail, or that end their rank, in some training step."""

import itertools
import os
import signal
import time
from typing import Any

import torch
from small_models import Latent, everything, network
from torch import nn

DIES_AFTER = 15
"""Training steps of a learner that dies then."""


def alone() -> nn.Module:
    """Rank 2 cannot share the memory of its buffers; the data it has shared by then."""
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "2":

        def refuse(name: str, flags: int = 0) -> int:
            raise OSError(28, "No space left on device")

        os.memfd_create = refuse
    return network()


class Cramped(Latent):
    """On a device that has no memory for two learners together, as is found out after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > 20 and torch._C._functorch.is_batchedtensor(inputs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")
        return super().forward(inputs)


class Putting(nn.Sequential):
    """`everything`, with an operation that has no deterministic form after some passes of this process."""

    def __init__(self, after: int) -> None:
        super().__init__(everything())
        self.left = after

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        output: torch.Tensor = super().forward(inputs)
        return output


class Trap(nn.Module):
    """Springs in the `after`-th training step of a rank: by default that of learner 1 of three."""

    def __init__(self, after: int, deed: str, rank: int = 3) -> None:
        super().__init__()
        self.inner, self.after, self.deed, self.steps = network(), after, deed, 0
        self.armed = os.environ.get("OMPI_COMM_WORLD_RANK") == str(rank) and "ALIVE" not in os.environ

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        if self.steps > self.after and self.armed:
            if self.deed == "raise":
                raise ValueError("the user's own bug")
            if self.deed == "exhaust":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")
            if self.deed == "lose":
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
            if self.deed == "crash":  # a GPU finds out later, and the process cannot use it any more
                inputs.new_zeros(3)[inputs.new_full((1,), 7, dtype=torch.int64)]
            if self.deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "hang":
                time.sleep(1000)
            if self.deed == "part":
                return self._parted(inputs)
        result: torch.Tensor = self.inner(inputs)
        return result

    def _parted(self, inputs: torch.Tensor) -> torch.Tensor:
        """Dies in the backward pass, when the gradients of the last layer are final and have had time to leave."""
        *first, last = self.inner.children()
        hidden = nn.Sequential(*first)(inputs)

        def die(gradient: torch.Tensor) -> None:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

        hidden.register_hook(die)
        result: torch.Tensor = last(hidden)
        return result


def raising() -> nn.Module:
    return Trap(120, "raise")


def exhausting() -> nn.Module:
    return Trap(20, "exhaust")


def hanging() -> nn.Module:
    return Trap(20, "hang")


def dying_3() -> nn.Module:
    return Trap(DIES_AFTER, "kill", 3)


def dying_5() -> nn.Module:
    return Trap(DIES_AFTER, "kill", 5)


def losing_3() -> nn.Module:
    return Trap(DIES_AFTER, "lose", 3)


def crashing_3() -> nn.Module:
    return Trap(DIES_AFTER, "crash", 3)


def parted_3() -> nn.Module:
    return Trap(DIES_AFTER, "part", 3)


def parted_5() -> nn.Module:
    return Trap(DIES_AFTER, "part", 5)


def dying_front() -> nn.Module:
    """As `network`; before its first layer computes, learner 1 may die."""
    trap, model = dying_3(), network()

    def spring(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        trap(*inputs)

    next(model.children()).register_forward_pre_hook(spring)
    return model


def deaf() -> nn.Module:
    """Nobody makes anything of the death of learner 1, and what it had promised never comes."""
    from rudra.core.events import Lost
    from rudra.mpi import idleness
    from rudra.roles.server import ParameterServer, ServerState

    idleness.LEFT_S = 2.0
    for state in ServerState:
        ParameterServer._METHODS[state].pop(Lost, None)
    return dying_3()


def struck() -> nn.Module:
    """As `network`; of the workers of a window learner 1 dies within its 15th update, learner 2 right after it.

    In a locked window both hold the lock then, and nobody has told of the second update.
    """
    from rudra.compute import window
    from rudra.mpi.shared_window import RobustLock

    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    places: dict[str | None, list[tuple[Any, str, int]]] = {
        "3": [(window, "digest_of", 15), (window.Window, "begin_update", 15)],
        "4": [(RobustLock, "__exit__", 30), (window.Window, "end_update", 15)],
    }
    for where, name, count in places.get(rank, []):
        setattr(where, name, _deadly(getattr(where, name), count, before=name == "__exit__"))
    return network()


def _deadly(plain: Any, count: int, *, before: bool) -> Any:
    """A function whose callers die when they have called it so often, with what it does or before."""
    calls = itertools.count(1)

    def call(*about: Any) -> Any:
        last = next(calls) == count
        result = None if last and before else plain(*about)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call
