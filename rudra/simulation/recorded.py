"""Simulation that writes a result file, as a run on ranks does."""

import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rudra.compute.bank.choice import check_form
from rudra.compute.device import devices, placement
from rudra.compute.executor import torch_as_in
from rudra.compute.first_gradient import try_first_gradient
from rudra.core.bucket_rules import pairs_of_nodes
from rudra.core.buffer_names import WEIGHTS
from rudra.core.wire import tail_bytes
from rudra.data.fingerprint import REPEATABLE, Fingerprint, plain, unrepeatable
from rudra.data.load import load
from rudra.errors import Interrupted
from rudra.job.job import Job
from rudra.job.simulation import DEFAULTS
from rudra.log import log
from rudra.memory import free_earlier_runs
from rudra.prepare.begin import check_data, first_position, first_rows, recall, restore, say_lost
from rudra.prepare.nodes import network_of
from rudra.prepare.resolve import ResolvedJob, settle
from rudra.prepare.start import StartDecision
from rudra.results import checkpoint
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.progress import Progress
from rudra.results.recorder import Recorder, about_buckets, about_checkpoint, make_writer
from rudra.roles.statistics import StatisticsServer
from rudra.simulation.assembly import assemble
from rudra.simulation.checkpoints import SimulatedCheckpoints
from rudra.simulation.cluster import SimulatedCluster, make_cluster, without_tensors
from rudra.simulation.costs import expected_shares
from rudra.simulation.overlap import auto_of, early_copies
from rudra.trust import signed
from topologies import Plan


def simulate(resolved: ResolvedJob, start: StartDecision, *, measured: str | None, progress: dict[str, Any]) -> None:
    """Trains a job in virtual time, and writes its result file.

    Args:
        resolved: Job with its plan.
        start: Beginning of the simulation, with the path of its result file.
        measured: Origin of the job's costs, or None if they are not measured.
        progress: Keyword arguments `mode` and `columns` of the progress bar.

    Raises:
        RudraError: The data or the model is missing or does not fit, or the simulation failed.
    """
    free_earlier_runs()
    job, plan, path = resolved.job, resolved.plan, start.output
    shares = expected_shares(job, plan) if job.cluster.shares == "auto" else None
    with torch_as_in(job.cluster):
        model = ""
        if job.simulation.tensors:
            device = placement.virtual(job.cluster.device, window=plan.window)
            data = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
            gradients: str = job.training.gradients
            if start.checkpoint is None or gradients == "auto":
                gradients = try_first_gradient(job, plan, data, device)
            check_form(job, plan, data, device)
            job = settle(job, gradients=gradients, shares=shares)
            cluster = make_cluster(job, plan, data, device)
            model = devices.DEVICES[job.cluster.device].model(device)
        else:
            job = settle(job, gradients=job.training.gradients, shares=shares)
            cluster = without_tensors(job)
        samples, hooked = cluster.info.training_samples, cluster.executors.get(plan.statistics)
        job.check_samples(samples)
        check_data(start, cluster.fingerprints)
        restore(cluster.executors.values(), start, job, plan)
        say_lost(start, job, plan)
        for executor in cluster.executors.values():
            if executor.hooks is not None:
                executor.hooks.output = path.stem
        begun = start.checkpoint is not None
        digest = cluster.executors[plan.server].sha256(WEIGHTS) if begun else cluster.initial_sha256
        tables = json.loads(job.to_json())
        signature = signed(tables, start.run)
        with first_rows(start, job, plan) as before:
            writer = make_writer(
                path,
                job,
                cluster.layout,
                cluster.size,
                digest,
                start.overwrite,
                plan=plan,
                state_dict=cluster.state_dict,
                before=before,
                signature=signature,
                step_bytes=cluster.step_bytes,
                driver="simulation",
                costs=measured or DEFAULTS,
                training_samples=samples,
                **_of_data(cluster.fingerprints),
                classes=cluster.info.classes,
                device_model=model,
                hosts=[socket.gethostname()],
                **_of_buckets(job, plan, cluster),
            )
        checkpoint.discard(checkpoint.path_of(path), kept=True)  # checkpoint of a run that this one replaces
        with writer:
            shown = Progress(job, samples, begun=start.position.samples, **progress)
            hooks, totals = hooked.hooks if hooked else None, None if before is None else before.learners
            recorder = Recorder(writer, shown, cluster.weights, before=totals, hooks=hooks)
            saving = _saving(job)
            simulation = assemble(
                saving,
                plan,
                cluster.tensors,
                recorder,
                training_samples=samples,
                size_bytes=cluster.size * 4 + tail_bytes(1),
                buffers=cluster.buffers,
                position=first_position(start, job, plan),
                placed=cluster.placed,
            )
            statistics = simulation.actors[plan.statistics].machine
            assert isinstance(statistics, StatisticsServer)
            recall(start, statistics, hooks)
            saves, kept = saving.results.checkpoint_interval is not None, saving.results.kept_interval
            saver = None
            if saves or kept is not None:
                prints = plain(cluster.fingerprints)
                about = about_checkpoint(job, plan, cluster.layout, signature, prints, start.temporary)
                checkpoints = CheckpointWriter(checkpoint.path_of(path), tables, about)
                saver = SimulatedCheckpoints(simulation, cluster.executors, checkpoints, recorder)
            if (text := simulation.costs.guessed) and progress["mode"] != "quiet":
                log.info(f"{job.name}: {text}")
            try:
                with _told_to_end():
                    simulation.run()
                    if saver is not None and not simulation.code:
                        saver.finish(interval=kept, leaves=saves and not start.temporary)
                    for executor in cluster.executors.values():
                        executor.close()
            finally:
                shown.close()
                if saver is not None:
                    saver.close()


def _saving(job: Job) -> Job:
    """Returns the job with the intervals of its checkpoints in virtual time."""
    never = {"checkpoint_every": "never"}
    if not job.simulation.tensors:
        return job.with_(results={**never, "keep_checkpoints": "never"})
    return job.with_(results=never) if job.results.checkpoint_every == "auto" else job


def _of_buckets(job: Job, plan: Plan, cluster: SimulatedCluster) -> dict[str, Any]:
    """Returns attributes of the result file about buckets of gradients."""
    nodes = plan.nodes(near=job.simulation.servers_on_first_node)
    needed = pairs_of_nodes(job, plan, nodes)
    auto = auto_of(job, plan, cluster.size, cluster.placed) if needed else 0
    return about_buckets(network_of(job), auto, copies=early_copies(job, plan))


def _of_data(found: Mapping[str, Fingerprint]) -> dict[str, Any]:
    """Returns attributes of the result file about the data. Warns if the data cannot be reproduced."""
    if not (why := unrepeatable(found)):
        return {"data_fingerprints": json.dumps(plain(found))} if found else {}
    log.warning(f"{why}: {REPEATABLE}")
    return {"data_fingerprints": json.dumps(plain(found)), "replayable": False, "not_replayable": why}


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C, so that the file records how the run ended. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
