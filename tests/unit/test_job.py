"""The job: what it takes, and the line that a user's mistake ends in."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protocols import Clock, Protocol
from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.renamed import answers, translated
from rudra.job.tables import OptimizerTable
from rudra.job.template import toml
from topologies import Plan, base

TRAINING = (
    "epochs, minibatch_size, microbatches, seed, warm_start, evaluate, evaluate_training_set, evaluation_batch_size, "
    "compile, gradients, precision, target, target_window, stop_at_target, patience"
)
TABLES = (
    "model, data, augment, task, training, optimizer, protocol, hogbatch, averaging, placement, topology, cluster, "
    "simulation, fault_tolerance, results, hooks, changes, decisions, study"
)
FOUR = {"learners": 4}
GPUS = {**FOUR, "device": "cuda"}
UNSHARED = "[cluster] transport = '{}' is not supported with {}; use transport = 'auto' or 'staged'"


class Mine(Protocol):
    """A user's own."""


class Patient(Protocol):
    """Learners wait for what others push."""

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return min(clock.pushed) > timestamp


class Quiet(Patient):
    """By timestamps alone."""

    grants_on_push = False

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return clock.timestamp > timestamp


TREE = {"name": "adv", "options": {"fan_out": 2}}
OVERLAPPED = (
    "[topology] name = 'adv*' is not supported with protocol {}, which makes learners wait; use protocol softsync or "
    "async, or topology adv"
)
AVERAGED = (
    "[protocol] modulation = 'gradient_staleness' is not supported with topology adv; use modulation = "
    "'mean_staleness', or topology base"
)
WHEN = "dies_at_s, mean_time_to_failure_s, slows_at_s, mean_time_to_slowdown_s"
NO_FACTOR = "] faults.1 has mean_time_to_slowdown_s, and no factor; set factor"
STEPS = "[optimizer] milestones = [1] is not supported with schedule = 'cosine'; use 'step'"
PATTERNS = "must be names of parameters or patterns such as '*.bias'"
NO_MOMENTUM = (
    "[optimizer] momentum_correction = 'implicit' is not supported without momentum of sgd; use name = 'sgd' with "
    "momentum > 0, or 'none'"
)
AWAY = "; leave it out, or reset it with --set protocol.n="
WEIGHED = {"name": "async", "modulation": "gradient_staleness"}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"trainning": {}}, f"unknown table or key 'trainning'; valid: name, {TABLES}; did you mean training?"),
    ({"training": {"epoch": 1}}, f"[training] unknown key 'epoch'; valid: {TRAINING}; did you mean epochs?"),
    (
        {"protocol": {"nsoft": 2}},
        "[protocol] unknown key 'nsoft'; valid: name, n, modulation, reference_batch_size, options, correction, "
        "correction_options; an option is written options.nsoft",
    ),
    ({"model": 3}, "model must be a table, not 3"),
    ({"model": {"name": 3}}, "[model] name must be a text, not 3"),
    ({"model": {"options": [1]}}, "[model] options must be a table, not [1]"),
    ({"name": {"a": 1}}, "name must be a text, not {'a': 1}"),
    ({"data": {"path": 3}}, "[data] path must be a path, not 3"),
    ({"training": {"epochs": "many"}}, "[training] epochs must be a whole number, not 'many'"),
    ({"training": {"epochs": "16"}}, "[training] epochs must be a whole number, not '16'"),
    ({"training": {"epochs": True}}, "[training] epochs must be a whole number, not True"),
    ({"training": {"epochs": 1.5}}, "[training] epochs must be a whole number, not 1.5"),
    ({"training": {"epochs": 0}}, "[training] epochs must be >= 1, not 0"),
    ({"training": {"seed": 2**63}}, "[training] seed must be below 2**63, not 9223372036854775808"),
    ({"training": {"epochs": 2**31}}, "[training] epochs must be < 2,147,483,648, not 2147483648"),
    ({"cluster": {"learners": 100_001}}, "[cluster] learners must be <= 100,000, not 100001"),
    ({"model": {"options": {"a": [16**5000]}}}, "[model] options must be below 2**63, not a number that long"),
    ({"faults": {}}, "[faults] is now [fault_tolerance]"),
    ({"fault_tolerance": {"stall_limit": 9.0}}, "[fault_tolerance] stall_limit is now stall_limit_s"),
    ({"cluster": {"wire": "float16"}}, "[cluster] wire is now gradient_format"),
    ({"cluster": {"gpu_aware_mpi": True}}, "[cluster] gpu_aware_mpi is now transport (true is 'mpi')"),
    *(
        (
            {"cluster": {**FOUR, "transport": name}},
            f"[cluster] transport = '{name}' is for GPUs, and [cluster] device = 'cpu'; use transport = 'auto'",
        )
        for name in ("ipc", "mpi", "nccl", "staged")
    ),
    *(
        ({"cluster": {**GPUS, "cpu_learners": value, **more}, **tables}, f"[cluster] {said}")
        for value, more, tables, said in (
            (-1, {}, {}, "cpu_learners must be >= 0, or a list that names each learner once, not -1"),
            ([0, 0], {}, {}, "cpu_learners must be >= 0, or a list that names each learner once, not [0, 0]"),
            (True, {}, {}, "cpu_learners must be a number, or a list of learners' numbers, not True"),
            ([4], {}, {}, "cpu_learners = [4] names learner 4, which does not exist; use 0 to 3"),
            (4, {}, {}, "cpu_learners = 4 leaves no learner for a GPU; use device = 'cpu', or more learners"),
            (
                1,
                {"device": "auto"},
                {},
                "cpu_learners = 1 is not supported with device = 'auto'; use device = 'cuda'",
            ),
            (
                1,
                {"learners_per_device": 2},
                {},
                "cpu_learners = 1 is not supported with learners_per_device = 2, as all banks compute alike; "
                "remove one of them",
            ),
            (
                1,
                {},
                {"protocol": {"name": "hogbatch"}},
                "cpu_learners = 1 is not supported with protocol hogbatch; use device = 'cpu' in [[hogbatch.workers]]",
            ),
            (
                1,
                {"learners_per_rank": 2},
                {},
                "learners_per_rank = 2 is not supported if learner 3, but not its whole rank, computes on the CPU; "
                "use learners_per_rank = 1",
            ),
            (
                1,
                {"one_rank": True},
                {},
                "one_rank = true is not supported if learner 3, but not its whole rank, computes on the CPU; use "
                "one_rank = false",
            ),
            (
                1,
                {"transport": "ipc"},
                {},
                "transport = 'ipc' is not supported with cpu_learners; use transport = 'auto' or 'staged'",
            ),
            (
                1,
                {"transport": "nccl"},
                {"topology": {"name": "groups"}, "protocol": {"name": "hardsync"}},
                "transport = 'nccl' is not supported with cpu_learners; use transport = 'auto' or 'staged'",
            ),
        )
    ),
    (
        {"cluster": {**GPUS, "transport": "ipc", "one_rank": True}},
        "[cluster] transport = 'ipc' is not supported with one rank; use transport = 'auto', or one_rank = false",
    ),
    *(
        ({**tables, "cluster": {**GPUS, "transport": name, **tables.get("cluster", {})}}, UNSHARED.format(name, why))
        for name, tables, why in (
            ("mpi", {"topology": {"name": "groups"}}, "compute groups"),
            ("mpi", {"cluster": {"gradient_format": "float16"}}, "gradient_format = 'float16'"),
            ("ipc", {"cluster": {"node_memory": False}}, "node_memory = false"),
            ("mpi", {"topology": {"name": "sharded"}}, "several servers that each hold a part of the weights"),
            ("nccl", {}, "topology base, whose learners do not reduce in groups"),
            (
                "nccl",
                {"topology": {"name": "groups", "options": {"reduction": "ordered"}}},
                "[topology] options.reduction = 'ordered', as NCCL adds in its own order",
            ),
        )
    ),
    ({"dict[": 1}, "unknown table or key 'dict['; valid: name, " + TABLES),
    ({"training": {"a\x1b[2J": 1}}, "[training] unknown key 'a\\x1b[2J'; valid: " + TRAINING),
    ({"training": {"evaluate": "no"}}, "[training] evaluate must be true, 'always', 'workers' or false, not 'no'"),
    ({"training": {"evaluate": 1}}, "[training] evaluate must be true, 'always', 'workers' or false, not 1"),
    ({"optimizer": {"learning_rate": "0.1"}}, "[optimizer] learning_rate must be a number, not '0.1'"),
    ({"optimizer": {"learning_rate": [1]}}, "[optimizer] learning_rate must be a number, not [1]"),
    ({"optimizer": {"learning_rate": 0}}, "[optimizer] learning_rate must be > 0, not 0"),
    ({"optimizer": {"learning_rate": float("nan")}}, "[optimizer] learning_rate must be a finite number, not nan"),
    ({"optimizer": {"momentum": 1.0}}, "[optimizer] momentum must be < 1, not 1.0"),
    ({"optimizer": {"momentum_form": "keras"}}, "[optimizer] momentum_form must be 'torch' or 'caffe', not 'keras'"),
    (
        {"optimizer": {"momentum_form": "caffe", "name": "adam"}},
        "[optimizer] momentum_form = 'caffe' is not supported with name = 'adam'; use 'torch'",
    ),
    (
        {"optimizer": {"momentum_form": "caffe", "name": "rmsprop", "momentum": 0.9}},
        "[optimizer] momentum_form = 'caffe' is not supported with name = 'rmsprop'; use 'torch'",
    ),
    ({"optimizer": {"milestones": 3}}, "[optimizer] milestones must be a list, not 3"),
    ({"optimizer": {"milestones": [3, 3]}}, "[optimizer] milestones must be ascending epochs, each >= 1, not [3, 3]"),
    ({"optimizer": {"milestones": [0, 3]}}, "[optimizer] milestones must be ascending epochs, each >= 1, not [0, 3]"),
    ({"optimizer": {"milestones": [1, "b"]}}, "[optimizer] milestones.1 must be a whole number, not 'b'"),
    ({"optimizer": {"milestones": [1], "schedule": "cosine"}}, STEPS),
    (
        {"optimizer": {"schedule": "linear"}},
        "[optimizer] schedule 'linear' is unknown; valid: step, cosine, plateau, package.module:callable",
    ),
    (
        {"optimizer": {"schedule_options": {"eta_min": 0.1}}},
        "[optimizer] schedule_options is not supported with schedule = 'step'; use milestones and decay_factor",
    ),
    ({"optimizer": {"warm_up": -1}}, "[optimizer] warm_up must be >= 0, not -1"),
    ({"optimizer": {"clip_norm": 0}}, "[optimizer] clip_norm must be > 0, not 0"),
    *(
        ({"optimizer": {"groups": groups}}, f"[optimizer{text}")
        for groups, text in [
            ({"parameters": "*"}, "] groups must be a list, not {'parameters': '*'}"),
            ([{}], f"] groups.0.parameters {PATTERNS}"),
            ([{"parameters": []}], f"] groups.0.parameters {PATTERNS}"),
            ([{"parameters": ["*", 3]}], "] groups.0.parameters.1 must be a text, not 3"),
            ([{"parameters": "*", "rate_factor": -1}], "] groups.0.rate_factor must be >= 0, not -1"),
            (
                [{"parameters": "*"}, {"parameters": "*", "rate": 1}],
                ".groups.1] unknown key 'rate'; valid: parameters, rate_factor, weight_decay",
            ),
        ]
    ),
    (
        {"fault_tolerance": {"non_finite_loss": "go"}},
        "[fault_tolerance] non_finite_loss must be 'stop' or 'warn', not 'go'",
    ),
    (
        {"protocol": {"modulation": "sqr"}},
        "[protocol] modulation 'sqr' is unknown; valid: auto, none, sqrt, n, mean_staleness, gradient_staleness, "
        "package.module:callable; did you mean sqrt?",
    ),
    (
        {"cluster": {**FOUR, "one_rank": True, "learners_per_rank": 2}},
        "[cluster] one_rank = true is not supported with learners_per_rank = 2; use learners_per_rank = 1",
    ),
    (
        {"cluster": {**FOUR, "one_rank": True}, "topology": {"name": "groups", "options": {"reduction": "mpi"}}},
        "[cluster] one_rank = true is not supported with [topology] options.reduction = 'mpi'; use reduction = "
        "'ordered'",
    ),
    (
        {"cluster": {**FOUR, "one_rank": True}, "topology": {"name": "adv*"}, "protocol": {"name": "async"}},
        "[cluster] one_rank = true is not supported with topology adv*, whose learners have threads; use topology adv "
        "or base",
    ),
    (
        {
            "cluster": {**FOUR, "one_rank": True},
            "protocol": {"name": "hardsync"},
            "fault_tolerance": {"straggler_timeout_s": 5.0},
        },
        "[cluster] one_rank = true is not supported with [fault_tolerance] straggler_timeout_s; remove "
        "straggler_timeout_s",
    ),
    ({"protocol": {"n": 5}, "cluster": FOUR}, "[protocol] n = 5 is not supported with 4 learners; use 1 to 4"),
    ({"protocol": {"n": 0}}, "[protocol] n must be >= 1, not 0"),
    ({"protocol": {"name": "hardsync", "n": 2}, "cluster": FOUR}, f"[protocol] hardsync takes no n{AWAY}"),
    (
        {"protocol": {"name": "sync"}, "cluster": FOUR},
        "[protocol] name: 'sync' is unknown; valid: async, average, diloco, easgd, hardsync, hogbatch, sma, softsync, "
        "package.module:callable; did you mean async?",
    ),
    (
        {"protocol": {"name": "no_such_module:Rule"}, "cluster": FOUR},
        "[protocol] name: no_such_module:Rule: no module 'no_such_module' on the Python path",
    ),
    (
        {"protocol": {"name": "math:pi"}, "cluster": FOUR},
        "[protocol] name: 3.141592653589793 makes no protocol; use a class of protocols.Protocol",
    ),
    (
        {"protocol": {"modulation": "gradient_staleness"}, "optimizer": {"name": "adagrad"}, "cluster": FOUR},
        "[protocol] modulation = 'gradient_staleness' has no effect with [optimizer] name = 'adagrad'; use sgd, or "
        "modulation = 'mean_staleness'",
    ),
    (
        {"topology": {"name": "tree"}},
        "[topology] name: 'tree' is unknown; valid: auto, adv, adv*, base, groups, hierarchical, replicas, sharded, "
        "package.module:callable",
    ),
    ({"topology": {"name": "json:dumps"}}, "[topology] name: dumps has no function plan; define plan(nodes)"),
    (
        {"topology": {"options": {"z": 1}}},
        "[topology] options: base.plan: got an unexpected keyword argument 'z'; valid: none",
    ),
    ({"topology": {"name": "adv*"}, "protocol": {"name": "hardsync"}, "cluster": FOUR}, OVERLAPPED.format("hardsync")),
    ({"topology": {"name": "adv*"}, "protocol": {"name": Quiet}, "cluster": FOUR}, OVERLAPPED.format("quiet")),
    (
        {"topology": TREE, "protocol": {"name": Patient}, "cluster": FOUR},
        "[topology] name = 'adv' is not supported with protocol patient, which waits for pushes of all learners; use "
        "topology base, or grants_on_push = False",
    ),
    ({"topology": TREE, "protocol": WEIGHED, "cluster": FOUR}, AVERAGED),
    (
        {"topology": {"name": "groups", "options": {"groups": 5}}, "cluster": FOUR},
        "[topology] options.groups = 5 is not supported with 4 learners; use 1 to 4",
    ),
    (
        {"topology": {"name": "groups", "options": {"groups": 2}}, "protocol": {"n": 4}, "cluster": FOUR},
        "[protocol] n = 4 is not supported with 2 learners; use 1 to 2",
    ),
    (
        {"optimizer": {"momentum_correction": "heavy"}},
        "[optimizer] momentum_correction must be 'none' or 'implicit', not 'heavy'",
    ),
    ({"optimizer": {"momentum_correction": "implicit"}}, NO_MOMENTUM),
    ({"optimizer": {"momentum_correction": "implicit", "name": "rmsprop", "momentum": 0.9}}, NO_MOMENTUM),
    (
        {"training": {"precision": "float64"}},
        "[training] precision must be 'float32', 'tf32', 'bfloat16' or 'float16', not 'float64'",
    ),
    (
        {"training": {"precision": "float16"}, "simulation": {"batching": "vmap"}},
        "[simulation] batching = 'vmap' is not supported with [training] precision = 'float16'; use batching = 'none' "
        "or 'big-batch', or precision = 'bfloat16'",
    ),
    ({"cluster": {"device": "gpu"}}, "[cluster] device must be 'cpu', 'cuda' or 'auto', not 'gpu'"),
    (
        {"simulation": {"slowdown": {4: 2.0}}, "cluster": FOUR},
        "[simulation] slowdown names learner 4, which does not exist; use 0 to 3",
    ),
    (
        {"simulation": {"slowdown": {-1: 2.0}}, "cluster": FOUR},
        "[simulation] slowdown names learner -1, which does not exist; use 0 to 3",
    ),
    ({"simulation": {"slowdown": {"1": 0}}}, "[simulation] slowdown of learner 1 must be > 0, not 0.0"),
    (
        {"simulation": {"slowdown": {"first": 2}}},
        "[simulation] slowdown.first as a key must be a whole number, not 'first'",
    ),
    ({"simulation": {"slowdown": {"0": "x"}}}, "[simulation] slowdown.0 must be a number, not 'x'"),
    *(
        ({"simulation": {"faults": faults}, "cluster": FOUR}, f"[simulation{text}")
        for faults, text in [
            ({"learner": 1}, "] faults must be a list, not {'learner': 1}"),
            ([3], "] faults.0 must be a table, not 3"),
            ([{"learner": 4, "dies_at_s": 1.0}], "] faults names learner 4, which does not exist; use 0 to 3"),
            ([{"learner": True, "dies_at_s": 1.0}], "] faults.0.learner must be a whole number, not True"),
            ([{"learner": 1, "dies_at_s": -1.0}], "] faults.0.dies_at_s must be >= 0, not -1.0"),
            ([{"dies_at_s": 1.0}], "] faults.0 has dies_at_s, but no learner; set learner"),
            (
                [{"tree_server": 1, "learner": 1, "dies_at_s": 1.0}],
                "] faults.0 has tree_server and dies_at_s and learner; use tree_server with only dies_at_s",
            ),
            ([{"learner": 1}], f"] faults.0 has no time; use one of {WHEN}"),
            (
                [{"learner": 1, "dies_at_s": 1.0, "slows_at_s": 2.0}],
                f"] faults.0 has dies_at_s and slows_at_s; use one of {WHEN}",
            ),
            ([{"mean_time_to_failure_s": 9.0}, {"mean_time_to_slowdown_s": 9.0}], NO_FACTOR),
            ([{"learner": 1, "dies_at_s": 1.0, "factor": 2.0}], "] faults.0 has dies_at_s, and factor; remove factor"),
            (
                [{"lerner": 1, "dies_at_s": 1.0}],
                ".faults.0] unknown key 'lerner'; valid: learner, tree_server, dies_at_s, mean_time_to_failure_s, "
                "slows_at_s, mean_time_to_slowdown_s, factor, for_s; did you mean learner?",
            ),
        ]
    ),
    (
        {"training": {"epochs": 0, "seed": -1}, "model": 3},
        "model must be a table, not 3; [training] epochs must be >= 1, not 0; [training] seed must be >= 0, not -1",
    ),
]


@pytest.mark.parametrize(("tables", "text"), MISTAKES)
def test_a_mistake_is_one_line(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job(**tables)
    assert str(error.value) == text


def test_long_values_are_shortened() -> None:
    with pytest.raises(ConfigError) as error:
        Job(model={"options": "x\n" * 999})
    assert len(str(error.value)) < 120
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("epochs=3", "--set epochs=3: must read table.key=value; did you mean training.epochs?"),
        (
            "name=adv",
            "--set name=adv: must read table.key=value; did you mean model.name or data.name or augment.name or "
            "task.name or optimizer.name or protocol.name or topology.name?",
        ),
        ("training.epochs", "--set training.epochs: must read table.key=value"),
        ("training.=3", "--set training.=3: must read table.key=value"),
        (".epochs=3", "--set .epochs=3: must read table.key=value"),
        ("model..x=3", "--set model..x=3: must read table.key=value"),
        ("training.seed.x=3", "--set training.seed.x=3: training.seed is not a table"),
        ("name.x=3", "--set name.x=3: name is not a table"),
        ("training.epochs=x", "--set training.epochs=x: [training] epochs must be a whole number, not 'x'"),
        ("speed.x=1", "--set speed.x=1: unknown table or key 'speed'; valid: name, " + TABLES),
    ],
)
def test_a_mistake_in_an_override(tmp_path: Path, override: str, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[training]\nseed = 1\n')
    with pytest.raises(ConfigError) as error:
        Job.load(file, [override])
    assert str(error.value) == text.format(file=file)


def test_a_job_file_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nepochs = 3\n", encoding="utf-8-sig")
    assert Job.load(file).training.epochs == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[training\nepochs = 3", r"{file}: line 1: Expected .*: \[training"),
        (b"[training]\nepochs = 3\nepochs = 4\n", r"{file}: line 3: Cannot overwrite a value: epochs = 4"),
        (b"name = '\xff'", r"{file}: .*can't decode byte 0xff.*"),
        (b"[training]\nepochs = " + b"9" * 5000, r"{file}: Exceeds the limit .*"),
        (b"a = " + b"[" * 5000, r"{file}: too many nested tables and lists; use 50 levels at most"),
        (
            b"[model.options]\n" + b"a." * 5000 + b"a = 1",
            r"{file}: too many nested tables and lists; use 50 levels at most",
        ),
        (b"[training]\nepochs = '3'", r"{file}: \[training\] epochs must be a whole number, not '3'"),
    ],
)
def test_a_damaged_job_file_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Job.load(file)
    assert re.fullmatch(text.format(file=re.escape(str(file))), str(error.value))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere/mine.toml", "nowhere/mine.toml: no such job file"),
        ("digit", "digit: no such job; use a TOML file or one of: crossbow/figure11, "),
        ("zzzzz", "zzzzz: no such job; use a TOML file or one of: crossbow/figure11, "),
    ],
)
def test_a_job_that_does_not_exist(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job.load(name)
    assert str(error.value).startswith(text)


def test_a_directory_is_no_job_and_its_job_files_are_named(tmp_path: Path) -> None:
    place = tmp_path / "runs.toml"
    place.mkdir()
    with pytest.raises(ConfigError) as error:
        Job.load(place)
    assert str(error.value) == f"{place}: is a directory; use a TOML file; this directory has none"
    for name in ("b.toml", "a.toml", "paper.toml", "c.txt"):
        (place / name).touch()
    with pytest.raises(ConfigError) as error:
        Job.load(place)
    assert str(error.value) == f"{place}: is a directory; use {place / 'a.toml'}, {place / 'b.toml'}"


def test_the_override_is_named_that_brings_a_mistake_in(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[cluster]\nlearners = 4\n[protocol]\nn = 2\n")
    for overrides, where in (
        (["training.seed=1", "protocol.name=hardsync", "training.epochs=2"], "--set protocol.name=hardsync"),
        (["protocol.n=9", "training.seed=1"], "--set protocol.n=9"),
        (["protocol.n=9", "cluster.learners=9", "training.seed=-1"], "--set training.seed=-1"),
    ):
        with pytest.raises(ConfigError) as error:
            Job.load(file, overrides)
        assert str(error.value).startswith(f"{where}: [")
    file.write_text("[protocol]\nm = 2\n")
    with pytest.raises(ConfigError, match=r"mine\.toml: .*unknown key 'm'"):
        Job.load(file, ["training.seed=1"])


def test_each_of_several_mistakes_names_its_own_override(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nseed = -1\n")
    with pytest.raises(ConfigError) as error:
        Job.load(file, ["cluster.learners=abc", "training.epochs=2", "protocl.name=1", "training.patience=0"])
    seed, learners, unknown, patience = re.split(r"; (?=--set)", str(error.value))
    assert seed == f"{file}: [training] seed must be >= 0, not -1"
    assert learners == "--set cluster.learners=abc: [cluster] learners must be a whole number, not 'abc'"
    assert unknown.startswith("--set protocl.name=1: unknown table or key 'protocl'; valid: name, model, ")
    assert patience == "--set training.patience=0: [training] patience must be >= 1, not 0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", "must be above 0 and below 1, not 0; remove the key to hold out nothing"),
        ("1.5", "must be above 0 and below 1, not 1.5; remove the key to hold out nothing"),
        ("true", "must be a number, not True"),
    ],
)
@pytest.mark.parametrize("key", ["test_split", "validation_split"])
def test_a_split_that_is_no_fraction_says_what_to_do_instead(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Job.load("digits", [f"data.{key}={value}"])
    assert str(error.value) == f"--set data.{key}={value}: [data] {key} {text}"


def test_an_override_without_a_value_takes_a_key_away(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[cluster]\nlearners = 4\n[protocol]\nn = 2\n[training]\nseed = 7\n")
    job = Job.load(file, ["protocol.name=hardsync", "protocol.n=", "training.seed= ", "data.path="])
    assert (job.protocol.name, job.protocol.n, job.training.seed, job.data.path) == ("hardsync", None, 0, None)


def test_names_of_optimisers_are_known_in_any_case() -> None:
    assert Job(optimizer={"name": "AdamW"}) == Job(optimizer={"name": "adamw"})
    with pytest.raises(ConfigError, match=r"'adan' is unknown; valid: .*; did you mean adam\?"):
        Job(optimizer={"name": "Adan"})


def test_what_a_file_and_overrides_make(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nseed = 5\nepochs = 2\n[simulation.slowdown]\n0 = 2.5\n")
    overrides = [
        "training.epochs=7",
        "model.name=mlp",  # no TOML: a plain text
        'data.name="idx"',
        "data.path=/some where",
        "optimizer.milestones=[1, 2]",
        "model.options.hidden.size=3",
        "training.evaluate = false",
        "simulation.slowdown.1=3",
    ]
    job = Job.load(file, overrides)
    assert (job.name, job.training.seed, job.training.epochs, job.training.evaluate) == ("mine", 5, 7, False)
    assert (job.model.name, job.model.options) == ("mlp", {"hidden": {"size": 3}})
    assert (job.data.name, job.data.path) == ("idx", Path("/some where"))
    assert job.optimizer.milestones == (1, 2)
    assert job.simulation.slowdown == {0: 2.5, 1: 3.0}


def test_groups_of_parameters_from_a_file_and_from_an_override(tmp_path: Path) -> None:
    tables = '{ parameters = "*.bias", weight_decay = 0 }, { parameters = ["a.*", "b.*"], rate_factor = 0.1 }'
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[optimizer.groups]]\nparameters = "*.bias"\nweight_decay = 0\n'
        '[[optimizer.groups]]\nparameters = ["a.*", "b.*"]\nrate_factor = 0.1\n'
    )
    job = Job.load(file)
    groups = [(g.parameters, g.rate_factor, g.weight_decay) for g in job.optimizer.groups]
    assert groups == [(("*.bias",), 1.0, 0.0), (("a.*", "b.*"), 0.1, None)]
    assert Job.load("digits", [f"optimizer.groups=[{tables}]"]).optimizer.groups == job.optimizer.groups
    assert Job(**json.loads(job.to_json())).optimizer.groups == job.optimizer.groups


@pytest.mark.parametrize(("table", "key"), [("training", "epochs"), ("cluster", "learners"), ("data", "path")])
def test_a_job_is_immutable(table: str, key: str) -> None:
    job = Job()
    with pytest.raises(ValueError, match="frozen"):
        setattr(getattr(job, table), key, 3)
    with pytest.raises(ValueError, match="frozen"):
        setattr(job, table, None)


def test_jobs_share_no_options() -> None:
    Job().model.options["leak"] = 1
    assert Job().model.options == {}


def test_with_replaces_keys_and_checks_again() -> None:
    job = Job(cluster=FOUR, training={"epochs": 3, "seed": 2})
    other = job.with_(training={"epochs": 9}, protocol={"name": "async"})
    assert (other.training.epochs, other.training.seed, other.protocol.name, other.learners) == (9, 2, "async", 4)
    assert (job.training.epochs, job.protocol.name) == (3, "softsync")
    with pytest.raises(ConfigError, match=r"^\[protocol\] n = 5 is not supported with 4 learners; use 1 to 4$"):
        job.with_(protocol={"n": 5})
    for name in ("trainning", "name"):
        with pytest.raises(ConfigError, match=f"^unknown table '{name}'; valid: {TABLES}$"):
            job.with_(**{name: {}})


@pytest.mark.parametrize(
    ("cluster", "arguments", "expected"),
    [
        ({}, {}, (4, 1)),
        ({}, {"cores": 16}, (4, 4)),
        ({}, {"cores": 7}, (4, 1)),
        ({}, {"learners": 2, "cores": 16}, (2, 8)),
        ({"learners": 8}, {"cores": 16}, (8, 2)),
        ({"threads_per_rank": 3}, {"cores": 16}, (4, 3)),
        ({"threads_per_rank": 3}, {"threads_per_rank": 5}, (4, 5)),
        ({"learners": 30}, {"cores": 2}, (30, 1)),
    ],
)
def test_resolved(cluster: dict[str, int], arguments: dict[str, int], expected: tuple[int, int]) -> None:
    job = Job(cluster=cluster).resolved(**arguments)
    assert (job.learners, job.cluster.threads_per_rank) == expected
    assert job.resolved() == job


def test_what_only_the_launch_decides_is_checked_then() -> None:
    job = Job(protocol={"n": 5})
    assert job.resolved(learners=5).make_protocol().n == 5
    with pytest.raises(ConfigError, match="n = 5 is not supported with 4 learners; use 1 to 4"):
        job.resolved()
    with pytest.raises(
        ConfigError, match=r"^\[cluster\] learners is not known yet; set it, or call job.resolved\(learners=N\) first$"
    ):
        _ = job.learners


@pytest.mark.parametrize(
    ("name", "invariant"), [("sgd", False), ("adagrad", True), ("adam", True), ("adamw", True), ("rmsprop", True)]
)
def test_scale_invariant_optimisers(name: str, invariant: bool) -> None:
    assert OptimizerTable(name=name).scale_invariant is invariant


class Factory:
    def __call__(self) -> None: ...

    @staticmethod
    def plan(nodes: Sequence[int]) -> Plan:
        return base.plan(nodes)


def test_json_names_callables() -> None:
    job = Job(
        protocol={"name": Mine}, model={"name": Factory()}, topology={"name": Factory()}, data={"path": "a/b"}
    ).resolved()
    text = job.to_json()
    tables = json.loads(text)
    assert "\n" not in text
    assert tables["protocol"]["name"] == f"{__name__}:Mine"
    assert tables["model"]["name"] == tables["topology"]["name"] == f"{__name__}:Factory"
    assert (tables["data"]["path"], tables["cluster"]["learners"]) == ("a/b", 4)


def test_json_of_a_plain_job_makes_the_same_job() -> None:
    faults = [{"learner": 1, "slows_at_s": 2.0, "factor": 3.0, "for_s": 4.0}]
    job = Job(protocol={"n": 2}, simulation={"slowdown": {1: 2.0}, "faults": faults}, data={"path": "x"}).resolved()
    assert Job(**json.loads(job.to_json())) == job


# Protocol and topology together.


ANY = ("hardsync", "softsync", "async", Mine, Quiet)
NEVER_WAITS = ("softsync", "async", Mine)
PAIRS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"name": "base"}, (*ANY, Patient)),
    ({"name": "groups"}, (*ANY, Patient)),
    ({"name": "groups", "options": {"groups": 2}}, (*ANY, Patient)),
    ({"name": "adv"}, ANY),
    (TREE, ANY),
    ({"name": "adv*"}, NEVER_WAITS),
    ({"name": "adv*", "options": {"fan_out": 2}}, NEVER_WAITS),
]


@pytest.mark.parametrize(("topology", "protocol"), [(topology, rule) for topology, rules in PAIRS for rule in rules])
def test_pairs_that_work(topology: dict[str, Any], protocol: Any) -> None:
    job = Job(topology=topology, protocol={"name": protocol}, cluster=FOUR)
    for nodes in ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]):
        assert len(job.plan(nodes).learners) == 4


def test_a_pair_may_work_on_one_node_alone() -> None:
    """There the root is the only server of adv, so that it sees every gradient."""
    for protocol in (WEIGHED, {"name": Patient}):
        job = Job(topology={"name": "adv"}, protocol=protocol, cluster=FOUR)
        job.check(job.plan())
        for on_two_nodes in (lambda job=job: job.plan([0, 0, 1, 1]), lambda job=job: job.resolved().plan([0, 1, 1, 1])):
            with pytest.raises(ConfigError, match=r"is not supported with .*; use .*topology base") as error:
                on_two_nodes()
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("learners", "protocol", "groups", "asynchrony"),
    [
        (1, {"name": "async"}, None, 1),
        (2, {"name": "async"}, None, 2),
        (4, {"name": "async"}, None, 4),
        (64, {"name": "async"}, None, 64),
        (4, {"name": "hardsync"}, None, 1),
        (4, {"n": 1}, None, 1.75),
        (4, {"n": 2}, None, 2.5),
        (4, {"n": 3}, None, 4),
        (4, {"n": 4}, None, 4),
        (4, {"name": "async"}, 1, 1),
        (4, {"name": "async"}, 2, 2),
        (5, {"name": "async"}, 4, 4),
        (8, {"n": 2}, 4, 2.5),
    ],
)
@pytest.mark.parametrize("wanted", [0.3, 0.5, 0.9])
def test_asynchrony_gives_its_share_of_the_momentum(
    learners: int, protocol: dict[str, Any], groups: int | None, asynchrony: float, wanted: float
) -> None:
    """Omnivore, theorem 1: g workers that update independently act like momentum 1 - 1/g; g is ⟨σ⟩ + 1."""
    topology = {"name": "base"} if groups is None else {"name": "groups", "options": {"groups": groups}}
    tables: dict[str, Any] = {"topology": topology, "protocol": protocol, "cluster": {"learners": learners}}
    corrected = Job(optimizer={"momentum": wanted, "momentum_correction": "implicit"}, **tables)
    assert corrected.explicit_momentum() == pytest.approx(max(0.0, wanted - (1 - 1 / asynchrony)))
    assert Job(optimizer={"momentum": wanted}, **tables).explicit_momentum() == wanted


def test_jobs_of_older_files_are_read_under_the_names_of_now() -> None:
    older = {
        "faults": {"stall_limit": 9.0, "restarts": 1},
        "cluster": {"wire": "float16", "learners": 2},
        "optimizer": {"factor": 0.5},
        "hooks": [{"at": "end", "call": "rudra.hooks:csv"}],
        "data": {"name": "rudra.bench.prediction:noise"},
        "simulation": {"faults": []},
    }
    assert Job(**translated(older)) == Job(
        fault_tolerance={"stall_limit_s": 9.0, "restarts": 1},
        cluster={"gradient_format": "float16", "learners": 2},
        optimizer={"decay_factor": 0.5},
        hooks=[{"at": "end", "call": "csv"}],
        data={"name": "rudra.data.noise:noise"},
    )


HOGBATCH = ["protocol.name=hogbatch"]
OLD_KEYS: list[tuple[str, Any, str]] = [
    ("faults.restarts", 1, "[faults] is now [fault_tolerance]"),
    ("cluster.wire", "float16", "[cluster] wire is now gradient_format"),
    ("optimizer.factor", 0.5, "[optimizer] factor is now decay_factor"),
    ("fault_tolerance.stall_limit", 9.0, "[fault_tolerance] stall_limit is now stall_limit_s"),
    ("protocol.rule", "adaptive", "[protocol] rule is now [hogbatch] rule"),
    ("protocol.lr_scaling", "sqrt", "[protocol] lr_scaling is now [hogbatch] lr_scaling"),
    ("protocol.options.alpha", 3.0, "[protocol] options.alpha is now [hogbatch] alpha"),
    ("protocol.options.beta", 0.5, "[protocol] options.beta is now [hogbatch] beta"),
    ("protocol.options.shuffle", "epoch", "[protocol] options.shuffle is now [hogbatch] shuffle"),
    ("protocol.options.counts", "epoch", "[protocol] options.counts is now [hogbatch] counts"),
    ("weights.at", "window", "[weights] at is now [hogbatch] weights ('window' is 'shared')"),
    ("weights.update", "locked", "[weights] update is now [hogbatch] locking ('racing' is false, 'locked' is true)"),
    ("weights.push", "overwrite", "[weights] push is now [hogbatch] gpu_write ('gradient' is 'add')"),
    ("averaging.optimizer", "adam", "[averaging] optimizer is now [averaging.outer] name"),
    ("averaging.learning_rate", 0.7, "[averaging] learning_rate is now [averaging.outer] learning_rate"),
    ("averaging.momentum", 0.9, "[averaging] momentum is now [averaging.outer] momentum"),
    ("averaging.options", {}, "[averaging] options is now [averaging.outer] options"),
    ("averaging.keeps_momentum", True, "[averaging] keeps_momentum is now keep_momentum"),
    ("simulation.tear", 4, "[simulation] tear is now race_slices"),
    ("simulation.beside", [], "[simulation] beside is now background_jobs"),
    ("topology.options.server", True, "[topology] options.server is now parameter_server"),
]


@pytest.mark.parametrize(("key", "value", "said"), OLD_KEYS)
def test_old_key_is_answered_with_the_new_name(
    key: str, value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *tables, last = key.split(".")
    given: dict[str, Any] = {"protocol": {"name": "hogbatch"}}
    place = given
    for table in tables:
        place = place.setdefault(table, {})
    place[last] = value
    with pytest.raises(ConfigError, match=re.escape(said)):
        Job(**given)
    with pytest.raises(ConfigError, match=re.escape(said)):
        Job().with_(**given)
    assert main(["validate", "digits", "--syntax", "--set", *HOGBATCH, "--set", f"{key}={toml(value)}"]) == 2
    assert capsys.readouterr().err == f"rudra: --set {key}={toml(value)}: {said}\n"


@pytest.mark.parametrize(
    ("name", "options", "new"),
    [
        ("groups", {"server": True}, {"parameter_server": True}),
        ("sharded", {"apart": True}, {"servers_on_own_nodes": True}),
        ("mine:plan", {"server": True, "apart": True}, {"server": True, "apart": True}),
    ],
)
def test_old_option_has_a_new_name_only_for_the_topology_that_had_it(
    name: str, options: dict[str, Any], new: dict[str, Any]
) -> None:
    job = {"topology": {"name": name, "options": options}}
    assert translated(job) == {"topology": {"name": name, "options": new}}
    assert bool(answers(job)) == (options != new)


def test_old_list_of_workers_is_answered_with_the_new_name() -> None:
    old, ranks = "[[workers]] is now [[hogbatch.workers]]", "ranks is now learners"
    for workers, said in (
        ({"workers": [{"kind": "small"}]}, old),
        ({"workers": [{"ranks": [0]}]}, f"[[workers]] {ranks}; {old}"),
        ({"hogbatch": {"workers": [{"ranks": [0]}]}}, f"[[hogbatch.workers]] {ranks}"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
            Job(protocol={"name": "hogbatch"}, **workers)
    with pytest.raises(ConfigError, match=re.escape("did you mean hogbatch.workers?")):
        Job.load("digits", [*HOGBATCH, "workers=[]"])


@pytest.mark.parametrize(
    ("damaged", "found"),
    [
        ({"weights": 3}, {"hogbatch": 3}),
        ({"weights": {"at": "window"}, "hogbatch": 3}, {"hogbatch": {"weights": "shared"}}),
        ({"workers": [3]}, {"hogbatch": {"workers": [3]}}),
        ({"averaging": {"momentum": 1, "outer": [1]}}, {"averaging": {"outer": {"momentum": 1}}}),
        ({"protocol": {"name": "hogbatch", "options": 5}}, {"protocol": {"name": "hogbatch", "options": 5}}),
    ],
)
def test_damaged_job_of_an_older_file_is_translated_as_far_as_it_goes(
    damaged: dict[str, Any], found: dict[str, Any]
) -> None:
    assert translated(damaged) == found


@pytest.mark.parametrize(
    ("tables", "decide"),
    [
        ({}, False),
        ({"results": {"keep_best": True}}, False),
        ({"training": {"target": "accuracy >= 0.9"}}, True),
        ({"training": {"patience": 3}}, True),
        ({"optimizer": {"schedule": "plateau", "decay_factor": 0.5}}, True),
    ],
)
def test_which_jobs_are_decided_by_evaluations(tables: dict[str, Any], decide: bool) -> None:
    assert Job(**tables).evaluations_decide is decide
    assert not Job(**tables).without_tests().evaluations_decide
