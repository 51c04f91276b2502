"""Simulated runs, repeated from their files: the same bits, and every change of the record found where it was made."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from fuzzing import in_turn
from points import SAMPLES, make_job, network, points
from torch.utils.data import Dataset, TensorDataset

import rudra
from protocols.async_ import Async
from rudra.cli.main import main
from rudra.compute.vectors import Buffer
from rudra.core.digest import SAMPLED, sha256
from rudra.errors import ConfigError, ReplayError, RudraError

OWN = {
    "schedule": "cosine",
    "warm_up": 1.3,
    "clip_norm": 0.5,
    "momentum": 0.9,
    "groups": [{"parameters": "*.bias", "rate_factor": 2.0}],
}


CAFFE = {"momentum_form": "caffe"}


class Hogwild(Async):
    replayable = False


class Bounded(Async):
    """Nobody is more than one gradient ahead of the slowest."""

    def pull_granted(self, learner: int, timestamp: int, clock: Any) -> bool:
        return clock.pushed[learner] - min(clock.pushed) <= 1


class Eager(Async):
    """Adds in learner order, and lets everybody go on at once."""

    ordered = True

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.gradients_per_update = learners


def simulate(job: rudra.Job, path: Path) -> dict[str, Any]:
    with rudra.simulate(job, output=path, progress="quiet") as results:
        return results.summary()


@pytest.mark.parametrize(
    "job",
    [
        make_job("hardsync"),
        make_job("softsync", 4, protocol={"n": 2}, optimizer={"name": "adagrad"}),
        make_job("softsync", 5, protocol={"n": 2, "modulation": "mean_staleness", "reference_batch_size": 7}),
        make_job("async", protocol={"modulation": "gradient_staleness"}, training={"evaluate": False}),
        make_job("async", 1, optimizer={"name": "adam"}),
        make_job("softsync", 3, results={"minibatches": False}, optimizer={"milestones": [1], "momentum": 0.5}),
        make_job("softsync", 4, protocol={"n": 2}, optimizer=OWN),
        make_job("softsync", 4, protocol={"n": 4, "modulation": "mean_staleness"}, optimizer={**OWN, **CAFFE}),
        make_job(Bounded, 4),
        make_job(Eager, 3),
        make_job("async", 6, data={"train_limit": 50}),
        make_job("async", 2, training={"precision": "bfloat16"}),
        make_job("softsync", 2, training={"precision": "float16"}),
        make_job("async", 2, training={"minibatch_size": 7, "microbatches": 3}),
    ],
    ids=lambda job: f"{getattr(job.protocol.name, '__name__', job.protocol.name)}-{job.optimizer.name}-{job.learners}",
)
def test_a_simulation_is_repeated_bit_for_bit(tmp_path: Path, job: rudra.Job) -> None:
    path = tmp_path / "run.h5"
    summary = simulate(job, path)
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == replayed.recorded == summary["updates"]
    assert str(replayed) == f"identical: {summary['updates']} updates, weights sha256 {summary['weights_sha256']}"


TREE = {"name": "adv", "options": {"fan_out": 2}}
HIDDEN = {"name": "adv*", "options": {"fan_out": 2, "weight_fan_out": 1}}
BUSY = {"nodes": 2, "bandwidth_bytes_per_s": 1e5, "update_s": 1e-3, "message_s": 1e-3}


def groups(count: int) -> dict[str, Any]:
    return {"name": "groups", "options": {"groups": count}}


OTHER_TREES = [{"name": "adv"}, {"name": "adv", "options": {"fan_out": [1, 3]}}]
RULES: list[dict[str, Any]] = [{"name": "softsync", "n": 2}, {"name": "softsync"}, {"name": "async"}]
PAIRS = [
    *((topology, rule) for topology in [TREE, groups(2)] for rule in [*RULES, {"name": "hardsync"}]),
    *in_turn([*OTHER_TREES, groups(5)], [*RULES, {"name": "hardsync"}]),
    *((HIDDEN, rule) for rule in RULES),
    *in_turn([{"name": "adv*"}], RULES, each=1),
    *((groups(1), {"name": name}) for name in ("softsync", "async", "hardsync")),
    ({"name": "groups", "options": {"groups": 1, "parameter_server": True}}, {"name": "hardsync"}),
    *(({"name": "groups", "options": {"groups": g, "reduction": "nodes"}}, {"name": "hardsync"}) for g in (1, 2)),
]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "protocol"), PAIRS, ids=str)
def test_a_simulation_on_any_topology_is_repeated_bit_for_bit(
    tmp_path: Path, topology: dict[str, Any], protocol: dict[str, Any]
) -> None:
    path = tmp_path / "run.h5"
    job = make_job(learners=5, topology=topology, protocol={"modulation": "auto", **protocol}, simulation=BUSY)
    summary = simulate(job, path)
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == replayed.recorded == summary["updates"] > 5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An async run: each update is of one gradient."""
    path = tmp_path_factory.mktemp("recorded") / "run.h5"
    simulate(make_job(), path)
    return path


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softsync run: each update is of two gradients."""
    path = tmp_path_factory.mktemp("grouped") / "run.h5"
    simulate(make_job("softsync", 4, protocol={"n": 2}), path)
    return path


def rows(change: Callable[[Any], Any], table: str) -> Callable[[h5py.File], None]:
    """Replaces the rows of a table by what a function makes of them."""

    def tamper(file: h5py.File) -> None:
        made = change(file[table][()])
        file[table].resize((len(made),))
        file[table][...] = made

    return tamper


def field(table: str, place: int, name: str, change: Callable[[Any], Any]) -> Callable[[h5py.File], None]:
    def changed(all_: Any) -> Any:
        all_[name][place] = change(all_[name][place])
        return all_

    return rows(changed, table)


def swapped(first: int, *names: str) -> Callable[[h5py.File], None]:
    """Exchanges a gradient with the next one, wholly or in some fields."""

    def changed(all_: Any) -> Any:
        for name in names or all_.dtype.names:
            all_[name][[first, first + 1]] = all_[name][[first + 1, first]]
        return all_

    return rows(changed, "gradients")


def attribute(name: str, value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.attrs.__setitem__(name, value)


def without(table: str, place: int) -> Callable[[h5py.File], None]:
    return rows(lambda all_: np.delete(all_, place), table)


def moved(file: h5py.File) -> None:
    """The last learner is in the first group."""
    roles = file["roles"][()]
    learners = np.flatnonzero(roles["kind"] == b"learner")
    roles["group"][learners[-1]] = roles["group"][learners[0]]
    file["roles"][...] = roles


PLACE, UPDATE = 19, 20
WHO = ("learner", "step", "timestamp", "samples", "loss", "errors")


@pytest.mark.parametrize(
    ("tamper", "update", "said"),
    [
        (swapped(PLACE), UPDATE, "update: 21 in the record, 20 in the replay"),
        (swapped(PLACE, *WHO), UPDATE, ""),
        (field("gradients", PLACE, "step", lambda x: x + 1), UPDATE, "step: "),
        (field("gradients", PLACE, "learner", lambda x: (x + 1) % 3), UPDATE, "gradient of learner"),
        (field("gradients", PLACE, "learner", lambda x: 77), UPDATE, "there are 3 learners"),
        (field("gradients", PLACE, "timestamp", lambda x: x - 1), UPDATE, "gradient of learner"),
        (field("gradients", PLACE, "timestamp", lambda x: 10**6), UPDATE, "could not have reached it"),
        (field("gradients", PLACE, "samples", lambda x: x + 1), UPDATE, "samples: 5 in the record, 4 in the replay"),
        (field("gradients", PLACE, "staleness", lambda x: x + 1), UPDATE, "staleness: "),
        (field("gradients", PLACE, "scale", lambda x: 0.5), UPDATE, "scale: 0.5 in the record, 1.0 in the replay"),
        (field("gradients", PLACE, "loss", lambda x: np.nextafter(x, 9)), UPDATE, "loss: "),
        (field("gradients", PLACE, "errors", lambda x: x + 1), UPDATE, "errors: "),
        (field("gradients", PLACE, "update", lambda x: x + 1), UPDATE, "update: "),
        (field("updates", PLACE, "learning_rate", lambda x: 2 * x), UPDATE, "learning rate: 0.04 in the record, 0.02"),
        (field("updates", PLACE, "digest", lambda x: x ^ np.uint64(1)), UPDATE, "weights, digest: "),
        (field("updates", PLACE, "gradients", lambda x: x + 1), UPDATE, "gradients: 2 in the record, 1 in the replay"),
        (field("updates", PLACE, "mean_staleness", lambda x: x + 1), UPDATE, "mean staleness: "),
        (field("updates", PLACE, "epoch", lambda x: x + 1), UPDATE, "epoch: "),
        (without("gradients", PLACE), UPDATE, "update: 21 in the record, 20 in the replay"),
        (without("updates", PLACE), UPDATE, "timestamp: 21 in the record, 20 in the replay"),
        (without("gradients", -1), 72, "a row of /gradients is missing"),
        (without("updates", -1), 72, "a row of /updates is missing"),
        (rows(lambda all_: np.insert(all_, PLACE, all_[PLACE]), "gradients"), UPDATE + 1, "update: 20 in the record"),
        (field("epochs", 1, "weights_sha256", lambda x: b"0" * 64), 48, "weights of epoch 2, sha256: 000"),
        (field("state", 0, "weights_sha256", lambda x: b"0" * 64), 72, "final weights, sha256: 000"),
        (attribute("initial_weights_sha256", "0" * 64), 0, "initial weights, sha256: 000"),
    ],
)
def test_a_tampered_record_is_detected_and_located(
    tmp_path: Path, recorded: Path, tamper: Callable[[h5py.File], None], update: int, said: str
) -> None:
    path = tmp_path / "tampered.h5"
    shutil.copy(recorded, path)
    with h5py.File(path, "r+") as file:
        tamper(file)
    difference = rudra.replay(path, quiet=True).difference
    assert difference.update == update, difference
    assert said in difference.text
    assert "\n" not in difference.text


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (attribute("scheduled", True), "attribute 'scheduled' does not match its job"),
        (attribute("averaging", True), "attribute 'averaging' does not match its job"),
        (attribute("overlapped", True), "attribute 'overlapped' does not match its job"),
        (moved, "column group of /roles does not match its job"),
    ],
)
def test_a_file_whose_roles_are_not_those_of_its_job_is_damaged(
    tmp_path: Path, tamper: Callable[[h5py.File], None], said: str
) -> None:
    path = tmp_path / "tampered.h5"
    simulate(make_job(learners=4, topology=groups(2)), path)
    with h5py.File(path, "r+") as file:
        tamper(file)
    with pytest.raises(ReplayError, match=f"tampered.h5: damaged: {said}"):
        rudra.replay(path, quiet=True)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (swapped(2 * PLACE), ""),
        (swapped(2 * PLACE, *WHO), ""),
        (without("gradients", 2 * PLACE + 1), "update: 21 in the record, 20 in the replay"),
        (field("gradients", 2 * PLACE + 1, "samples", lambda x: x - 1), "samples: 3 in the record, 4 in the replay"),
    ],
)
def test_the_order_inside_an_update_counts(
    tmp_path: Path, grouped: Path, tamper: Callable[[h5py.File], None], said: str
) -> None:
    path = tmp_path / "tampered.h5"
    shutil.copy(grouped, path)
    with h5py.File(path, "r+") as file:
        tamper(file)
    replayed = rudra.replay(path, quiet=True)
    if said:
        assert replayed.difference.update == UPDATE
        assert said in replayed.difference.text
    else:  # whichever of two gradients comes first: the average differs in its last bits, or it does not
        assert replayed.difference is None or replayed.difference.update == UPDATE


ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tree, async": (TREE, {}),
    "tree, softsync": (TREE, {"name": "softsync"}),
    "tree, hardsync": (TREE, {"name": "hardsync"}),
    "adv*, async": (HIDDEN, {}),
    "adv*, softsync": (HIDDEN, {"name": "softsync", "n": 2}),
    "groups, async": (groups(2), {}),
    "groups, hardsync": (groups(2), {"name": "hardsync"}),
    "one group": (groups(1), {"name": "hardsync"}),
}


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on other topologies."""
    topology, protocol = ELSEWHERE[request.param]
    path = tmp_path_factory.mktemp("elsewhere") / "run.h5"
    simulate(make_job(learners=5, topology=topology, protocol=protocol, simulation=BUSY), path)
    return path


TAMPERED: list[tuple[str, int, Callable[[int], Callable[[h5py.File], None]]]] = [
        *(("gradients", which, tamper) for which in (0, -1) for tamper in [
            lambda place: field("gradients", place, "learner", lambda x: (x + 1) % 5),
            lambda place: field("gradients", place, "step", lambda x: x + 1),
            lambda place: field("gradients", place, "timestamp", lambda x: x - 1),
            lambda place: field("gradients", place, "loss", lambda x: np.nextafter(x, 9)),
            lambda place: field("gradients", place, "update", lambda x: x + 1),
            lambda place: without("gradients", place),
        ]),
        ("updates", 0, lambda place: field("updates", place, "digest", lambda x: x ^ np.uint64(1))),
        ("updates", 0, lambda place: field("updates", place, "learning_rate", lambda x: 2 * x)),
        ("updates", 0, lambda place: without("updates", place)),
]  # fmt: skip


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "which", "tamper", "elsewhere"),
    [(*tampered, where) for tampered, where in in_turn(TAMPERED, [*ELSEWHERE], each=3)],
    indirect=["elsewhere"],
)
def test_tampering_is_located_on_every_topology(
    tmp_path: Path, elsewhere: Path, table: str, which: int, tamper: Callable[[int], Callable[[h5py.File], None]]
) -> None:
    """In the tenth update, or in its first or last gradient: of a message that stands for several, too."""
    path = tmp_path / "tampered.h5"
    shutil.copy(elsewhere, path)
    with h5py.File(path, "r+") as file:
        clock = file[table]["update" if table == "gradients" else "timestamp"]
        tamper(int(np.nonzero(clock == 10)[0][which]))(file)
    difference = rudra.replay(path, quiet=True).difference
    assert difference.update == 10, difference
    assert "\n" not in difference.text


@pytest.mark.parametrize(("elsewhere", "update"), in_turn(ELSEWHERE, [0, 1, 10], each=1), indirect=["elsewhere"])
def test_until_leaves_the_weights_of_that_update_on_every_topology(
    tmp_path: Path, elsewhere: Path, update: int
) -> None:
    target = tmp_path / "weights.pt"
    assert rudra.replay(elsewhere, until=update, output=target, quiet=True).updates == update
    state = torch.load(target, weights_only=True)
    with rudra.open_results(elsewhere) as results:
        entries = results.layout
        weights = Buffer(sum(entry.size for entry in entries), 0)
        torch.cat([state[entry.name].flatten() for entry in entries], out=weights.vector)
        if update:
            assert weights.digest(update) == results.updates["digest"][update - 1]
        else:
            assert sha256(weights.array) == results.attributes["initial_weights_sha256"]


@pytest.mark.parametrize("update", [0, 1, 24, 48, 72])
def test_until_leaves_the_weights_of_that_update(tmp_path: Path, recorded: Path, update: int) -> None:
    target = tmp_path / "weights.pt"
    replayed = rudra.replay(recorded, until=update, output=target, quiet=True)
    state = torch.load(target, weights_only=True)
    model = network()
    model.load_state_dict(state)
    with rudra.open_results(recorded) as results:
        entries, epochs, initial = results.layout, results.epochs, results.attributes["initial_weights_sha256"]
        final = results.state["weights_sha256"]
    digest_ = sha256(torch.cat([state[entry.name].flatten() for entry in entries]).numpy())
    hashes = {int(row["timestamp"]): row["weights_sha256"].decode() for row in epochs} | {0: initial, 72: final}
    assert digest_ == replayed.weights_sha256 == hashes.get(update, digest_)
    assert (replayed.updates, replayed.recorded) == (update, 72)
    assert update == 72 or f"identical: {update} of 72 updates" in str(replayed)


class Breaking(Dataset[Any]):
    """Raises where it has given so many mini-batches."""

    def __init__(self, after: float) -> None:
        self.inner, self.after, self.given = points()[0], after, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getitems__(self, indices: list[int]) -> Any:
        self.given += len(indices) > 1  # what looks at the data before training draws one sample at a time
        if self.given > self.after:
            raise ValueError("the user's own bug")
        return [self.inner[index] for index in indices]


def breaking(after: float = math.inf) -> tuple[Breaking, TensorDataset]:
    return Breaking(after), points()[1]


def test_a_run_that_failed_is_repeated_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    job = make_job("softsync", 4, protocol={"n": 2}, data={"name": breaking, "options": {"after": 41}})
    with pytest.raises(ValueError, match="own bug"):
        rudra.simulate(job, output=path, progress="quiet")
    whole = job.with_(data={"options": {}})
    with pytest.raises(ConfigError, match=r"ran with data.options = \{'after': 41\}, not \{\}; use the job of the run"):
        rudra.replay(path, job=whole, quiet=True)
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert 15 < replayed.updates == replayed.recorded <= 20
    assert f"identical: {replayed.updates} updates (the run is failed)" in str(replayed)


@pytest.mark.parametrize(
    ("gradients", "updates", "expected"),
    [(144, 72, 72), (97, 60, 48), (98, 60, 49), (144, 40, 40), (0, 7, 0), (3, 0, 0)],
)
def test_a_killed_run_counts_as_far_as_its_record_is_complete(
    tmp_path: Path, grouped: Path, gradients: int, updates: int, expected: int
) -> None:
    path = tmp_path / "killed.h5"
    shutil.copy(grouped, path)
    with h5py.File(path, "r+") as file:
        for table, count in (("gradients", gradients), ("updates", updates), ("totals", 0), ("learners", 0)):
            file[table].resize((min(count, len(file[table])),))
        field("state", 0, "status", lambda x: b"interrupted")(file)
        total = len(file["updates"])
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.updates == min(expected, total) == replayed.recorded


def test_another_machine_is_said_before_anything_is_compared(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.h5"
    shutil.copy(recorded, path)
    told = {"torch_version": "1.2.3", "cpu_capability": "AVX9", "processor": "6510"}
    with h5py.File(path, "r+") as file:
        file.attrs.update({**told, "initial_weights_sha256": "0" * 64})
    assert main(["replay", str(path), "--quiet"]) == 1
    said = capsys.readouterr()
    assert f"{path}: differs: before the first update (of 72): initial weights, sha256: 000" in said.out
    for value in told.values():
        assert f"was {value}, here it is " in said.err
    assert said.err.count("\n") == len(told)


def test_more_threads_than_cores_are_said(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.h5"
    shutil.copy(recorded, path)
    with h5py.File(path, "r+") as file:
        file.attrs["threads_per_rank"] = 4096
    assert main(["replay", str(path), "--quiet", "--until", "1"]) == 0
    said = capsys.readouterr()
    assert "computed with 4096 threads" in said.err
    assert said.out.startswith(f"{path}: identical: 1 of 72 updates, weights sha256 ")
    assert (tmp_path / "run-1.pt").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--until", "73"], "--until 73: valid: 0 to 72, the updates recorded"),
        (["--until", "-1"], "--until -1: valid: 0 to 72"),
        (["--output", "w.pt"], "--output is for the weights of --until: also give --until"),
        (["--until", "3", "--output", "nowhere/w.pt"], "nowhere/w.pt: directory nowhere does not exist"),
        (["--set", "training.epochs=2"], "--set training.epochs=2: a replay cannot change this key; use data.path or"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    recorded: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["replay", str(recorded), *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_what_cannot_be_repeated_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.h5"
    simulate(make_job(Hogwild), path)
    assert main(["replay", str(path)]) == 2
    assert "cannot be replayed: protocol " in (said := capsys.readouterr().err)
    assert "Hogwild declares that it is not replayable" in said
    with rudra.open_results(path) as results:
        assert results.attributes["replayable"] is False


def test_a_job_with_python_objects_is_repeated_with_the_job_that_has_them(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    job = make_job(data={"name": points()})
    simulate(job, path)
    with pytest.raises(ReplayError, match=r"data.name was given as a Python object.*rudra.replay\(file, job=job\)"):
        rudra.replay(path)
    assert rudra.replay(path, job=job, quiet=True).identical
    other = job.with_(optimizer={"learning_rate": 0.5})
    with pytest.raises(ConfigError, match=r"ran with optimizer.learning_rate = 0.02, not 0.5; use the job of the run"):
        rudra.replay(path, job=other)


def test_a_file_from_before_a_key_is_repeated_with_a_job_that_leaves_it_out(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    job = make_job()
    simulate(job, path)
    with h5py.File(path, "r+") as file:
        tables = json.loads(file.attrs["job"])
        del tables["optimizer"]["schedule"], tables["optimizer"]["groups"]
        file.attrs["job"] = json.dumps(tables)
    assert rudra.replay(path, job=job, quiet=True).identical
    assert rudra.replay(path, quiet=True, trust=True).identical


def test_a_local_function_is_no_name(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    job = make_job().with_(model={"name": lambda: network()})
    simulate(job, path)
    with pytest.raises(RudraError, match=r"model.name was given as a Python object"):
        rudra.replay(path)
    assert rudra.replay(path, job=job, quiet=True).identical


@pytest.mark.parametrize("size", [1, 7, SAMPLED, 3 * SAMPLED + 5, 50_000])
def test_in_the_course_of_a_run_the_digest_sees_every_element(size: int) -> None:
    weights = Buffer(size, 0)
    stride = max(1, size // SAMPLED)
    plain = [weights.digest(timestamp) for timestamp in range(stride)]
    for place in {0, size // 2, size - 1}:
        weights.vector[place] = 1e-30
        assert sum(weights.digest(timestamp) != plain[timestamp] for timestamp in range(stride)) == 1
        weights.vector[place] = 0.0
