"""Tasks: the loss of a model, its error, and further evaluation metrics.

Samples and outputs may be tensors, or tuples, lists and dictionaries of tensors. The first dimension indexes samples.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy.typing as npt
import torch
from torch.nn import functional

from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number
from rudra.data import trees
from rudra.errors import ConfigError, DataError, unknown
from rudra.job.table import short
from rudra.job.tables import TaskTable
from rudra.plugins import call, choose, misfit

LossReduction = Literal["mean", "none"]


class Task:
    """A loss and further metrics. A user's subclass overrides the methods that differ.

    Args:
        classes: Number of classes in the data. Each task defines its meaning.

    Attributes:
        name: Name for messages.
        wants: Description of valid targets, for messages.
        own: User's metrics by name: (output, target) -> a mean over the samples.
    """

    name = "task"
    wants = "tensors"

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.own: dict[str, Callable[[Any, Any], Any]] = {}

    def measure(self, output: Any, target: Any) -> dict[str, Number]:
        """Computes all metrics of one batch."""
        output = self.matched(output, target)
        own = {name: metric(output, target) for name, metric in self.own.items()}
        for name, value in own.items():
            if math.prod(shape := tuple(getattr(value, "shape", ()))) != 1:
                raise ConfigError(f"[task] metrics: {name} gave shape {shape}; a metric is one number")
        return {name: number(value) for name, value in {**self.metrics(output, target), **own}.items()}

    def compared(self, output: Any) -> Any:
        """Selects the tensor to compare with targets: the output, or its `logits` (Hugging Face) if it has them."""
        return getattr(output, "logits", output)

    def matched(self, output: Any, target: Any) -> Any:
        """Shapes the selected output for comparison with these targets."""
        return output

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        """Computes the mean loss over the samples, a scalar. With "none", the loss of each sample, (samples,)."""
        raise NotImplementedError

    def wrong(self, output: Any, target: Any) -> npt.NDArray[Any] | torch.Tensor | None:
        """Computes the wrong share of each sample, (samples,). None if the task defines no error.

        The result may stay on the device of the output, so that the host does not wait for it.
        """
        return None

    def metrics(self, output: Any, target: Any) -> Mapping[str, float | torch.Tensor]:
        """Computes further evaluation metrics of a batch: means over its samples."""
        return {}

    def derived(self, loss: float) -> Mapping[str, float]:
        """Computes metrics that follow from the mean loss of a whole evaluation."""
        return {}

    def fits(self, target: Any) -> bool:
        """Whether the task supports targets of this kind."""
        return True

    def output_shape(self, target: torch.Tensor) -> tuple[int, ...] | None:
        """Returns the output shape that these targets require. None if any shape is valid."""
        return None


class Classification(Task):
    """Cross-entropy. The error is the share of samples whose most probable class is wrong.

    Args:
        classes: Number of classes.
        label_smoothing: Share of the target's probability that is spread over all classes, 0 … 1.
        weight: Weight of each class in the loss, (classes,) numbers > 0. As in torch, the mean loss of a batch is
            divided by the weights of its samples.
    """

    name = "classification"
    wants = "one whole number for each sample"

    def __init__(self, classes: int, label_smoothing: float = 0.0, weight: Sequence[float] | None = None) -> None:
        super().__init__(classes)
        if not (_are_numbers(label_smoothing) and 0 <= label_smoothing <= 1):
            raise ConfigError(f"[task] options.label_smoothing: {short(label_smoothing)}; valid: 0 to 1")
        self._smoothing = label_smoothing
        self._weight = None
        if weight is not None:
            if not (isinstance(weight, Sequence | torch.Tensor) and _are_numbers(*weight) and len(weight) == classes):
                valid = f"a list of {classes} numbers, one for each class"
                raise ConfigError(f"[task] options.weight: {short(weight)}; valid: {valid}")
            if not all(0 < number < math.inf for number in weight):
                raise ConfigError(f"[task] options.weight: {short(weight)}; valid: numbers > 0")
            self._weight = torch.as_tensor(weight, dtype=torch.float32)

    @property
    def plain(self) -> bool:
        """Whether the loss is cross-entropy without options."""
        return self._weight is None and self._smoothing == 0

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        weight = None if self._weight is None else self._weight.to(output.device)
        try:
            loss = functional.cross_entropy(
                output, target, weight, reduction=reduction, label_smoothing=self._smoothing
            )
        except IndexError:
            wrong = target[(target < 0) | (target >= output.shape[1])]
            raise DataError(f"a sample has label {int(wrong[0])}; the model's are 0 to {output.shape[1] - 1}") from None
        return loss if weight is None or reduction == "mean" else loss * (len(target) / weight[target].sum())

    def wrong(self, output: Any, target: Any) -> npt.NDArray[Any] | torch.Tensor:
        differs: npt.NDArray[Any] | torch.Tensor
        if _is_counted_here(output):
            differs = output.numpy(force=True).argmax(1) != target.numpy(force=True)
        else:
            differs = output.detach().argmax(1) != target.to(output.device)
        return differs

    def metrics(self, output: Any, target: Any) -> Mapping[str, float | torch.Tensor]:
        if output.shape[1] <= 5:
            return {}
        return {"top5_error": (output.topk(5, dim=1).indices != target[:, None]).all(1).double().mean()}

    def fits(self, target: Any) -> bool:
        return isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.dim() == 1

    def output_shape(self, target: torch.Tensor) -> tuple[int, ...]:
        return (len(target), self.classes)


class MultiLabel(Task):
    """Binary cross-entropy, averaged over the labels. The error is whether the most probable label is not a target.

    Args:
        classes: Number of labels.
        k: Values of k for precision@k, the share of the k most probable labels that are right.
    """

    name = "multi-label"
    wants = "0 or 1 for each label, as float32"

    def __init__(self, classes: int, k: Sequence[int] = (1, 3, 5)) -> None:
        super().__init__(classes)
        if not k or min(k) < 1:
            raise ConfigError(f"[task] options.k: {list(k)}; valid: one or more numbers, each 1 or more")
        self._k = tuple(min(each, classes) for each in k)

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        loss = functional.binary_cross_entropy_with_logits(output, target, reduction=reduction)
        return loss if reduction == "mean" else loss.mean(1)

    def wrong(self, output: Any, target: Any) -> npt.NDArray[Any] | torch.Tensor:
        best = output.detach().argmax(1, keepdim=True)
        return _small(target.to(best.device).gather(1, best)[:, 0] == 0)

    def metrics(self, output: Any, target: Any) -> Mapping[str, float | torch.Tensor]:
        hits = target.gather(1, output.topk(max(self._k), dim=1).indices)
        return {f"precision@{k}": hits[:, :k].double().mean() for k in self._k}

    def fits(self, target: Any) -> bool:
        return isinstance(target, torch.Tensor) and target.dtype == torch.float32 and target.dim() == 2

    def output_shape(self, target: torch.Tensor) -> tuple[int, ...]:
        return tuple(target.shape)


class Language(Task):
    """Cross-entropy over the tokens of sequences: outputs (samples, T, classes), targets (samples, T).

    Targets below 0 are ignored. Perplexity is e to the mean loss.
    """

    name = "language"
    wants = "a sequence of whole numbers for each sample"

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        learned = target >= 0
        tokens = functional.cross_entropy(output.flatten(0, 1), (target * learned).flatten(), reduction="none")
        each: torch.Tensor = (tokens.view(target.shape) * learned).sum(1) / learned.sum(1).clamp(min=1)
        return each.mean() if reduction == "mean" else each

    def wrong(self, output: Any, target: Any) -> npt.NDArray[Any] | torch.Tensor:
        target = target.to(output.device)
        learned = target >= 0
        differs = (output.detach().argmax(2) != target) & learned
        return _small(differs.sum(1) / learned.sum(1).clamp(min=1))

    def derived(self, loss: float) -> Mapping[str, float]:
        return {"perplexity": math.exp(min(loss, 700.0))}

    def fits(self, target: Any) -> bool:
        return isinstance(target, torch.Tensor) and target.dtype == torch.int64 and target.dim() == 2

    def output_shape(self, target: torch.Tensor) -> tuple[int, ...]:
        return (*target.shape, self.classes)


class Regression(Task):
    """Squared error, or another one, over all numbers of a sample.

    Args:
        classes: Number of values in one target.
        loss: "mse", "l1" or "huber".
    """

    name = "regression"
    wants = "numbers, as float32"
    _LOSSES: ClassVar[dict[str, Callable[..., torch.Tensor]]] = {
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "huber": functional.huber_loss,
    }

    def __init__(self, classes: int, loss: str = "mse") -> None:
        super().__init__(classes)
        if loss not in self._LOSSES:
            raise ConfigError(f"[task] options.loss: {unknown(loss, self._LOSSES)}")
        self._loss = self._LOSSES[loss]

    def matched(self, output: Any, target: Any) -> Any:
        """Shapes outputs (samples, 1) like targets (samples,) if needed, so that the loss does not broadcast."""
        one = isinstance(output, torch.Tensor) and output.dim() == target.dim() + 1 and output.shape[-1] == 1
        return output[..., 0] if one else output

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        loss = self._loss(self.matched(output, target), target, reduction=reduction)
        return loss if reduction == "mean" else loss.flatten(1).mean(1) if loss.dim() > 1 else loss

    def metrics(self, output: Any, target: Any) -> Mapping[str, float | torch.Tensor]:
        return {"mean_absolute_error": (self.matched(output, target) - target).abs().mean()}

    def fits(self, target: Any) -> bool:
        return isinstance(target, torch.Tensor) and target.dtype == torch.float32

    def output_shape(self, target: torch.Tensor) -> tuple[int, ...]:
        return tuple(target.shape)


class OwnLoss(Task):
    """The user's own loss.

    Args:
        classes: Number of classes in the data.
        loss: (output, target, **options) -> a scalar tensor, the mean over the samples.
        name: Name of the loss, for messages.
        options: Options in the job. Lists of numbers are passed as tensors.
    """

    def __init__(
        self, classes: int, loss: Callable[..., torch.Tensor], name: str, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(classes)
        self._loss, self.name = loss, name
        self._options = {key: trees.as_tensor(value) for key, value in (options or {}).items()}

    def compared(self, output: Any) -> Any:
        return output

    def loss(self, output: Any, target: Any, reduction: LossReduction = "mean") -> torch.Tensor:
        if reduction != "mean":
            text = f"the loss {self.name} gives no values of single samples"
            raise ConfigError(f"[simulation] batching: {text}; valid: none")
        device = trees.first(target).device
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self._options.items()}
        loss = self._loss(output, target, **options)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"[task] {self.name} gave {what}; a loss is one number, a scalar tensor")
        return loss


def measured(task: Task, output: Any, target: Any) -> list[str]:
    """Returns the names of all evaluation metrics: the loss, an error if the task defines one, and others.

    Args:
        task: Task that defines the metrics.
        output: Model output for one or more samples, after `compared`.
        target: Targets of these samples.
    """
    there = trees.moved(target, trees.first(output).device)
    names = ["loss"] if task.wrong(output, target) is None else ["loss", "error"]
    return [*names, *task.measure(output, there), *task.derived(0.0)]


TASKS: dict[str, type[Task]] = {cls.name: cls for cls in (Classification, MultiLabel, Language, Regression)}


def make(table: TaskTable, classes: int) -> Task:
    """Creates the task of a job.

    Args:
        table: Table that names the task, or the user's loss and metrics.
        classes: Number of classes in the data.

    Raises:
        ConfigError: No such task, or unknown options.
    """
    name, found = _found("name", table.name, TASKS)
    if isinstance(found, type) and issubclass(found, Task):
        task: Task = call(found, f"[task] {name}", table.options, {"classes": classes})
    else:
        signature = inspect.signature(found)
        try:
            signature.bind(None, None, **table.options)
        except TypeError as error:
            text = misfit(error, signature, table.options, first=2)
            raise ConfigError(f"[task] {name} is called as loss(output, target, **options): {text}") from None
        task = OwnLoss(classes, found, name, table.options)
    for metric in table.metrics:
        name, function = _found("metrics", metric, {})
        task.own[name.rpartition(":")[2]] = function
    return task


def number(value: float | torch.Tensor) -> Number:
    """Returns a number in double precision. One on a device stays there."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.item() if _is_counted_here(value) else value.detach().double().reshape(())


def _small(tensor: torch.Tensor) -> npt.NDArray[Any] | torch.Tensor:
    """Returns a tensor in main memory as an array, because NumPy handles small ones faster. Others stay as they are."""
    return tensor.numpy() if _is_counted_here(tensor) else tensor


def _is_counted_here(tensor: torch.Tensor) -> bool:
    """Whether NumPy counts errors, which is faster for small mini-batches. Recorded work needs torch's operations."""
    return tensor.is_cpu and not kind_of(tensor.device).records


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) for value in values)


def _found(key: str, named: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the name and the value of an object that a job selects."""
    if not isinstance(named, str):
        return getattr(named, "__name__", type(named).__name__), named
    found = choose(f"[task] {key}", named, known)
    if not callable(found):
        raise ConfigError(f"[task] {key}: {named} is a {type(found).__name__}, and cannot be called")
    return named, found
