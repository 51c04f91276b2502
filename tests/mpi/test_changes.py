"""Runs that change, are resumed across a change, lose a learner, and begin with each other's checkpoints."""

import os
import signal
from pathlib import Path

import parts_on_ranks
import pytest
import runs_on_ranks
from processes import below, finish, gone, ranks_of, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from rudra.results import checkpoint
from tests.selection import CAMPAIGN, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def job_file(directory: Path, name: str, protocol: str, *changes: str, more: str = "", momentum: float = 0.9) -> Path:
    """Four epochs of digits for two learners; the first has 20 updates of hardsync with μ = 8."""
    path = directory / f"{name}.toml"
    path.write_text(
        '[model]\nname = "mlp"\n[data]\nname = "digits"\ntrain_limit = 320\n'
        "[training]\nepochs = 4\nminibatch_size = 8\nseed = 3\n"
        f"[optimizer]\nlearning_rate = 0.05\nmomentum = {momentum}\n"
        f'[protocol]\nname = "{protocol}"\n[cluster]\nlearners = 2\nthreads_per_rank = 1\n{more}'
        + "".join(f"[[changes]]\n{change}" for change in changes)
    )
    return path


WARM = 'at_epoch = 1\nprotocol.name = "softsync"\nprotocol.n = 1\n'
KEEPING = '[results]\nkeep_checkpoints = "1 epochs"\n'
OFTEN = "[results]\nflush_s = 0.1\nreport_s = 0.02\n"
GROWING = "at_epoch = 2\ntraining.minibatch_size = 16\n"


def run(job: Path, output: Path, *more: str | Path) -> None:
    code, _, err = finish(start("run", job, "--output", output, "--quiet", *more))
    assert code == 0, err


def events(path: Path, kind: str) -> list[tuple[int, str]]:
    with rudra.open_results(path) as results:
        return [(int(row["timestamp"]), row["text"].decode()) for row in results.events if row["kind"] == kind.encode()]


CASES = {
    "base": ("hardsync", "", [WARM, GROWING]),
    "adv*": ("async", '[topology]\nname = "adv*"\n', [WARM, GROWING]),
    "groups": (
        "async",
        '[topology]\nname = "groups"\noptions = { groups = 2 }\n',
        ['at_epoch = 1\nprotocol.name = "hardsync"\n', GROWING],
    ),
}
SETTLING = "at_update = 30\noptimizer.momentum = 0.4\noptimizer.learning_rate = 0.02\n"
CASES |= {
    "sharded": ("async", '[topology]\nname = "sharded"\noptions.shards = 2\n', [SETTLING, GROWING]),
    "average": ("average", "", ["at_update = 7\naveraging.period = 2\n", "at_epoch = 2\noptimizer.momentum = 0.4\n"]),
    "elastic": (
        "easgd",
        "[topology]\noptions.parameter_server = true\n",
        ["at_epoch = 1\naveraging.period = 2\n", SETTLING.replace("30", "70")],
    ),
    "hogbatch": (
        "hogbatch",
        '[[hogbatch.workers]]\nkind = "large"\nmin = 8\nmax = 8\n',
        [SETTLING, "at_epoch = 3\noptimizer.momentum = 0\n"],
    ),
    "window": (
        "hogbatch",
        '[hogbatch]\nweights = "shared"\nlocking = true\n[[hogbatch.workers]]\nkind = "small"\n',
        [f"at_epoch = {epoch}\noptimizer.learning_rate = {rate}\n" for epoch, rate in ((1, 0.02), (2, 0.01))],
    ),
    "placed": (
        "hardsync",
        '[placement]\ncut = 2\nrule = "synchronous"\n',
        [SETTLING, "at_epoch = 2\noptimizer.momentum = 0\n"],
    ),
}
"""Jobs by name: protocol, further tables, and two changes."""


@pytest.mark.parametrize("cases", together(["adv*", "sharded", "elastic", "window"], CASES))
def test_runs_that_change_are_replayed(tmp_path: Path, cases: list[str]) -> None:
    """All on the same ranks. Checkpoints of the epochs at whose ends the job changes are kept as well."""
    jobs = {
        str(tmp_path / f"{name}.h5"): rudra.Job.load(
            job_file(tmp_path, name, protocol, *changes, more=KEEPING + tables, momentum=momentum_of(name))
        )
        for name, (protocol, tables, changes) in CASES.items()
        if name in cases
    }
    on_ranks(runs_on_ranks.train_as_needed, 3, jobs=jobs)  # one for the stage server
    for output in map(Path, jobs):
        with rudra.open_results(output) as results:
            (first, second) = [at for at, _ in events(output, "change")]
            gradients, account = results.gradients, results.totals[0]
            after = gradients[gradients["update"] > second]
            grown = results.job["changes"][1]["training"]
            assert not grown or set(after["samples"]) == {16}
            assert after["timestamp"].min() >= second > first
            assert account["pushed"] == sum(account[name] for name in ("applied", "pending", "discarded", "lost"))
        for epoch in range(1, 5):
            state, _ = checkpoint.read(output.with_name(f"{output.stem}-{epoch}.ckpt"))
            assert state.position.epoch == epoch
        assert replays(output)


def momentum_of(name: str) -> float:
    return 0.0 if name == "window" else 0.9


def test_states_of_a_checkpoint_that_was_given_up_are_dropped() -> None:
    first, *_ = on_ranks(parts_on_ranks.states_after_a_given_up_checkpoint, 1)
    assert first["found"] == [None, [6.0, 6.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("protocol", "topology", "before"),
    [
        ("hardsync", '[topology]\nname = "groups"\n', []),
        pytest.param(
            "average",
            "",
            ["at_update = 40\noptimizer.momentum = 0.5\naveraging.outer.learning_rate = 0.9\n"],
            marks=CAMPAIGN,
        ),
    ],
)
def test_growing_batches_stopped_before_and_after_reach_the_bits_of_a_run_that_never_stopped(
    tmp_path: Path, protocol: str, topology: str, before: list[str]
) -> None:
    growing = "at_epoch = 2\ntraining.minibatch_size = 4\n"
    job = slowly(job_file(tmp_path, "job", protocol, *before, growing, more=f"{topology}{OFTEN}"))
    output = tmp_path / "out.h5"
    for parts, update in enumerate((10, 130)):  # the job changes after update 120
        process = start("run", job, "--output", output, "--resume")
        wait_for_updates(process, output, update, parts=parts)
        ranks = below(process.pid)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        assert code == 3, err
        assert gone(ranks)
    run(job, output, "--resume")
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "whole.h5", progress="quiet") as whole:
        expected = whole.summary()
    with rudra.open_results(output) as results:
        assert results.summary()["weights_sha256"] == expected["weights_sha256"]
        assert results.summary()["changes"] == expected["changes"]
        assert len(results.updates) == expected["updates"]
    assert replays(output)


@pytest.mark.parametrize(
    ("update", "kinds"), [pytest.param(10, ["lost", "change"], marks=CAMPAIGN), (130, ["change", "lost"])]
)
def test_a_learner_that_dies_before_or_after_a_change_is_left_behind(
    tmp_path: Path, update: int, kinds: list[str]
) -> None:
    job = job_file(tmp_path, "job", "hardsync", WARM.replace("at_epoch = 1", "at_epoch = 3"), more=OFTEN)
    slow, output = slowly(job, learners=3, epochs=5), tmp_path / "out.h5"
    process = start("run", slow, "--output", output)
    wait_for_updates(process, output, update)
    os.kill(ranks_of(process)[4], signal.SIGKILL)
    wait_for_deaths(process, output)
    code, _, err = finish(process)
    assert code == 0, err
    assert "learner 2 (rank 4) died; 2 learners are left, 2 gradients make an update" in err
    with rudra.open_results(output) as results:
        assert [kind.decode() for kind in results.events["kind"] if kind != b"checkpoint"] == kinds
        gradients, account = results.gradients, results.totals[0]
        assert account["pushed"] == sum(account[name] for name in ("applied", "pending", "discarded", "lost"))
        for learner in range(3):
            steps = gradients["step"][gradients["learner"] == learner]
            assert list(steps) == list(range(len(steps)))
    assert replays(output)


def slowly(job: Path, learners: int = 2, epochs: int = 4) -> Path:
    """The job with samples that take their time: whoever waits for an update holds it there."""
    job.write_text(
        job.read_text()
        .replace('name = "mlp"', 'name = "small_models:dropping"')
        .replace('name = "digits"\ntrain_limit = 320', 'name = "point_data:delayed"')
        .replace("epochs = 4\nminibatch_size = 8", f"epochs = {epochs}\nminibatch_size = 2")
        .replace("learners = 2", f"learners = {learners}")
    )
    return job


def test_a_branch_of_the_same_job_ends_with_the_bits_of_the_run_that_went_on(tmp_path: Path) -> None:
    job = job_file(tmp_path, "job", "hardsync", more='[results]\nkeep_checkpoints = "1 epochs"\n')
    output = tmp_path / "out.h5"
    run(job, output)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        *(f"out-{i}.ckpt" for i in range(1, 5)),
        "out.ckpt",
    ]
    for epoch in range(1, 5):
        state, _ = checkpoint.read(tmp_path / f"out-{epoch}.ckpt")
        assert (state.position.epoch, state.position.timestamp) == (epoch, 20 * epoch)
    run(job, branch := tmp_path / "branch.h5", "--from", tmp_path / "out-2.ckpt", "--carry", "all")
    with rudra.open_results(output) as results, rudra.open_results(branch) as other:
        whole, same = results.summary(), other.summary()
        assert same["weights_sha256"] == whole["weights_sha256"] is not None
        assert same["updates"] == len(other.updates) == whole["updates"]
        assert same["train_loss"] == whole["train_loss"]
        assert other.updates["digest"].tolist() == results.updates["digest"].tolist()
    assert events(branch, "branch") == [(40, "starts with update 40 of out.h5")]
    assert replays(branch)


def test_a_run_that_is_not_finished_goes_back_to_a_checkpoint_that_was_kept(tmp_path: Path) -> None:
    keep = f'{OFTEN}keep_checkpoints = "1 epochs"\n'
    job, output = slowly(job_file(tmp_path, "job", "hardsync", more=keep)), tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 130)  # 60 are an epoch
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 3
    code, _, err = finish(start("resume", tmp_path / "out-1.ckpt"))
    assert code == 0, err
    (restart,) = events(output, "restart")
    assert restart[0] == 60
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "whole.h5", progress="quiet") as whole:
        expected = whole.summary()
    with rudra.open_results(output) as results:
        assert results.summary()["weights_sha256"] == expected["weights_sha256"]
        assert len(results.updates) == expected["updates"] == 240
    assert checkpoint.read(tmp_path / "out.ckpt")[0].position.epoch == 4


@pytest.mark.campaign  # `test_resume.py` shows it of more families
@pytest.mark.parametrize("protocol", ["hardsync", "sma"])
def test_ranks_and_virtual_time_train_on_from_each_other(tmp_path: Path, protocol: str) -> None:
    job = job_file(tmp_path, "job", protocol, more='[results]\nkeep_checkpoints = "1 epochs"\n')
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "whole.h5", progress="quiet") as results:
        whole = results.summary()
    run(job, output := tmp_path / "ranks.h5", "--from", tmp_path / "whole-2.ckpt", "--carry", "all")
    about = {"from_": tmp_path / "ranks-3.ckpt", "carry": "state", "progress": "quiet"}
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "end.h5", **about) as results:
        end = results.summary()
        assert results.updates["timestamp"][0] == results.attributes["begins_at"] + 1 == 61
    with rudra.open_results(output) as results:
        assert results.summary()["weights_sha256"] == end["weights_sha256"] == whole["weights_sha256"] is not None
        assert len(results.updates) == whole["updates"]
    assert replays(output)


def test_ranks_begin_with_the_state_of_other_families(tmp_path: Path) -> None:
    """From replicas in virtual time to a group with other learners on ranks, and from there to replicas on ranks."""
    keep = '[results]\nkeep_checkpoints = "1 epochs"\n'
    averaging = job_file(tmp_path, "averaging", "sma", more=keep)
    alone = '[topology]\nname = "groups"\noptions.groups = 1\n'
    reducing = job_file(tmp_path, "reducing", "hardsync", more=keep + alone)
    rudra.simulate(rudra.Job.load(averaging), output=tmp_path / "first.h5", progress="quiet").close()
    begin = ("--from", tmp_path / "first-2.ckpt", "--carry", "state", "--learners", "3")
    run(reducing, tmp_path / "second.h5", *begin)
    run(averaging, third := tmp_path / "third.h5", "--from", tmp_path / "second-3.ckpt", "--carry", "all")
    lost = [text.partition("; ")[2] for _, text in events(third, "branch")]
    assert lost == ["the outer momentum is left out; the replicas are left out", "the outer momentum starts at zero"]
    with rudra.open_results(third) as results:
        assert results.epochs["epoch"].tolist() == [3, 4]
        assert results.attributes["begins_at"] + len(results.updates) == results.summary()["updates"]
        assert len(results.learners) == 2
        assert (results.minibatches["learner"] < 2).all()


def test_a_branch_of_another_job_and_one_with_weights_alone(tmp_path: Path) -> None:
    keep = '[results]\nkeep_checkpoints = "25 updates"\n'
    job, other = job_file(tmp_path, "job", "hardsync", more=keep), job_file(tmp_path, "other", "async")
    run(job, tmp_path / "out.h5")
    origin = tmp_path / "out-update25.ckpt"
    run(other, branch := tmp_path / "branch.h5", "--from", origin, "--carry", "all")
    with rudra.open_results(branch) as results:
        assert results.attributes["not_replayable"] == (
            "up to update 25 it is out-update25.ckpt of another job, of which protocol.name was hardsync"
        )
        gradients = results.gradients
        assert (gradients["staleness"][gradients["update"] <= 25] == 0).all()
        assert results.epochs["epoch"].tolist() == [1, 2, 3, 4]
        for learner in range(2):
            steps = gradients["step"][gradients["learner"] == learner]
            assert steps.tolist() == list(range(len(steps)))
    run(other, again := tmp_path / "again.h5", "--from", origin)
    with rudra.open_results(again) as results:
        assert results.job["training"]["warm_start"] == str(origin)
        assert results.updates["timestamp"][0] == 1
    assert replays(again)
    code, _, err = finish(start("run", other, "--output", tmp_path / "x.h5", "--from", again, "--carry", "all"))
    assert (code, err.count("\n")) == (2, 1)
    assert "a result file has no optimiser state" in err
