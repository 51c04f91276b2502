"""Section "time to accuracy" of `rudra bench gpu`: Fashion-MNIST, by a run with one learner and by plain loops."""

import math
import time
from functools import partial

import torch

import rudra
from benchmarks.gpu_rows import Figures, LeftOut, Row, Setting, row
from benchmarks.gpu_speed import Case, Loop, eager, graphed
from benchmarks.shared import data_directory
from rudra.data.load import load
from rudra.job.job import Job

DATA = "fashion-mnist"
RATES = {16: (0.005, 0.01, 0.02), 64: (0.02, 0.05, 0.1), 256: (0.05, 0.1, 0.2)}
"""Learning rates of the plain loops by mini-batch, with momentum."""


def rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section: the run, and one plain loop for each mini-batch."""
    sizes = setting.sized([16, 64, 256], [64], [64])
    plain = [row(f"plain loop, μ = {size}", setting.sized(15, 40, 5), partial(plain_loop, size)) for size in sizes]
    return plain if setting.scale == "quick" else [row("job fashion, one learner", 60, our_run), *plain]


def _job(setting: Setting) -> Job:
    """Returns the shipped job with one learner, which stops at the target."""
    path = data_directory() / DATA
    if not path.is_dir():
        raise LeftOut(f"there is no {path}; RUDRA_DATA can name another place")
    limits = setting.sized({}, {"train_limit": 6000, "test_limit": 1000}, {"train_limit": 600, "test_limit": 200})
    goal = {"target": f"accuracy >= {_goal(setting)}", "target_window": 1, "stop_at_target": True, "epochs": 8}
    return Job.load("fashion").with_(
        data={"path": path, **limits}, training=goal, cluster={"learners": 1, "device": setting.machine.in_jobs}
    )


def _goal(setting: Setting) -> float:
    return setting.sized(0.9, 0.8, 0.2)


def our_run(setting: Setting) -> Figures:
    """Trains the shipped job."""
    goal = _goal(setting)
    with rudra.run(_job(setting), output=setting.directory / "tta.h5", force=True, progress="quiet") as results:
        summary = results.summary()
        best = 1 - min(error for error in summary["test_error"] if error is not None)
    return _figures(goal, summary["time_to_target_s"], summary["target_epoch"], best)


def _figures(goal: float, seconds: float | None, epochs: int | None, best: float) -> Figures:
    if seconds is None:
        return {f"s to {goal:.0%}": "not reached", "best accuracy": best}
    return {f"s to {goal:.0%}": float(seconds), "epochs": float(epochs or 0)}


def plain_loop(size: int, setting: Setting) -> Figures:
    """Trains with each rate, with a graph of the whole step if there are graphs. Returns the soonest rate."""
    job = _job(setting)
    training, test, _, _ = load(job.data)
    assert training is not None
    assert test is not None
    device = setting.machine.device
    sets = []
    for split in (training, test):
        inputs, labels = split.batch(torch.arange(len(split)).numpy())
        sets.append((inputs.to(device), labels.to(device)))
    taken = {rate: _train(setting, size, rate, sets[0], sets[1]) for rate in RATES[size]}
    rate, (seconds, epochs, best) = min(taken.items(), key=lambda each: (each[1][0], -each[1][2]))
    figures = _figures(_goal(setting), None if math.isinf(seconds) else seconds, epochs, best)
    return {**figures, "rate": rate, "loop": "eager" if setting.machine.is_host else "graph"}


Pair = tuple[torch.Tensor, torch.Tensor]


def _train(setting: Setting, size: int, rate: float, training: Pair, test: Pair) -> tuple[float, int, float]:
    """Returns seconds and epochs of training until the target is reached, and the best accuracy."""
    loop = Loop(setting, Case("lenet", size), training, rate)
    start = {name: tensor.clone() for name, tensor in loop.network.state_dict().items()}
    loop.choose()
    step = (eager if setting.machine.is_host else graphed)(setting, loop)
    loop.network.load_state_dict(start)  # a capture has trained already
    for state in loop.optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].zero_()
    so_far, best, epochs = 0.0, 0.0, setting.sized(8, 6, 1)
    for epoch in range(1, epochs + 1):
        loop.order, loop.next = torch.randperm(len(training[1]), device=setting.machine.device), 0
        setting.machine.finish()
        began = time.perf_counter()
        for _ in range(len(training[1]) // size):
            loop.choose()
            step()
        setting.machine.finish()
        so_far += time.perf_counter() - began
        best = max(best, _accuracy(loop, test))
        if best >= _goal(setting):
            return so_far, epoch, best
    return math.inf, epochs, best


@torch.no_grad()
def _accuracy(loop: Loop, test: Pair) -> float:
    right = 0
    for inputs, labels in zip(*(torch.split(tensor, 1000) for tensor in test), strict=True):
        right += int((loop.network(inputs).argmax(1) == labels).sum())
    return right / len(test[1])
