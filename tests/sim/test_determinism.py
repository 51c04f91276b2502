"""`cluster.deterministic`: torch's setting, the line about an operation without such a form, and replays."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import h5py
import pytest
import torch
from points import make_job, network
from torch import nn

import rudra
from rudra.cli.main import main
from rudra.compute.device import placement
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.faults import fault_text, set_deterministic
from rudra.compute.device.kind import DeviceKind
from rudra.errors import ConfigError

ON = {"deterministic": True}
LINE = (
    "[cluster] deterministic = true: torch has no deterministic form of put_; "
    "use another operation, or deterministic = false"
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # restored after the test


def settings() -> tuple[bool, bool, str | None]:
    chosen = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    return *chosen, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def put(numbers: torch.Tensor) -> torch.Tensor:
    """An operation that has no deterministic form on any device."""
    return numbers.detach().clone().put_(torch.tensor([0]), torch.ones(1))


class Seen(nn.Linear):
    """Notes the settings in each pass."""

    noted: ClassVar[set[Any]] = set()

    def __init__(self) -> None:
        super().__init__(12, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.noted.add(settings())
        return super().forward(inputs)


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_is_deterministic_during_a_run_that_asks_for_it(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    Seen.noted.clear()
    job = make_job("hardsync", 2).with_(model={"name": Seen}, cluster={"deterministic": wanted})
    rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet").close()
    assert Seen.noted == {(True, False, ":4096:8") if wanted else (False, True, ":16:8")}
    assert settings()[:2] == (False, True)


def test_a_job_without_it_ends_what_an_earlier_job_on_the_rank_has_set() -> None:
    restore = set_deterministic(True)
    try:
        set_deterministic(False)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        restore()


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        put(gradients[0])
        return gradients[0]


class Putting(nn.Linear):
    """A layer with `put_` in some passes.

    Args:
        when: "forward", "training", "backward", "evaluation", or "later": after some passes.
    """

    def __init__(self, when: str) -> None:
        super().__init__(12, 4)
        self.when = when

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        Putting.passes += 1
        where = {"training": self.training, "evaluation": not self.training, "later": Putting.passes > 12}
        if where.get(self.when, self.when == "forward"):
            put(output)
        return InBackward.apply(output) if self.when == "backward" else output  # type: ignore[no-untyped-call]

    passes = 0


def putting(when: str) -> rudra.Job:
    Putting.passes = 0
    return make_job().with_(model={"name": Putting, "options": {"when": when}})


@pytest.mark.parametrize("when", ["forward", "training", "backward", "evaluation"])
def test_an_operation_without_a_deterministic_form_is_named_before_training(when: str, tmp_path: Path) -> None:
    job = putting(when)
    rudra.simulate(job, output=tmp_path / "free.h5", progress="quiet").close()
    with pytest.raises(ConfigError) as caught:
        rudra.simulate(job.with_(cluster=ON), output=tmp_path / "run.h5", progress="quiet")
    assert str(caught.value) == LINE


@pytest.mark.parametrize(("when", "code"), [("forward", 2), ("later", 1)])
def test_a_command_ends_with_one_line_about_it(
    when: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    putting(when)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\nname = "{__name__}:Putting"\noptions.when = "{when}"\n[training]\nminibatch_size = 4\n'
        f'[data]\nname = "points:points"\nclasses = 4\n[cluster]\nlearners = 2\ndeterministic = true\n'
    )
    assert main(["simulate", str(job), "--output", str(tmp_path / "run.h5"), "--quiet"]) == code
    assert capsys.readouterr().err.splitlines()[-1:] == [f"rudra: {LINE}"]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            RuntimeError(
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
                "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
                "uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set …"
            ),
            "a product of matrices by cuBLAS",
        ),
        (RuntimeError("avg_pool3d_backward_cuda does not have a deterministic implementation, but you set …"), "avg_"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("x does not have a deterministic implementation"), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "too little memory: CUDA out"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "too little memory: can't allocate memory: you tried to allocate 4000000000000 bytes. Error code 12",
        ),
    ],
)
def test_errors_of_torch_become_lines(error: Exception, named: str | None) -> None:
    text = fault_text(error)
    assert text is None if named is None else named in str(text)


class Fake(DeviceKind):
    """A GPU that is a CPU."""

    noun = "GPU"

    def model(self, device: torch.device) -> str:
        return "Fake 100"


def recorded(path: Path, **cluster: Any) -> dict[str, Any]:
    job = make_job("async", 3, results={"report_s": 0.0}).with_(cluster={"device": "cuda", **cluster})
    with rudra.simulate(job, output=path, progress="quiet") as results:
        return dict(results.attributes)


def test_a_run_on_a_gpu_says_why_a_replay_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Fake())
    found = recorded(tmp_path / "run.h5")
    why = "device cuda, whose kernels may add in another order each time without [cluster] deterministic = true"
    assert (bool(found["replayable"]), found["not_replayable"], found["device_model"]) == (False, why, "Fake 100")


@pytest.mark.parametrize("driver", ["simulation", "mpi"])
def test_a_deterministic_run_on_a_gpu_is_replayed_on_one(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, job = tmp_path / "run.h5", make_job("async", 3).with_(cluster={"device": "cuda", **ON})
    cuda: Callable[..., DeviceKind] = type(DEVICES["cuda"])
    monkeypatch.setitem(DEVICES, "cuda", Fake())
    rudra.simulate(job, output=path, progress="quiet").close()
    if driver == "mpi":  # its learners compute on copies
        monkeypatch.setattr(placement, "placing", lambda device, plan, transport: "staged")
        with h5py.File(path, "r+") as file:
            file.attrs["driver"] = "mpi"
    capsys.readouterr()
    assert rudra.replay(path, job=job, quiet=True).identical
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(DEVICES, "cuda", cuda())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rudra.replay(path, job=job, quiet=True).identical, "the fake is a CPU"
    line = "computed on Fake 100, here on cpu; the weights may differ in their last bits"
    assert [line in told for told in capsys.readouterr().err.splitlines()] == [True]


def test_a_file_without_the_model_of_its_device_is_replayed(tmp_path: Path) -> None:
    path, job = tmp_path / "run.h5", make_job().with_(model={"name": network})
    rudra.simulate(job, output=path, progress="quiet").close()
    with h5py.File(path, "r+") as file:
        del file.attrs["device_model"]
    assert rudra.replay(path, job=job, quiet=True).identical


@pytest.mark.gpu
def test_a_deterministic_run_on_this_gpu_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    path, job = tmp_path / "run.h5", make_job("async", 3).with_(cluster={"device": "cuda", **ON})
    rudra.simulate(job, output=path, progress="quiet").close()
    assert rudra.replay(path, job=job, quiet=True).identical
