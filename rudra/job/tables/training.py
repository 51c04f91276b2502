"""Tables model, data, augment, task and training: network, data sets, loss, and length of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rudra.errors import ConfigError
from rudra.job.table import Named, Table, short
from rudra.job.target import WINDOW, Target

IN_16_BITS = ("bfloat16", "float16")
"""Precisions that torch.autocast computes."""


class ModelTable(Table):
    """Network to train."""

    name: Named = Field(
        "lenet",
        description="shipped network (mlp, lenet, cifar10_full, alexnet, vgg16, resnet32, resnet50, lstm), or "
        "package.module:callable that returns a torch.nn.Module",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the function or class that makes the model")


class DataTable(Table):
    """Data sets, and preparation of the samples."""

    name: Any = Field(
        "digits",
        description="reader (digits, idx, cifar10, libsvm, csv, npz, hdf5, arff, text, folder), or "
        "package.module:callable that returns (train, test)",
    )
    path: Path | None = Field(
        None, description="data file, or directory of the data files, relative to the working directory"
    )
    train_limit: int | None = Field(None, ge=1, description="use only the first N training samples")
    test_limit: int | None = Field(None, ge=1, description="use only the first N test samples")
    classes: int | None = Field(None, ge=2, description="number of classes, if the data does not contain it")
    scale: float | None = Field(None, gt=0, description="factor on the inputs, after subtraction of the mean")
    subtract_mean: bool | None = Field(
        None,
        description="subtract the mean of all training inputs from every input. Default: true for images that are "
        "bytes in memory, else false",
    )
    standardise: bool = Field(
        False,
        description="shift and scale each column of a table, so that the column has mean 0 and standard deviation 1 in "
        "the training set",
    )
    sparse: bool | Literal["auto"] = Field(
        False,
        description="true: inputs stay sparse up to the model's first layer, which the readers libsvm and arff "
        "support. auto: if at most a tenth of the values is stored",
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
        description="fraction of the training set that is held out: no gradient uses it, and every evaluation also "
        "measures it",
    )
    split_seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="seed of the choice of held-out samples, of validation_split and test_split. With one number, runs "
        "with different seeds are evaluated on the same samples. Default: training.seed",
    )
    target: str | None = Field(
        None, description="entry that holds the target, if the items of your dataset are dictionaries"
    )
    collate: Named | None = Field(
        None,
        description="package.module:callable that makes a mini-batch from a list of your dataset's items, like the "
        "collate_fn of a DataLoader",
    )
    options: dict[str, Any] = Field({}, description="options of the reader, or keyword arguments of your callable")

    @field_validator("test_split", "validation_split", mode="before")
    @classmethod
    def _fraction(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1:
            raise ValueError(f"must be above 0 and below 1, not {short(value)}; remove the key to hold out nothing")
        return value

    @field_validator("standardise")
    @classmethod
    def _alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (given := [key for key in ("scale", "subtract_mean") if info.data.get(key) is not None]):
            keys = " and ".join(given)
            raise ValueError(f"= true is not supported with {keys}; remove {keys}, or use false")
        return value


class AugmentTable(Table):
    """Random changes of training inputs. A replay repeats them."""

    crop: int = Field(
        0, ge=0, lt=2**16, description="shift each training image by up to this many pixels in each direction"
    )
    flip: bool = Field(False, description="mirror each training image left to right with probability 1/2")
    name: Named | None = Field(
        None,
        description="package.module:callable of (inputs, torch.Generator) that returns the changed inputs of a "
        "mini-batch",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of this callable")


class TaskTable(Table):
    """Loss, and metrics that every evaluation measures."""

    name: Named = Field(
        "classification",
        description="classification, multi-label, language, regression, or your own loss, package.module:callable",
    )
    metrics: tuple[Named, ...] = Field(
        (),
        description="additional metrics of every evaluation: package.module:callable of (output, target) that returns "
        "a mean over the samples",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the loss, such as label_smoothing and weight")

    @property
    def ignored(self) -> int | None:
        """Label that the loss ignores: its `ignore_index`, as in torch's cross-entropy. None: no label."""
        label = self.options.get("ignore_index", getattr(self.name, "ignore_index", None))
        return label if isinstance(label, int) else None


class TrainingTable(Table):
    """Length of the training, size of mini-batches, and evaluation of the weights."""

    epochs: int = Field(
        10,
        ge=1,
        lt=2**31,
        description="number of passes over the training set. An epoch ends when the applied gradients have used as "
        "many samples as the set has",
    )
    minibatch_size: int = Field(16, ge=1, lt=2**31, description="μ: number of samples in each gradient of each learner")
    microbatches: int = Field(
        1,
        ge=1,
        lt=2**31,
        description="number of parts of each mini-batch. Their gradients are computed one after another, to save "
        "memory, and averaged by samples",
    )
    seed: int = Field(0, ge=0, description="seed of the initial weights, sampling, dropout and simulated times")
    warm_start: Path | None = Field(
        None, description="result file or checkpoint whose weights become the initial weights"
    )
    evaluate: bool | Literal["always", "workers"] = Field(
        True,
        description="true: evaluate the weights at the end of each epoch, unless the previous evaluation is still "
        "running. always: training waits until the previous evaluation has ended. workers: the workers of protocol "
        "hogbatch evaluate the weights, and the training clock pauses. false: no evaluation",
    )
    evaluate_training_set: bool = Field(
        False, description="workers also evaluate the weights on the training set: split `train` of `/metrics`"
    )
    evaluation_batch_size: int = Field(256, ge=1, description="number of samples in each batch of an evaluation")
    compile: bool = Field(
        False,
        description="compute gradients with torch.compile: faster, but changes the last bits of results. Needs a C++ "
        "compiler",
    )
    gradients: Literal["auto", "autograd", "direct"] = Field(
        "auto",
        description="autograd: torch.autograd computes every gradient. direct: faster code for plain layers computes "
        "it. auto: direct if the model consists of plain layers and the gradient of the first mini-batch agrees, else "
        "autograd. Result files record the choice",
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = Field(
        "float32",
        description="number format of the forward pass, loss and backward pass: tf32 rounds the factors of products on "
        "GPUs, 16 bits are by torch.autocast. Weights and gradients stay float32",
    )
    target: str | None = Field(
        None,
        description="goal of the training, such as `accuracy >= 0.98`, for the median of the last evaluations",
    )
    target_window: int = Field(
        WINDOW, ge=1, description="number of evaluations, one an epoch, in the median for target"
    )
    stop_at_target: bool = Field(False, description="end the training with the epoch that reaches target")

    patience: int | None = Field(
        None, ge=1, description="number of evaluations in a row without a new best result that end the training"
    )

    @property
    def in_16_bits(self) -> bool:
        """Whether torch.autocast computes in 16 bits."""
        return self.precision in IN_16_BITS

    @field_validator("target")
    @classmethod
    def _target(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                Target.parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value
