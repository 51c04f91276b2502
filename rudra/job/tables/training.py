"""What is trained on what, for how long: tables model, data, augment, task and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rudra.errors import ConfigError
from rudra.job.table import Named, Table
from rudra.job.target import WINDOW, Target


class ModelTable(Table):
    """The network that is trained."""

    name: Named = Field(
        "lenet",
        description="shipped network (mlp, lenet, cifar10_full, alexnet, vgg16, resnet32, resnet50, lstm), or "
        "package.module:callable that returns a torch.nn.Module",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the model's factory")


class DataTable(Table):
    """Where samples come from, and how they are prepared."""

    name: Any = Field(
        "digits",
        description="reader (digits, idx, cifar10, libsvm, csv, npz, hdf5, arff, text, folder), or "
        "package.module:callable that returns (train, test)",
    )
    path: Path | None = Field(
        None, description="data file, or directory of the data files; relative to the working directory"
    )
    train_limit: int | None = Field(None, ge=1, description="use only the first N training samples")
    test_limit: int | None = Field(None, ge=1, description="use only the first N test samples")
    classes: int | None = Field(None, ge=2, description="number of classes, where the data does not say it")
    scale: float | None = Field(
        None, gt=0, description="factor that multiplies the inputs, after the mean is subtracted"
    )
    subtract_mean: bool | None = Field(
        None,
        description="subtract the mean of all training inputs from every input; default: true for images that are "
        "held in memory as bytes, else false",
    )
    standardise: bool = Field(
        False,
        description="shift and scale each column of a table, so that its training inputs have mean 0 and standard "
        "deviation 1",
    )
    sparse: bool | Literal["auto"] = Field(
        False,
        description="inputs of which most is 0 stay sparse up to the model's first layer, as those of libsvm and arff "
        "can; auto: if at most a tenth of them is stored",
    )
    test_split: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of the training set that becomes the test set, if the data has no test set",
    )
    validation_split: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="fraction of the training set that is held out: no gradient uses it, and every test of the "
        "weights also measures it",
    )
    target: str | None = Field(
        None, description="entry that holds the target, if the items of your dataset are dictionaries"
    )
    collate: Named | None = Field(
        None,
        description="package.module:callable that makes a mini-batch from a list of your dataset's items, like a "
        "DataLoader's collate_fn",
    )
    options: dict[str, Any] = Field({}, description="options of the reader, or keyword arguments of your callable")

    @field_validator("standardise")
    @classmethod
    def _alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (given := [key for key in ("scale", "subtract_mean") if info.data.get(key) is not None]):
            keys = " and ".join(given)
            raise ValueError(f"= true is not supported with {keys}; remove {keys}, or use false")
        return value


class AugmentTable(Table):
    """Random changes of training inputs, which a replay repeats."""

    crop: int = Field(
        0, ge=0, lt=2**16, description="shift each training image by up to this many pixels in each direction"
    )
    flip: bool = Field(False, description="mirror each training image left to right with probability 1/2")
    name: Named | None = Field(
        None,
        description="package.module:callable of (inputs, torch.Generator) that returns the changed inputs of a "
        "mini-batch",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of that callable")


class TaskTable(Table):
    """The loss, and the metrics that every test measures."""

    name: Named = Field(
        "classification",
        description="classification, multi-label, language, regression, or your own loss, package.module:callable",
    )
    metrics: tuple[Named, ...] = Field(
        (),
        description="further metrics to measure at every test: package.module:callable of (output, target) that "
        "returns a mean over the samples",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the loss, such as label_smoothing and weight")

    @property
    def ignored(self) -> int | None:
        """The label that the loss ignores, if it says which: its `ignore_index`, as torch's cross-entropy has it."""
        label = self.options.get("ignore_index", getattr(self.name, "ignore_index", None))
        return label if isinstance(label, int) else None


class TrainingTable(Table):
    """How long training lasts, how large mini-batches are, and when the weights are tested."""

    epochs: int = Field(
        10,
        ge=1,
        lt=2**31,
        description="passes over the training set; an epoch ends when applied gradients have used as many samples as "
        "the set has",
    )
    minibatch_size: int = Field(16, ge=1, lt=2**31, description="μ: number of samples in each gradient of each learner")
    microbatches: int = Field(
        1,
        ge=1,
        lt=2**31,
        description="number of parts in which each gradient is computed, one after another, which needs less memory; "
        "their gradients are averaged by samples",
    )
    seed: int = Field(0, ge=0, description="seed of initial weights, sampling, dropout and simulated times")
    warm_start: Path | None = Field(
        None, description="result file or checkpoint whose weights become the initial weights"
    )
    evaluate: bool | Literal["always", "workers"] = Field(
        True,
        description="true: test the weights at the end of each epoch, unless the previous test is still running; "
        "always: training waits until that test has ended; workers: the workers of protocol hogbatch test them, while "
        "the clock of the training stands still; false: no tests",
    )
    evaluate_training_set: bool = Field(
        False, description="workers test the weights on the training set, too: split `train` of `/metrics`"
    )
    evaluation_batch_size: int = Field(256, ge=1, description="number of samples that a test computes at a time")
    compile: bool = Field(
        False,
        description="compute gradients with torch.compile: faster, but the last bits differ; needs a C++ compiler",
    )
    gradients: Literal["auto", "autograd", "direct"] = Field(
        "auto",
        description="autograd: torch.autograd computes every gradient; auto: faster code computes it (direct) if the "
        "model consists of plain layers and the gradient of the first mini-batch agrees, else torch.autograd; result "
        "files say which",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="number format of forward pass, loss and backward pass, by torch.autocast; weights and gradients "
        "stay float32",
    )
    target: str | None = Field(
        None,
        description="goal of the training, such as `accuracy >= 0.98`; it is reached when the median of the last "
        "tests meets it",
    )
    target_window: int = Field(
        WINDOW, ge=1, description="number of tests, one an epoch, in the median that target looks at"
    )
    stop_at_target: bool = Field(False, description="end the training with the epoch in which target is reached")

    patience: int | None = Field(
        None, ge=1, description="end the training after this many tests in a row without a new best result"
    )

    @field_validator("target")
    @classmethod
    def _target(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                Target.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value
