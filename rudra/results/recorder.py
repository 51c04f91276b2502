"""Recorder of the statistics server's rows in the result file and the progress bar, for both drivers."""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rudra import plugins
from rudra.compute.statedict import StateEntry
from rudra.core.actions import Finish, Record, StoreEpochWeights
from rudra.core.buckets import NetworkSpeed, slower_than_copies
from rudra.core.digest import sha256
from rudra.core.events import Decided
from rudra.core.hooks import RoleHooks
from rudra.core.layout import Entry
from rudra.core.messages import Rows
from rudra.core.records import TIMES
from rudra.errors import ConfigError
from rudra.files import NETWORK, file_system
from rudra.job.job import Job
from rudra.job.table import named
from rudra.log import log
from rudra.machine import processor
from rudra.probe import probed
from rudra.results import plan_rows
from rudra.results.carry import Carried
from rudra.results.progress import Progress
from rudra.results.warm_start import shapes
from rudra.results.writer import NORMS_EVERY, ResultsWriter
from rudra.trust import new_run, signed
from topologies import Plan

ACCOUNTED = ("samples", *TIMES)
"""Columns of a learner's totals that include an earlier part of the run."""

VERSIONED = ("rudra", "torch", "numpy", "mpi4py", "h5py")

ATTRIBUTES = {  # root attribute of a result file -> its meaning, shown in `docs/results.md`
    "format_version": "version of this layout",
    "name": "name of the job",
    "job": "the job as it was run, with every default, as JSON",
    "driver": "`mpi` or `simulation`",
    "costs": "source of the times of a simulation",
    "protocol": "name of the protocol",
    "n": "splitting parameter n of the protocol; λ under `async`",
    "gradients_per_update": "c: gradients that make an update, at the start of the run",
    "modulation": "name of the learning-rate modulation, `auto` resolved",
    "rate_factor": "factor of the modulation on the learning rate, for gradients that are not stale",
    "topology": "name of the topology",
    "records": "largest number of gradients in one message",
    "overlapped": "whether learners push and pull in parallel with computing",
    "averaging": "whether each learner trains a replica of its own, and they average these",
    "sharing": "what learners of a compute group share when they average: `nothing`, a `replica` or a `reference`",
    "scheduled": "whether the parameter server assigns the samples to the learners",
    "reduction": "how compute groups add gradients: `ordered`, `nodes` or `mpi`",
    "learners": "λ: number of learners, at the start of the run",
    "momentum": "explicit momentum, after `momentum_correction`",
    "minibatch_size": "μ: samples of a mini-batch",
    "step_bytes": "bytes of tensors that a step of all learners sends where layers are placed, there and back: "
    "2·W·(O + P); 0: none are placed",
    "epochs": "epochs that the job asks for",
    "seed": "seed of weights, sampling, dropout and simulated time",
    "threads_per_rank": "threads that torch had on each learner",
    "device": "device that gradients were computed on",
    "cpu_learners": "numbers of the learners that computed on the CPU while others used GPUs, else empty",
    "device_model": "model of the GPUs that computed; empty on CPUs",
    "transport": "how tensors travelled between ranks that computed on GPUs: `nccl` if groups reduced by it, then the "
    "transports within a node and between nodes, `ipc`, `mpi` or `staged`; empty without such ranks",
    "flush_denormals": "whether denormal numbers were treated as zero",
    "replayable": "whether `rudra replay` can repeat the run",
    "not_replayable": "why it cannot; else empty",
    "run": "identity of the run, which its checkpoints share",
    "modules": "directories of the user's modules, as JSON; none if the job names no code",
    "signature": "HMAC of `run`, `modules` and `job` by the key of the user who ran it; empty without a key",
    "python_objects": "keys of the job that were Python objects, which a replay must be given again",
    "training_samples": "size of the training set",
    "data_fingerprints": "sizes and summaries of a few samples of each split, as JSON; not without tensors",
    "classes": "number of classes of the data",
    "started": "when the run started, in UTC",
    "hosts": "host of each rank",
    "cores_per_node": "cores that the ranks of a node may use, the fewest of all nodes; not in a simulation",
    "bucket_bytes": 'size of a bucket of gradients that `cluster.buckets = "auto"` chose; 0: none',
    "early_passes": "whether forward passes may begin before all their buckets have arrived. If transfers are slow, "
    "`compute_s` of a mini-batch leaves these passes out, and the exchange includes them; missing without a network",
    "network_latency_s": "time of a small message between nodes, from which it was chosen; missing if not measured",
    "network_bytes_per_s": "bandwidth between nodes, from which it was chosen; missing if not measured",
    NORMS_EVERY: "number N: norms of gradients are recorded of every Nth update; missing if they are not recorded",
    "begins_at": "number of earlier updates, if the run began with another run's state without its rows; else missing",
    "initial_weights_sha256": "SHA-256 of the initial weights",
    "processor": "processor of the ranks",
    "cpu_capability": "vector instructions that torch used",
    "mpi_library": "MPI library of the ranks; not in a simulation",
    "python_version": "version of Python",
    **{f"{name}_version": f"version of {name}" for name in VERSIONED},
}


class Recorder:
    """Recorder that writes the statistics server's rows, and shows them.

    Args:
        writer: Writer of the result file.
        progress: Progress display.
        weights: Function that returns the floats of a role's buffer, for weights to write, or None without tensors.
        wall_clock: Whether events carry the time of day, unlike a simulation's events.
        before: Learners' totals of an earlier part of the run, `records.LEARNER`.
        hooks: Hooks of the statistics server.
    """

    def __init__(
        self,
        writer: ResultsWriter,
        progress: Progress,
        weights: Callable[[int, str], npt.NDArray[np.float32] | None],
        *,
        wall_clock: bool = False,
        before: Rows | None = None,
        hooks: RoleHooks | None = None,
    ) -> None:
        self._writer, self._progress, self._weights = writer, progress, weights
        self._wall_clock, self._before, self._hooks = wall_clock, before, hooks

    @probed
    def record(self, action: Record) -> Decided | None:
        rows = action.rows
        if action.table == "events" and self._wall_clock:
            rows = rows.copy()
            rows["wall_s"] = time.time()
        self._writer.append(action.table, rows)
        if action.table == "updates":
            self._progress.updates(action.rows)
        elif action.table == "epochs":
            self._progress.epochs(action.rows)
        return None if self._hooks is None else self._hooks.recorded(action, self._weights)

    def keep(self, role: int, action: StoreEpochWeights) -> None:
        weights = self._weights(role, action.buffer)
        if weights is not None:
            self._writer.keep(action.epoch, weights, action.instead_of)

    def sync(self) -> None:
        """Flushes everything recorded to disk."""
        self._writer.sync()

    def idle(self) -> None:
        """Writes pending rows to the file. Call it when there is nothing else to do."""
        self._writer.flush()

    def finish(self, role: int, action: Finish) -> None:
        learners = action.learners
        if self._before is not None:
            learners = learners.copy()
            for name in ACCOUNTED:
                learners[name] += self._before[name]
        if action.weights is None:
            self._writer.fail("interrupted", action.reason, action.totals, learners)
        else:
            weights = self._weights(role, action.weights)
            self._writer.finish(action.totals, learners, weights, "" if weights is None else sha256(weights))
        self._progress.close()
        if self._hooks is not None:
            self._hooks.finished(action, self._weights)

    def warn(self, name: str, text: str) -> None:
        log.warning(f"{name}: {text}", extra={"role": name})


def make_writer(
    path: Path,
    job: Job,
    layout: Sequence[Entry],
    size: int,
    initial_sha256: str,
    overwrite: bool,
    *,
    plan: Plan | None = None,
    state_dict: Sequence[StateEntry] = (),
    before: Carried | None = None,
    signature: Mapping[str, str] | None = None,
    **about: Any,
) -> ResultsWriter:
    """Creates the result file of a resolved job, with everything that is known before the first gradient.

    Args:
        path: Path of the file.
        job: Resolved job.
        layout: Layout of the flat vector.
        size: Number of elements of the flat vector.
        initial_sha256: Hash of the weights that all learners start from.
        overwrite: Whether an existing file may be replaced.
        plan: Roles and their ranks, by default the job's plan on one node.
        state_dict: Entries of the model's state dict.
        before: Content of an earlier part of the run.
        signature: Result of `rudra.trust.signed`, or None for a new run.
        about: Attributes that only the driver knows, and arguments of `attributes`.
    """
    plan = job.plan() if plan is None else plan
    known = {**attributes(job, plan=plan, **about), "initial_weights_sha256": initial_sha256}
    known |= {} if before is None else before.attributes
    if every := job.results.norms_every:
        known[NORMS_EVERY] = every
    known |= signed(json.loads(job.to_json()), new_run()) if signature is None else signature
    kind = file_system(path.absolute().parent)
    swmr = job.results.swmr == "on" or (job.results.swmr == "auto" and kind not in NETWORK)
    if not swmr and job.results.swmr == "auto":
        text = f"{path}: is on {kind}, where readers cannot follow a file that is being written"
        log.warning(f"{text}: rows reach it every few seconds, and a kill may damage it")
    return ResultsWriter(
        path,
        attributes=known,
        roles=plan_rows.rows_of(plan),
        layout=layout,
        size=size,
        learners=job.learners,
        flush_s=job.results.flush_s,
        overwrite=overwrite,
        swmr=swmr,
        carried=None if before is None else before.rows,
        carried_weights=() if before is None else before.weights,
        state_dict=state_dict,
        norms=job.results.norms_every is not None,
    )


def attributes(
    job: Job, *, plan: Plan, driver: str, training_samples: int, classes: int, **extra: Any
) -> dict[str, Any]:
    """Returns the attributes that describe the run as a whole.

    Args:
        job: Resolved job.
        plan: Roles and their ranks.
        driver: "mpi" or "simulation".
        training_samples: Size of the training set.
        classes: Number of classes in the data.
        extra: Attributes that only the driver knows, or knows better.
    """
    protocol = job.make_protocol(plan)
    obstacles = (not_replayable(part, its_plan, driver) for _, part, its_plan in job.parts(plan))
    obstacle = next(filter(None, obstacles), None)
    return {
        "name": job.name,
        "job": job.to_json(),
        "driver": driver,
        "protocol": named(job.protocol.name),
        "n": protocol.n,
        "gradients_per_update": protocol.gradients_per_update,
        "modulation": protocol.modulation.name,
        "rate_factor": protocol.modulation.rate_factor(0.0),
        "topology": named(job.topology.name),
        **plan_rows.about(plan),
        "learners": job.learners,
        "momentum": job.explicit_momentum(plan),
        "minibatch_size": job.training.minibatch_size,
        "epochs": job.training.epochs,
        "seed": job.training.seed,
        "threads_per_rank": job.cluster.threads_per_rank,
        "device": job.cluster.device,
        "device_model": "",
        "cpu_learners": job.cpu_learners_text(plan) if driver == "mpi" else "",  # virtual time has one device
        "transport": "",
        "flush_denormals": job.cluster.flush_denormals,
        "replayable": obstacle is None,
        "not_replayable": obstacle or "",
        "python_objects": ", ".join(python_objects(job)),
        "training_samples": training_samples,
        "classes": classes,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
        **{f"{name}_version": _version(name) for name in VERSIONED},
        **arithmetic(),
        **extra,
    }


def about_buckets(network: NetworkSpeed | None, auto: int, *, copies: float) -> dict[str, Any]:
    """Returns the attributes about buckets.

    Args:
        network: NetworkSpeed between nodes. None: it was not needed.
        auto: Number of elements of a bucket that was chosen. 0: none.
        copies: Number of vectors that are copied for forward passes that begin before the last buckets have arrived.
            0: no pass does.
    """
    found: dict[str, Any] = {"bucket_bytes": 4 * auto}
    if network is not None:
        found["early_passes"] = bool(auto and copies) and slower_than_copies(network, copies)
        found |= {"network_latency_s": network.latency_s, "network_bytes_per_s": network.bytes_per_s}
    return found


def arithmetic() -> dict[str, str]:
    """Returns properties of this machine that may change the last bits of a result."""
    versions = {f"{name}_version": _version(name) for name in ("rudra", "torch", "numpy")}
    return {**versions, "processor": processor(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def not_replayable(job: Job, plan: Plan, driver: str) -> str | None:
    """Returns why a record of this job's gradients does not determine the weights bit for bit, or None if it does.

    Args:
        job: Resolved job.
        plan: Roles and their ranks.
        driver: "mpi" or "simulation".
    """
    if not job.make_protocol(plan).replayable:
        return f"protocol {named(job.protocol.name)} declares that it is not replayable"
    if not plan.replayable:
        return f"topology {named(job.topology.name)} declares that it is not replayable"
    if job.hogbatch.shares_weights and not job.hogbatch.locking:
        return "its workers raced ([hogbatch] locking = false): the order of their reads and writes is not recorded"
    if job.hogbatch.shares_weights and job.hogbatch.gpu_write == "overwrite":
        return "workers overwrote weights ([hogbatch] gpu_write = 'overwrite'), which no server does"
    if job.hogbatch.shares_weights and (job.optimizer.warm_up or job.optimizer.schedule_every == "update"):
        return "workers had rates of when they got work ([optimizer] warm_up or schedule_every = 'update'), in a window"
    if job.hogbatch.shares_weights and driver == "mpi" and (on_cpu := job.cpu_learners_text(plan)):
        return f"workers {on_cpu} computed on the CPU, and others on device {job.cluster.device}, in a window"
    if job.cluster.device != "cpu" and not job.cluster.deterministic:
        kernels = f"device {job.cluster.device}, whose kernels may add in another order each time"
        return f"{kernels} without [cluster] deterministic = true"
    if job.cluster.fused and plan.served:
        return "learners that were ready at the same time computed together ([cluster] bank = fused)"
    if driver == "simulation" and not job.simulation.tensors:
        return "the simulation had no tensors ([simulation] tensors = false)"
    if driver == "simulation" and job.simulation.batching != "none":
        return f"gradients were batched together ([simulation] batching = {job.simulation.batching})"
    return None


def about_checkpoint(
    job: Job,
    plan: Plan,
    layout: Sequence[Entry],
    signature: Mapping[str, str],
    prints: Mapping[str, Any],
    temporary: bool,
) -> dict[str, Any]:
    """Returns the attributes of a run's checkpoints.

    Args:
        job: Resolved job.
        plan: Roles and their ranks.
        layout: Layout of the flat vector.
        signature: Result of `rudra.trust.signed`.
        prints: Fingerprints of the data, from `rudra.data.fingerprint.plain`.
        temporary: Whether the user gave no name for the result file.
    """
    return {
        "python_objects": ", ".join(python_objects(job)),
        "layout": shapes(layout),
        "averages": plan.averaging,
        "temporary": temporary,
        **signature,
        "data_fingerprints": prints,
    }


def python_objects(job: Job) -> list[str]:
    """Returns keys of the job whose values cannot be found again by their names in its JSON."""
    found = []
    with_names = ("model", "data", "augment", "task", "optimizer", "protocol", "topology", "decisions")
    tables: dict[str, Any] = {table: getattr(job, table) for table in with_names}
    tables |= {f"hooks.{place}": hook for place, hook in enumerate(job.hooks)}
    tables |= {f"changes.{place}.protocol": SimpleNamespace(**c.protocol) for place, c in enumerate(job.changes)}
    for table, keys in tables.items():
        names = ("name", "collate", "schedule", "correction", "call")
        found += [f"{table}.{key}" for key in names if not _is_found_by_name(getattr(keys, key, ""))]
        if not all(map(_is_found_by_name, getattr(keys, "metrics", ()))):
            found.append(f"{table}.metrics")
        for key in ("options", "schedule_options", "correction_options"):
            try:
                json.dumps(getattr(keys, key, {}))
            except TypeError:
                found.append(f"{table}.{key}")
    return found


def _is_found_by_name(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    if not hasattr(value, "__qualname__") or value.__module__ == "__main__":
        return False
    try:
        return plugins.resolve(named(value)) is value
    except ConfigError:
        return False


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
