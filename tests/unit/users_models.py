"""Models as users write them, their samples, and what plain torch makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, SAMPLES = 12, 3, 6
LARGE = 256  # a linear layer of LARGE x LARGE has its gradient written directly where that is allowed


class Of(nn.Module):
    """A model that some function computes with some parts."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


def body(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def large() -> nn.Sequential:
    return body(LARGE)


class Square(torch.autograd.Function):
    """A custom function with a gradient of its own, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


def attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    tokens = x.view(len(x), 3, 4)
    mask = torch.zeros(len(x), 3, dtype=torch.bool)
    mask[:, 2] = x[:, 0] > 0
    out, _ = model.attention(tokens, tokens, tokens, key_padding_mask=mask)
    return model.last(out.mean(1))  # type: ignore[no-any-return]


def packed(model: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    sequences = nn.utils.rnn.pack_padded_sequence(x.view(len(x), 3, 4), lengths, batch_first=True, enforce_sorted=False)
    _, hidden = model.rnn(sequences)
    return model.last(hidden[-1])  # type: ignore[no-any-return]


def potential(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Energies, and forces: the gradient of the energies by their inputs (a second derivative in the loss)."""
    with torch.enable_grad():
        x = x.clone().requires_grad_(True)
        energy = model.net(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy[:, :1], force[:, :2]], 1)


def checkpointed(reentrant: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def compute(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x)
        return model.last(checkpoint(model.block, hidden, use_reentrant=reentrant))  # type: ignore[no-any-return]

    return compute


def blocks(reentrant: bool) -> nn.Module:
    block = nn.Sequential(nn.Linear(LARGE, LARGE), nn.ReLU(), nn.Linear(LARGE, LARGE + 1), nn.ReLU())
    return Of(checkpointed(reentrant), first=nn.Linear(WIDTH, LARGE), block=block, last=nn.Linear(LARGE + 1, CLASSES))


def hooked(
    register: Callable[[nn.Sequential], Any], make: Callable[[], nn.Sequential] = body
) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        made = make()
        made.kept = register(made)  # type: ignore[assignment]
        return made

    return model


def masked(model: nn.Sequential) -> Any:
    mask = torch.ones(model[0].weight.shape)
    mask[:, :2] = 0
    return model[0].weight.register_hook(lambda gradient: gradient * mask)


def accumulated(model: nn.Sequential) -> Any:
    """A hook on the node that adds up a gradient, as distributed wrappers of torch have them."""
    node = model[0].weight.expand_as(model[0].weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: tuple(2 * each for each in gradients))
    return node


def after_accumulation(model: nn.Sequential) -> Any:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad / 2  # type: ignore[operator]

    return model[2].weight.register_post_accumulate_grad_hook(halve)


def mixture(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The last expert is never used."""
    gate = model.gate(x)[:, :2].softmax(1)
    return gate[:, :1] * model.one(x) + gate[:, 1:] * model.two(x)  # type: ignore[no-any-return]


def part_without(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.first(x)
    return model.last(hidden)  # type: ignore[no-any-return]


def gradient_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.net(x)
    (slope,) = torch.autograd.grad(y.sum(), model.net[0].weight, create_graph=True)
    return y + slope.square().mean()  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.detach().t().contiguous())
        self.again = nn.Linear(WIDTH, width, bias=False)
        self.again.weight = self.into.weight
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.again(self.out(torch.tanh(self.into(x))))))  # type: ignore[no-any-return]


class Averaged(nn.Module):
    """Keeps a moving average of its activations, in a buffer that it makes anew, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = body()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(x - self.mean)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    model = large()
    model[2].requires_grad_(False)
    return model


def twice() -> nn.Module:
    layer = nn.Linear(LARGE, LARGE)
    return nn.Sequential(nn.Linear(WIDTH, LARGE), layer, nn.ReLU(), layer, nn.Linear(LARGE, CLASSES))


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, LARGE),
        nn.BatchNorm1d(LARGE),
        nn.ReLU(),
        nn.Linear(LARGE, LARGE),
        nn.ReLU(),
        nn.Linear(LARGE, CLASSES),
    )


def legacy(model: nn.Sequential) -> nn.Module:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[2])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": body,
    "large chain": large,
    "large with norms": norms,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(24, CLASSES)
    ),
    "dropout": lambda: nn.Sequential(
        nn.Linear(WIDTH, LARGE), nn.Dropout(0.5), nn.Linear(LARGE, LARGE), nn.ReLU(), nn.Linear(LARGE, CLASSES)
    ),
    "in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, LARGE),
        nn.ReLU(inplace=True),
        nn.Linear(LARGE, LARGE),
        nn.ELU(inplace=True),
        nn.Linear(LARGE, CLASSES),
    ),
    "in-place arithmetic": lambda: Of(lambda m, x: m.net(x).mul_(2).add_(1), net=large()),
    "attention": lambda: Of(
        attention, attention=nn.MultiheadAttention(4, 2, batch_first=True), last=nn.Linear(4, CLASSES)
    ),
    "encoder": lambda: Of(
        lambda m, x: m.last(m.layer(x.view(len(x), 3, 4)).mean(1)),
        layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        last=nn.Linear(4, CLASSES),
    ),
    "gru, packed": lambda: Of(packed, rnn=nn.GRU(4, 5, batch_first=True), last=nn.Linear(5, CLASSES)),
    "rnn, packed": lambda: Of(packed, rnn=nn.RNN(4, 5, batch_first=True), last=nn.Linear(5, CLASSES)),
    "tied": lambda: Tied(8),
    "tied, large": lambda: Tied(LARGE * 32),
    "twice the same layer": twice,
    "weight norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, LARGE)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(LARGE, LARGE)),
        nn.Tanh(),
        nn.Linear(LARGE, CLASSES),
    ),
    "weight norm, old form": lambda: legacy(large()),
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, CLASSES)
    ),
    "orthogonal": lambda: nn.Sequential(
        nn.Linear(WIDTH, 8), parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, CLASSES)
    ),
    "checkpoint, reentrant": lambda: blocks(True),
    "checkpoint": lambda: blocks(False),
    "custom function": lambda: Of(
        lambda m, x: m.last(Square.apply(m.first(x))), first=nn.Linear(WIDTH, LARGE), last=nn.Linear(LARGE, CLASSES)
    ),
    "second derivative": lambda: Of(potential, net=large()),
    "second derivative, small": lambda: Of(potential, net=body()),
    "gradient penalty": lambda: Of(gradient_penalty, net=large()),
    "hook on a parameter": hooked(masked),
    "hook on a large parameter": hooked(masked, large),
    "hook where gradients add up": hooked(accumulated),
    "hook after accumulation": hooked(after_accumulation),
    "hook after accumulation, large": hooked(after_accumulation, large),
    "hook on a module": hooked(lambda m: m[1].register_forward_hook(lambda _, __, y: 2 * y)),
    "hook before a module": hooked(lambda m: m[2].register_forward_pre_hook(lambda _, xs: (xs[0].abs(),)), large),
    "hook on a module's gradient": hooked(
        lambda m: m[1].register_full_backward_hook(lambda _, gs, __: (gs[0].sign(),)), large
    ),
    "hook on an activation": hooked(
        lambda m: m[1].register_forward_hook(lambda _, __, y: y.register_hook(torch.sign) and None), large
    ),
    "frozen layer": frozen,
    "detached part": lambda: Of(
        lambda m, x: m.last(m.first(x).detach()), first=nn.Linear(WIDTH, LARGE), last=nn.Linear(LARGE, CLASSES)
    ),
    "part without gradients": lambda: Of(part_without, first=nn.Linear(WIDTH, LARGE), last=nn.Linear(LARGE, CLASSES)),
    "buffers made anew": Averaged,
    "experts": lambda: Of(mixture, gate=nn.Linear(WIDTH, 3), one=large(), two=body(), idle=large()),
    "residual": lambda: Of(
        lambda m, x: m.last(x + m.block(x)),
        block=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
        last=nn.Linear(WIDTH, CLASSES),
    ),
    "sparse embedding": lambda: Of(
        lambda m, x: m.last(m.table((x > 0).long()).mean(1)),
        table=nn.Embedding(2, 5, sparse=True),
        last=nn.Linear(5, CLASSES),
    ),
    "double weights of one layer": lambda: Of(
        lambda m, x: functional.linear(m.first(x), m.first.weight[:, :3].t()[:CLASSES]), first=nn.Linear(WIDTH, LARGE)
    ),
    "views of a parameter": lambda: Of(
        lambda m, x: x @ m.first.weight.view(WIDTH, LARGE)[:, :CLASSES], first=nn.Linear(WIDTH, LARGE)
    ),
}

UNSEEN = "hook where gradients add up"
"""Torch does not list this hook: only the first gradient shows that the model has it."""


def batch(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, WIDTH, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().train()
