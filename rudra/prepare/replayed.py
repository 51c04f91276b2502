"""Job for a replay of a recorded run: the same training without hooks, checkpoints and evaluations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rudra.errors import ConfigError, ReplayError
from rudra.job.job import Job
from rudra.results.identity import DECISIVE, DECISIVE_LISTS, decisive, grows, tables_of
from rudra.results.reader import Results
from rudra.trust import admit

REPLAY_MAY_CHANGE = ("data.path", "training.warm_start")
"""Keys that a replay may change: locations of files."""

INDIFFERENT = (
    "training.evaluate",
    "training.evaluate_training_set",
    "training.evaluation_batch_size",
    "task.metrics",
    "training.target",
    "training.target_window",
    "training.stop_at_target",
    "training.patience",
    "cluster.learners_per_rank",
    "cluster.learners_per_device",
    "cluster.streams",
    "cluster.node_memory",
    "cluster.buckets",
    "cluster.graphs",
)
"""Keys of the `DECISIVE` tables that have no effect on the weights."""


def replayed_job(results: Results, given: Job | None, overrides: Sequence[str] = (), *, trust: bool = False) -> Job:
    """Returns the job that a replay repeats.

    Args:
        results: Results of the run.
        given: Job that was run, if the caller has it. None: the file holds it.
        overrides: Changes of keys in `REPLAY_MAY_CHANGE`, each a text `table.key=value`.
        trust: Whether to import the code that the file names, even if another user wrote the file.

    Raises:
        ReplayError: The file holds no complete job.
        ConfigError: The job cannot be made again, or is not the job of the run.
        TrustError: The file names code, was not written by this user's own run, and `trust` is not set.
    """
    decided = {} if given is None else _decided(results, given)
    job = _restored(results, overrides, trust) if given is None else given
    training = {**decided.get("training", {}), "evaluate": False, "evaluate_training_set": False, "patience": None}
    repeated = job.without_decisions().with_(
        hooks=(),
        cluster=decided.get("cluster", {}),
        placement=decided.get("placement", {}),
        training=training,
        optimizer={} if job.optimizer.plateau is None else _lowered(results),
        fault_tolerance={"non_finite_loss": "warn"},
        results={
            "minibatches": False,
            "report_s": 0.0,  # rows come at once
            "checkpoint_every": "never",
            "keep_every": None,
            "keep_best": False,
        },
    )
    return repeated.without_growth()


def _restored(results: Results, overrides: Sequence[str], trust: bool) -> Job:
    """Returns the job of a file without its hooks and its function of decisions."""
    objects = results.attributes["python_objects"].split(", ")
    if given := ", ".join(name for name in objects if not name.startswith(("hooks.", "decisions."))):
        raise ReplayError(
            f"{results.path}: {given} was given as a Python object, which a file cannot hold; "
            "use rudra.replay(file, job=job) with that job"
        )
    tables = {"name": results.job["name"], **{key: results.job.get(key, []) for key in DECISIVE_LISTS}}
    tables |= {table: results.job.get(table, {}) for table in DECISIVE}
    admit(results.path, json.loads(results.attributes["job"]), tables, results.attributes, trust=trust)
    for override in overrides:
        target, equals, value = (part.strip() for part in override.partition("="))
        if target not in REPLAY_MAY_CHANGE or not equals:
            raise ConfigError(
                f"--set {override}: a replay cannot change this key; use {' or '.join(REPLAY_MAY_CHANGE)}"
            )
        table, _, key = target.partition(".")
        tables[table][key] = value
    try:
        return Job(**tables)
    except ConfigError as error:
        raise ConfigError(f"{results.path}: {error}") from None


def _decided(results: Results, job: Job) -> dict[str, Any]:
    """Returns the keys that the run has decided for the job of the caller, if it is the job of the record."""
    then, now = decisive(results.job), tables_of(job)
    keys = ["learners", "threads_per_rank", "device", "cpu_learners"]
    keys += ["shares"] if job.cluster.shares == "auto" else []
    keys += ["bank"] if job.cluster.bank == "auto" else []
    keys += ["most_learners_per_device"] if job.cluster.grows else []
    decided = {"cluster": {key: then["cluster"][key] for key in keys}}
    if job.placement.by_rule:
        decided["placement"] = {"cut": then["placement"]["cut"]}
    if job.training.gradients == "auto":
        decided["training"] = {"gradients": then["training"]["gradients"]}
    unknown = results.attributes["python_objects"].split(", ")
    for table in DECISIVE:
        for key, value in {**now[table], **decided.get(table, {})}.items():
            name = f"{table}.{key}"
            before, indifferent = then[table][key], {*unknown, *REPLAY_MAY_CHANGE, *INDIFFERENT}
            if value != before and (name not in indifferent or grows(name, before, value)):
                raise ConfigError(f"{results.path}: ran with {name} = {before}, not {value}; use the job of the run")
    for key in DECISIVE_LISTS:
        if now[key] != (before := results.job.get(key, [])):
            raise ConfigError(f"{results.path}: ran with {key} = {before}, not {now[key]}; use the job of the run")
    return decided


def _lowered(results: Results) -> Mapping[str, Any]:
    """Returns the drops of a plateau schedule as milestones, each after the epoch that was under way.

    That epoch is the epoch of the update after the event. If there is no such update, the milestone has no effect.
    """
    events, updates = results.events, results.updates
    milestones: list[int] = []
    for timestamp in events["timestamp"][events["kind"] == b"plateau"].tolist():
        if timestamp < len(updates):
            milestones.append(max(int(updates["epoch"][timestamp]) - 1, *milestones, 0) + 1)
    return {"schedule": "step", "milestones": milestones, "schedule_options": {}}
