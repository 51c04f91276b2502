"""Models whose gradients may be computed by faster code than torch.autograd's.

torch.autograd defines every gradient. Faster code runs only for models of plain layers without observers or changes of
gradients, and only if the first mini-batch's gradient agrees (`rudra.compute.first_gradient`).
"""

from torch import nn

from rudra.compute.flat import Gradients
from rudra.compute.hooks import hooked
from rudra.compute.sparse import SparseLinear
from rudra.compute.tasks import TASKS, Task

_PLAIN: frozenset[type[nn.Module]] = frozenset(
    {
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, SparseLinear),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Dropout, nn.Dropout2d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
        nn.LocalResponseNorm,
    }
)
"""Layers whose `forward` is torch's and uses each parameter once. No code of a user runs between them."""


def gradients_of(module: nn.Module, task: Task) -> Gradients:
    """Decides from a model's structure whether its gradients may be written without autograd's copies.

    Args:
        module: Model.
        task: Task of the output. A user's own loss may do anything with the output.

    Returns:
        `"direct"`: the model consists of plain torch layers in nested `nn.Sequential`, uses each layer and each
        parameter once, and has no hooks. `"autograd"`: anything else.
    """
    layers = [layer for _, layer in module.named_modules(remove_duplicate=False)]
    parameters = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
    plain = type(task) in TASKS.values() and all(type(layer) in _PLAIN for layer in layers) and not hooked(module)
    once = len(set(map(id, layers))) == len(layers) and len(set(map(id, parameters))) == len(parameters)
    return "direct" if plain and once else "autograd"
