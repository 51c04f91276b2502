"""Steps of several vectors by the same operations: a few kernels of a GPU for all of them, not a few for each."""

from collections.abc import Sequence

import torch

from rudra.compute.optim import Rates, UpdateRule


class JoinedSteps:
    """Steps of update rules with the same settings (`UpdateRule.joins`), each with its own weights and state.

    Args:
        rules: The rules. Their states must exist.
    """

    def __init__(self, rules: Sequence[UpdateRule]) -> None:
        self._rules = rules
        optimizers = [rule.optimizer for rule in rules]
        groups = [
            {**alike[0], "params": [parameter for group in alike for parameter in group["params"]]}
            for alike in zip(*(each.param_groups for each in optimizers), strict=True)
        ]
        self._optimizer = torch.optim.SGD(groups, lr=0.0)
        for each in optimizers:
            self._optimizer.state.update(each.state)  # the same tensors

    def step(self, gradients: Sequence[torch.Tensor], learning_rate: float, rates: Rates = ()) -> None:
        """Updates the weights of all rules.

        Args:
            gradients: (P,) float32 for each rule.
            learning_rate: Rate of this step, the same for all.
            rates: As for `UpdateRule.step`.
        """
        for rule, gradient in zip(self._rules, gradients, strict=True):
            rule.give(gradient)
        used = rates or self._rules[0].rates(learning_rate)
        for group, rate in zip(self._optimizer.param_groups, used, strict=True):
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
