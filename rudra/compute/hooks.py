"""Hooks of torch on a model, its layers and its parameters."""

from torch import nn

_HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether hooks on a module, its parts or its parameters may observe or change a forward or backward pass."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    return any(
        "forward" in vars(layer) or any(vars(layer).get(hooks) for hooks in _HOOKS_OF_MODULES)
        for layer in module.modules()
    ) or any(
        type(parameter) is not nn.Parameter or any(getattr(parameter, hooks, None) for hooks in _HOOKS_OF_TENSORS)
        for parameter in module.parameters()
    )
