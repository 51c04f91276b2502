"""Replay of a recorded run: runs it again in one process, through the same roles, with bitwise identical results.

In a replay, the record decides the next event instead of virtual time. A gradient is computed
when its (learner, step) is next in the record. It is computed from the weights whose timestamp the record gives, and
takes the same route as in the run. Messages arrive at once. So the servers receive the same gradients, from the same
weights, in the same order, and form the same averages and updates by their own rules. The replay keeps weights as long
as the record needs them. Without a server, the job determines the results, and the replay simply trains again.
New rows are compared with the record one by one, and the first difference ends the replay.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from rudra.compute import models
from rudra.compute.device import placement
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import CPU
from rudra.compute.executor import Executor, torch_as_in
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.core.actions import TableName
from rudra.core.buffer_names import WEIGHTS
from rudra.core.digest import sha256
from rudra.core.layout import Entry, interleaved
from rudra.core.messages import Rows
from rudra.data.fingerprint import fingerprints, from_plain
from rudra.data.load import Data, DataInfo, load
from rudra.errors import ConfigError, ReplayError, printable
from rudra.files import check_output
from rudra.job.job import Job
from rudra.job.tables import ClusterTable
from rudra.job.transports import parsed
from rudra.log import log
from rudra.machine import cores
from rudra.prepare.phases import phases_of
from rudra.prepare.replayed import replayed_job
from rudra.results.export import save
from rudra.results.norms import add_norms
from rudra.results.reader import Results, open_results
from rudra.results.recorder import arithmetic
from rudra.results.warm_start import final_weights
from rudra.results.writer import NORMS_EVERY
from rudra.simulation.batching import bank_tensors
from rudra.simulation.record import Comparison, Difference, Left, RecordedRun, compare_weights
from rudra.simulation.replay_driver import ReplayDriver
from topologies import Plan


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    Attributes:
        updates: Number of repeated updates, all bitwise identical to the record.
        recorded: Number of updates in the result file.
        status: Status of the recorded run: `"finished"`, `"failed"`, `"interrupted"` or `"running"`.
        weights_sha256: SHA-256 of the weights after the last repeated update.
        difference: First difference from the record, with `update` (its timestamp) and `text`, or None.
        note: Reason why the replay stopped before the end of the record, or empty if it did not.
        norms: Number of norms of gradients and of updates that were added to the result file.
    """

    updates: int
    recorded: int
    status: str
    weights_sha256: str
    difference: Difference | None
    note: str = ""
    norms: int = 0

    @property
    def identical(self) -> bool:
        """Whether everything that was repeated is bitwise identical to the record."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            where = f"update {self.difference.update}" if self.difference.update else "before the first update"
            return f"differs: {where} (of {self.recorded}): {self.difference.text}"
        count = f"{self.updates} of {self.recorded}" if self.updates < self.recorded else f"{self.updates}"
        ended = "" if self.status == "finished" else f" (the run is {self.status})"
        return f"identical: {count} updates{ended}, weights sha256 {self.weights_sha256}{self.note}"


def replay(
    path: str | Path,
    *,
    job: Job | None = None,
    until: int | None = None,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    force: bool = False,
    trust: bool = False,
    norms: int | None = None,
) -> Replayed:
    """Repeats a recorded run in this process, and compares it with its record bit for bit.

    Before the comparison, it logs a warning for each difference between this machine and the machine of the run.

    Args:
        path: Result file of a run or a simulation.
        job: Job that was run. It is needed only if the job named Python objects, which a file cannot hold. If it is
            given, no code that the file names is imported.
        until: Update after which to stop and write the weights. 0: before the first update. None: repeat everything.
        output: Path for the weights of `until`, a state dict that `torch.load` reads. None: named after the result file
            and the update.
        overrides: Changes of `data.path` or `training.warm_start`, the only keys that a replay may change. Each is a
            text `table.key=value`.
        quiet: Whether to hide the progress bar.
        force: Whether to replace an existing `output`.
        trust: Whether to import code that the file names even if another user wrote the file.
        norms: Number N: add the norms of the gradients of every Nth update to the file, as the run would have recorded
            them with `results.gradient_norms = "every N"`. None: none. Nothing is added if the replay differs.

    Returns:
        Number of repeated updates, and the first difference. A difference does not raise an error.

    Raises:
        ReplayError: The record does not determine the weights, or has no such update.
        ConfigError: The job cannot be made again, or is not the job of the run.
        TrustError: The file names code, this user's run did not write the file, and `trust` is not set.
        DataError: The data is missing, or differs from the data of the run.
        ResultsError: The result file is missing or damaged.
    """
    path = Path(path)
    with open_results(path) as results:
        record = RecordedRun(results)
        if reason := results.attributes["not_replayable"]:
            raise ReplayError(f"{path}: cannot be replayed: {reason}")
        if until is not None and not 0 <= until <= record.updates_count:
            raise ReplayError(f"{path}: --until {until}: valid: 0 to {record.updates_count}, the updates recorded")
        job = replayed_job(results, job, overrides, trust=trust)
        if norms is not None:
            _check_addition(results, norms, until)
        if norms is not None or results.has_norms:
            every = results.attributes.get(NORMS_EVERY, 1) if norms is None else norms
            job = job.with_(results={"gradient_norms": f"every {every}"})
        plan = record.plan
        _check_kind(path, results.plan(), job)
        if until is None and output is not None:
            raise ConfigError("--output is for the weights of --until: also give --until")
        target = None
        if until is not None:
            target = path.with_name(f"{path.stem}-{until}.pt") if output is None else Path(output)
            check_output(target, force)
        kind = placement.replaying(job.cluster.device, window=plan.window)
        for line in surroundings(results, kind):
            log.warning(f"{path}: {line}")
    with torch_as_in(job.cluster):
        replayed, made = _repeat(job, plan, record, until, target, quiet, DEVICES[kind].device(0))
    if norms is None or not replayed.identical:
        return replayed
    add_norms(path, norms, made)
    return replace(replayed, norms=sum(map(len, chain.from_iterable(made.values()))))


def _check_addition(results: Results, every: int, until: int | None) -> None:
    """Raises an error if a replay cannot add norms to a file."""
    if every < 1:
        raise ConfigError(f"--norms {every}: is no number of updates; use 1 or more")
    if until is not None:
        raise ConfigError("--norms is for a replay of the whole run: remove --until")
    if results.has_norms:
        raise ReplayError(f"{results.path}: already has norms, which a replay compares; remove --norms")
    if results.live:
        raise ReplayError(
            f"{results.path}: is not closed, so no norms can be added; use the file of a run that has ended"
        )


def surroundings(results: Results, kind: str = "cpu") -> list[str]:
    """Returns one line for each difference between this machine and the run's machine that may change the last bits.

    Args:
        results: Results of the run.
        kind: Kind of device that computes here.
    """
    then, here = results.attributes, DEVICES[kind]
    lines = [
        f"{name.replace('_', ' ')} was {printable(str(then[name]))}, here it is {value}; "
        "the weights may differ in their last bits"
        for name, value in arithmetic().items()
        if then[name] != value
    ]
    ran, now = then.get("device_model") or then["device"], here.model(here.device(0)) or kind
    if ran != now:
        lines.append(f"computed on {printable(ran)}, here on {now}; the weights may differ in their last bits")
    if then["threads_per_rank"] > cores():
        lines.append(f"computed with {then['threads_per_rank']} threads; they share {cores()} cores here")
    with torch_as_in(ClusterTable(flush_denormals=False)):
        flushable = torch.set_flush_denormal(True)
    if then["flush_denormals"] and not flushable:
        lines.append("denormal numbers were flushed to zero, which this processor cannot do; the weights may differ")
    return lines


def _repeat(
    job: Job,
    plan: Plan,
    record: RecordedRun,
    until: int | None,
    target: Path | None,
    quiet: bool,
    device: torch.device,
) -> tuple[Replayed, Mapping[TableName, list[Rows]]]:
    """Repeats a run. Returns the result, and the rows of norms that were made."""
    updates = record.updates_count if until is None else until
    loaded = load(job.data, test=False, seed=job.training.seed, ignored=job.task.ignored)
    _check_data(record, loaded)
    info = loaded.info
    on_ranks, ran_by = record.attributes["driver"] == "mpi", parsed(record.attributes.get("transport") or "")
    on_cpu = job.learners_on_cpu(plan) if on_ranks and job.cluster.accelerated else frozenset()
    roles = [role for role in range(len(plan.roles)) if role not in on_cpu]
    executors: dict[int, Executor] = {}
    for own, there in ((device, roles), (CPU, sorted(on_cpu))) if on_cpu else ((device, roles),):
        executors |= make_executors(
            job,
            plan,
            tuple(there),
            loaded,
            prefetch=False,
            device=own,
            placing=placement.placing(own, plan, transport=ran_by and ran_by.within) if on_ranks else "device",
            first_weights=final_weights,
        )
    for executor in executors.values():
        executor.prepare()
    tensors = bank_tensors(job, plan, executors)
    phases = phases_of(job, plan, info.training_samples).having(record.decided)
    bar = tqdm(total=updates, unit=" updates", desc=record.path.name, leave=False, disable=quiet or None)
    comparison = Comparison(record, bar.update)
    driver = ReplayDriver(record, phases, info.training_samples, tensors, comparison)
    difference: Difference | None = None
    owners = [owner for owner in map(executors.__getitem__, plan.owners) if isinstance(owner, OwnerExecutor)]
    with bar:
        try:
            compare_weights(0, "initial", record.attributes["initial_weights_sha256"], sha256(_weights(owners)))
            driver.repeat(updates)
            if record.finished and updates == record.updates_count:
                compare_weights(updates, "final", record.state["weights_sha256"], sha256(_weights(owners, final=True)))
        except Left as left:
            difference = left.difference
    if target is not None and difference is None:
        _save(target, job, info, executors[plan.statistics].layout, torch.from_numpy(_weights(owners)))
    done = updates if difference is None else max(0, difference.update - 1)
    digest = sha256(_weights(owners, final=until is None))
    return Replayed(done, record.recorded, record.state["status"], digest, difference, record.note), comparison.norms


def _check_kind(path: Path, plan: Plan, job: Job) -> None:
    """Raises ReplayError if the file's attributes and roles do not match its job."""
    protocol = job.make_protocol(plan)
    kinds = {"averaging": protocol.averages, "scheduled": protocol.schedules}
    for name, wanted in kinds.items():
        if getattr(plan, name) != wanted:
            raise ReplayError(f"{path}: damaged: attribute '{name}' does not match its job")
    try:
        drawn = job.make_topology().plan(len(plan.learners), [plan.roles[i].node for i in plan.learners])
    except ValueError as error:
        raise ReplayError(f"{path}: damaged: /roles does not fit its job: {error}") from None
    if drawn.overlapped != plan.overlapped:
        raise ReplayError(f"{path}: damaged: attribute 'overlapped' does not match its job")
    for name in ("kind", "index", "parent", "source", "group"):
        if [getattr(role, name) for role in drawn.roles] != [getattr(role, name) for role in plan.roles]:
            raise ReplayError(f"{path}: damaged: column {name} of /roles does not match its job")


def _check_data(record: RecordedRun, loaded: Data) -> None:
    """Raises ReplayError if the training data differ from the record's data."""
    try:
        then = from_plain(json.loads(record.attributes.get("data_fingerprints", "{}")))
    except (ValueError, AttributeError, RecursionError):
        raise ReplayError(f"{record.path}: damaged: attribute 'data_fingerprints' is not what Rudra writes") from None
    now = fingerprints(loaded)
    if "training" in then and (what := now["training"].difference(then["training"])):
        raise ReplayError(f"{record.path}: [data] the training set has changed since the run: {what}")


def _weights(owners: Sequence[OwnerExecutor], *, final: bool = False) -> npt.NDArray[np.float32]:
    """Returns all weights, collected from their owners: the last ones, or as a result file has them at its end."""
    parts = interleaved(owner.stretches(owner.evaluated if final else WEIGHTS) for owner in owners)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy(force=True)


def _save(path: Path, job: Job, info: DataInfo, layout: Sequence[Entry], weights: torch.Tensor) -> None:
    """Writes weights as a state dict of the model. Entries that are not in `weights` have their initial values."""
    state = models.build(job.model, info, job.training.seed).state_dict()
    for entry in layout:
        if entry.name in state:  # some buffers are not in the state dict
            state[entry.name].copy_(weights[entry.offset : entry.offset + entry.size].view(entry.shape))
    save(state, path)
