"""Hooks on real ranks: the user's own code in the processes of the roles."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs_on_ranks
from processes import finish, ours, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks

BUG = "ValueError: the user's own bug"

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def job_file(
    directory: Path, hooks: Sequence[str], data: str = "prompt", protocol: str = "async", more: str = ""
) -> Path:
    """Five epochs of a small network on three learners; hooks are "at = …, role = …", and note what they see."""
    path = directory / "job.toml"
    call = f'call = "user_functions:note"\noptions = {{ directory = "{directory}" }}\n'
    tables = [f"[[hooks]]\n{hook}\n{'' if 'call' in hook else call}" for hook in hooks]
    path.write_text(
        f'[model]\nname = "small_models:dropping"\n[data]\nname = "point_data:{data}"\n'
        "[training]\nepochs = 5\nminibatch_size = 4\nseed = 7\n[optimizer]\nlearning_rate = 0.05\n"
        f'[protocol]\nname = "{protocol}"\n[cluster]\nlearners = 3\nthreads_per_rank = 1\n'
        f"[results]\nflush_s = 0.2\nreport_s = 0.0\n{more}{''.join(tables)}"
    )
    return path


def noted(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Role -> what its hooks noted."""
    files = directory.glob("*.jsonl")
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def check(directory: Path, owner: str) -> None:
    """Who noted what is what the result file says, on a process of its own each."""
    notes = noted(directory)
    assert set(notes) == {"statistics server", owner, "learner 1"}
    assert len({(lines[0]["pid"], lines[0]["rank"]) for lines in notes.values()}) == 3
    assert all(len({line["pid"] for line in lines}) == 1 for lines in notes.values())
    assert [lines.pop()["at"] for lines in notes.values()] == ["end"] * 3
    epochs, updates, minibatches = (notes[name] for name in ("statistics server", owner, "learner 1"))
    with rudra.open_results(directory / "out.h5") as results:
        errors = [line["row"]["test_error"] for line in epochs]
        assert np.array_equal(errors, results.epochs["test_error"], equal_nan=True), "some may not be tested"
        assert [line["sha256"].encode() for line in epochs] == results.epochs["weights_sha256"].tolist()
        assert [(u["timestamp"], u["time_s"]) for u in updates] == results.updates[["timestamp", "time_s"]].tolist()
        assert updates[-1]["sha256"] == results.summary()["weights_sha256"]
        rows = results.minibatches[results.minibatches["learner"] == 1]
        assert [(m["step"], m["loss"]) for m in minibatches] == rows[["step", "loss"]].tolist()
        versions = {0: results.attributes["initial_weights_sha256"], **{u["timestamp"]: u["sha256"] for u in updates}}
        assert [m["sha256"] for m in minibatches] == [versions[m["timestamp"]] for m in minibatches]
        if owner == "parameter server":
            began = rows["time_s"] - rows["compute_s"]
            assert np.allclose([m["time_s"] for m in minibatches], began, atol=0.1)
    assert rudra.replay(directory / "out.h5", quiet=True).identical
    assert sum(map(len, noted(directory).values())) == 3 + sum(map(len, notes.values()))


def test_hooks_run_on_the_ranks_of_their_roles(tmp_path: Path) -> None:
    """All on the same ranks."""
    jobs, owners = {}, {}
    for protocol, topology, owner in (
        ("async", 'name = "base"', "parameter server"),
        ("softsync", 'name = "adv*"\noptions.fan_out = 2', "parameter server"),
        ("hardsync", 'name = "groups"\noptions.groups = 1', "learner 0"),
    ):
        directory = tmp_path / protocol
        directory.mkdir()
        roles = ["", f'role = "{owner}"', 'role = "learner 1"']
        hooks = ['at = "epoch"', 'at = "update"', f'at = "update"\n{roles[2]}']
        hooks += [f'at = "end"\n{role}' for role in roles]
        job = job_file(directory, hooks, protocol=protocol, more=f"[topology]\n{topology}\n")
        jobs[str(directory / "out.h5")], owners[directory] = rudra.Job.load(job), owner
    on_ranks(runs_on_ranks.train_as_needed, max(job.plan().ranks for job in jobs.values()) - 2, jobs=jobs)
    for directory, owner in owners.items():
        check(directory, owner)


@pytest.mark.parametrize(
    ("hook", "topology", "said", "kept"),
    [
        ('at = "epoch"\noptions = {at = 3}', "base", f"statistics server (rank 1): {{}} epoch 3: {BUG}", 3),
        (
            'at = "update"\nrole = "learner 1"\noptions = {at = 10, how = "exit"}',
            "adv*",
            "learner 1 (rank 5): {} mini-batch 10: SystemExit: enough",
            0,
        ),
        (
            'at = "update"\noptions = {at = 90, how = "interrupt"}',
            "base",
            "parameter server (rank 0): {} update 90: KeyboardInterrupt",
            0,
        ),
        ('at = "end"\nrole = "learner 1"', "base", f"learner 1 (rank 3): {{}} the end: {BUG}", 5),
    ],
)
def test_what_a_hook_raises_ends_the_run_as_the_users(
    tmp_path: Path, hook: str, topology: str, said: str, kept: int
) -> None:
    output = tmp_path / "out.h5"
    options = "options.fan_out = 2\noptions.outstanding = 1\n" if topology == "adv*" else ""
    more = f'[topology]\nname = "{topology}"\n{options}'
    job = job_file(tmp_path, [f'{hook}\ncall = "user_functions:fail"'], more=more)
    code, _, err = finish(start("run", job, "--quiet", "--output", output))
    assert code == 1, err
    line = said.format("hook user_functions:fail, which is the user's own code, failed at")
    assert ours(err) == [f"rudra: {line}"]
    assert err.count("Traceback") == 1
    assert re.search(r'recent call last\):\n  File "[^"]*user_functions.py", line \d+, in fail\n', err)
    with rudra.open_results(output) as results:
        expected = ("finished", "") if 'at = "end"' in hook else ("failed", line)
        assert (results.status, results.state["reason"]) == expected
        assert len(results.epochs) >= kept


def test_a_resumed_run_goes_on_with_its_hooks(tmp_path: Path) -> None:
    hooks = ['at = "epoch"', 'at = "update"\nevery = 10', 'at = "end"', 'at = "end"\nrole = "learners"']
    job, output = job_file(tmp_path, hooks, "delayed", "hardsync"), tmp_path / "out.h5"
    process = start("run", job, "--quiet", "--output", output)
    wait_for_updates(process, output, 33)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 3, err
    before = {role: lines.pop() for role, lines in noted(tmp_path).items() if role != "parameter server"}
    assert [line["at"] for line in before.values()] == ["end"] * 4, "the run was stopped in order"
    code, _, err = finish(start("resume", output, "--quiet"))
    assert code == 0, err
    after = noted(tmp_path)
    epochs, updates = after["statistics server"], after["parameter server"]
    assert [line["epoch"] for line in epochs if line["at"] == "epoch"] == [1, 2, 3, 4, 5]
    assert [line["timestamp"] for line in updates] == list(range(10, 101, 10))
    assert all([line["at"] for line in after[f"learner {i}"]] == ["end"] * 2 for i in range(3))
    with rudra.open_results(output) as results:
        tested = [line["sha256"].encode() for line in epochs if line["at"] == "epoch"]
        assert tested == results.epochs["weights_sha256"].tolist()
        assert epochs[-1]["row"]["timestamp"] == 100
        assert epochs[-1]["sha256"] == results.summary()["weights_sha256"]
