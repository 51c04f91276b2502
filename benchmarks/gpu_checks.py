"""Section "checks" of `rudra bench gpu`: whether the device computes what it must, and what a step costs."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch

import rudra
from benchmarks.gpu_jobs import CLASSES, COUNTED, PROFILED, SHAPES, WARM, learner_job, watch
from benchmarks.gpu_rows import CheckFailed, Figures, LeftOut, Row, Setting, row
from rudra import package_check
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.tasks import Classification, Language, Task
from rudra.data.load import DataInfo
from rudra.job.job import Job
from rudra.job.tables import ClusterTable

LARGEST, MORE = 1e-4, 4
"""Largest error of a gradient on the device, relative to its norm, that rounding explains: this number, and so many
times the error of the CPU. Errors are differences from a gradient in double precision."""

STEPS = 20
RUN_S, SIMULATION_S, COMMAND_S = 12.0, 4.0, 8.0
"""Expected seconds of a run on ranks, of a short simulation, and of a command that ends at once."""

LENGTH, TOKENS = 16, 65


def rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section."""
    networks: list[tuple[str, dict[str, Any]]] = [
        ("lenet", {}),
        ("resnet32", setting.sized({}, {"blocks": 1})),
        ("lstm", {}),
    ]
    ranks = setting.sized([("lenet", 16), ("vgg16", 64)], [("lenet", 16)], [])
    mistakes = setting.sized([*REFUSALS], [*REFUSALS], ["tf32"])
    return [
        *(row(f"gradient of {name}", 2, partial(gradient, name, options)) for name, options in networks),
        row("identical weights", 2 * SIMULATION_S, same_bits),
        *(row(f"steps of a rank, {name}, μ = {size}", RUN_S, partial(rank_steps, name, size)) for name, size in ranks),
        *(row(f"refusal: {name}", COMMAND_S, partial(refused, name)) for name in mistakes),
    ]


def gradient(name: str, options: dict[str, Any], setting: Setting) -> Figures:
    """Compares a gradient on the device, and on the CPU, with the same gradient in double precision."""
    generator = torch.Generator().manual_seed(0)
    task: Task
    if name == "lstm":
        info, task = DataInfo(name, 1, 1, (LENGTH,), TOKENS), Language(TOKENS)
        inputs, target = torch.randint(TOKENS, (2, 8, LENGTH), generator=generator)
    else:
        info, task = DataInfo(name, 1, 1, SHAPES[name], CLASSES), Classification(CLASSES)
        inputs = torch.randn(16, *SHAPES[name], generator=generator)
        target = torch.randint(CLASSES, (16,), generator=generator)
    module = models.build(Job(model={"name": name, "options": options}).model, info, 0)
    found = []
    for flat in (FlatModel(copy.deepcopy(module).to(device), task) for device in ("cpu", setting.machine.device)):
        weights, out = torch.zeros(2, flat.size, device=flat.device)
        flat.read_into(weights)
        flat.bind(weights)
        flat.gradient(inputs, target, out, 0)
        found.append(out[: flat.parameter_count].cpu())
    exact = _exact(module, task, inputs, target)
    of_cpu, error = (float((each - exact).norm() / exact.norm()) for each in found)
    if not error <= (most := LARGEST + MORE * of_cpu):
        raise CheckFailed(f"the relative error is {error:.2g}, on the CPU {of_cpu:.2g}; valid: up to {most:.2g}")
    return {"error": error, "CPU's error": of_cpu}


def _exact(module: torch.nn.Module, task: Task, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the gradient in double precision, (parameters,) float64."""
    exact = copy.deepcopy(module).double().train()
    output = task.compared(exact(inputs.double() if inputs.is_floating_point() else inputs))
    task.loss(output, target).backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.reshape(-1) for parameter in exact.parameters() if parameter.grad is not None])


def same_bits(setting: Setting) -> Figures:
    """Simulates the same training twice, and compares the weights."""
    job = learner_job(setting, "lenet", 16, STEPS).with_(cluster={"learners": 2})
    is_promised = setting.machine.is_host
    if "deterministic" in ClusterTable.model_fields:
        job, is_promised = job.with_(cluster={"deterministic": True}), True
    sums = []
    for _ in range(2):
        path = setting.directory / "bits.h5"
        with rudra.simulate(job, output=path, force=True, progress="quiet") as results:
            sums.append(results.summary()["weights_sha256"])
    if sums[0] != sums[1] and is_promised:
        raise CheckFailed(f"the weights after {STEPS} steps differ: {sums[0][:12]} and {sums[1][:12]}")
    return {"steps": STEPS, "identical": "yes" if sums[0] == sums[1] else "no"}


def rank_steps(name: str, size: int, setting: Setting) -> Figures:
    """Counts on the rank of a learner what each of its steps costs, after some steps to warm up."""
    file = setting.directory / "steps.json"
    options = {"device": setting.machine.name, "file": str(file)}
    hook = {"at": "update", "role": "learner 0", "call": watch, "options": options}
    job = learner_job(setting, name, size, WARM + COUNTED + PROFILED + 2).with_(hooks=[hook])
    with rudra.run(job, output=setting.directory / "steps.h5", force=True, progress="quiet"):
        found = json.loads(file.read_text(encoding="utf-8"))
    if setting.machine.is_host:
        return {"peak MB": found["peak MB"], "waits, allocations and copies": "not on the host"}
    steps = {
        "waits": COUNTED,
        "allocations": COUNTED,
        "pageable copies": PROFILED,
        "copies": PROFILED,
        "bytes": PROFILED,
    }
    each = {f"{what} per step": found[what] / count for what, count in steps.items()}
    return {**each, "peak MB": found["peak MB"]}


REFUSALS = {
    "label": f"data.options.largest={CLASSES}",
    "memory": "model.name=benchmarks.gpu_jobs:Hungry",
    "tf32": "training.precision=tf32",
}
"""Mistakes that a run must refuse in one line, as settings of a job."""

JOB = """\
[model]
name = "lenet"

[data]
name = "benchmarks.gpu_jobs:images"
classes = {classes}
options = {{ shape = [1, 28, 28], count = 320 }}

[training]
epochs = 1
evaluate = false

[cluster]
learners = 1
device = "{device}"
"""


def refused(name: str, setting: Setting) -> Figures:
    """Runs a job with a mistake, and checks that the run ends with one line and no traceback."""
    if setting.machine.is_host and name == "memory":
        raise LeftOut("a program must not use up main memory")
    job = setting.directory / "job.toml"
    job.write_text(JOB.format(classes=CLASSES, device=setting.machine.in_jobs), encoding="utf-8")
    command = [sys.executable, "-m", "rudra", "run", "job.toml", "--quiet", "--output", f"{name}.h5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package_check.ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--set", REFUSALS[name]],
        env=env,
        cwd=setting.directory,
        capture_output=True,
        text=True,
        timeout=max(setting.left_s, 1),
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 0 and name == "tf32" and not setting.machine.is_host:
        return {"accepted": "this GPU has it"}
    if done.returncode not in (1, 2) or len(lines) != 1:
        about = f"{len(lines)} lines, the last: {lines[-1]}" if lines else "no line"
        raise CheckFailed(f"exit code {done.returncode} and {about}; valid: 1 or 2, and one line")
    return {"exit code": done.returncode, "line": lines[0]}
