"""The files of a run: its result file, which the statistics server's rank writes, and its checkpoints."""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.owners import OwnerExecutor
from rudra.core.buffer_names import WEIGHTS
from rudra.core.training_state import TrainingState
from rudra.data.load import DataInfo
from rudra.errors import CheckpointError
from rudra.machine import core_mask
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.node_data import NodeData
from rudra.prepare.begin import first_rows, recall
from rudra.prepare.resolve import ResolvedJob
from rudra.prepare.start import StartDecision
from rudra.results import checkpoint
from rudra.results.carry import Carried
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.progress import Progress
from rudra.results.recorder import Recorder, about_checkpoint, arithmetic, make_writer
from rudra.results.writer import ResultsWriter, Status
from rudra.roles import Machine
from rudra.roles.statistics import StatisticsServer
from rudra.trust import signed

SEEN_S = 60.0
"""Time that a file system may take to show a replaced file to other ranks."""


class RunFiles:
    """The files of a run that this rank writes.

    Args:
        start: start of the run.

    Attributes:
        checkpoints: checkpoint writer on the rank of the weights' owner, or None on other ranks.
        writer: writer of the result file on the statistics server's rank, or None on other ranks.
        progress: progress bar on the statistics server's rank, or None on other ranks.
    """

    def __init__(self, start: StartDecision) -> None:
        self.checkpoints: CheckpointWriter | None = None
        self.writer: ResultsWriter | None = None
        self.progress: Progress | None = None
        self._start = start
        self._before: Any = None  # the learners' totals in an earlier part of the run

    def open(
        self,
        ranks: JobRanks,
        resolved: ResolvedJob,
        executors: Mapping[int, Executor],
        statistics: Machine | None,
        info: DataInfo,
        data: NodeData,
        facts: Mapping[str, Any],
        progress: dict[str, Any],
    ) -> None:
        """Creates the files. All ranks call this together.

        Args:
            ranks: the ranks of the job.
            resolved: the job, settled, and its plan.
            executors: role -> executor for this rank's roles. Executors hold the initial weights.
            statistics: machine of the statistics server, on its rank, or None on other ranks.
            info: description of the data.
            data: data of this rank.
            facts: attributes of the result file about buckets of gradients, and the model of the GPUs.
            progress: keyword arguments `mode` and `columns` of the progress bar.
        """
        (written, plan), comm = resolved, ranks.comm
        server, source = plan.roles[plan.server].world_rank, plan.roles[plan.statistics].world_rank
        own = executors[plan.server].sha256(WEIGHTS) if comm.rank == server else ""
        digest: str = comm.bcast(own, server)
        job = json.loads(written.to_json())
        own_signature = signed(job, self._start.run) if statistics is not None else None
        signature: dict[str, str] = comm.bcast(own_signature, source)  # so that only one rank needs a key
        if comm.rank == server:
            layout, prints = executors[plan.server].layout, data.plain_prints
            about = about_checkpoint(written, plan, layout, signature, prints, self._start.temporary)
            self.checkpoints = CheckpointWriter(checkpoint.path_of(self._start.output), job, about)
        places: list[tuple[str, int]] = comm.allgather((socket.gethostname(), core_mask()))
        kinds: list[dict[str, str]] = comm.allgather(arithmetic())
        if statistics is None:
            return
        machines = {name: "; ".join(sorted({kind[name] for kind in kinds})) for name in kinds[0]}
        why = {"replayable": False, "not_replayable": data.unrepeatable} if data.unrepeatable else {}
        masks: dict[str, int] = {}
        for host, mask in places:
            masks[host] = masks.get(host, 0) | mask
        fewest = min(mask.bit_count() for mask in masks.values())
        found = {
            "hosts": [host for host, _ in places],
            "cores_per_node": fewest,
            **machines,
            **facts,
            "data_fingerprints": json.dumps(data.plain_prints),
            **why,
        }
        assert isinstance(statistics, StatisticsServer)
        recall(self._start, statistics, executors[plan.statistics].hooks)
        with first_rows(self._start, written, plan) as before:
            self._create(resolved, executors[plan.statistics], info, before, digest, signature, found)
        self._before = None if before is None else before.learners
        self.progress = Progress(written, info.training_samples, begun=self._start.position.samples, **progress)

    def _create(
        self,
        resolved: ResolvedJob,
        executor: Executor,
        info: DataInfo,
        before: Carried | None,
        digest: str,
        signature: dict[str, str],
        found: dict[str, Any],
    ) -> None:
        """Creates the result file."""
        begun, output = self._start.checkpoint, self._start.output
        self.writer = make_writer(
            output,
            resolved.job,
            executor.layout,
            executor.size,
            digest,
            self._start.overwrite,
            plan=resolved.plan,
            state_dict=executor.state_dict,
            before=before,
            signature=signature,
            step_bytes=executor.step_bytes,
            driver="mpi",
            training_samples=info.training_samples,
            classes=info.classes,
            **found,
            mpi_library=MPI.Get_library_version().split("\n")[0].strip("\0 "),
        )
        if begun is None or checkpoint.results_of(begun) != output:
            checkpoint.discard(checkpoint.path_of(output), kept=True)  # files of a run that this one replaces
        elif checkpoint.is_kept(begun):
            checkpoint.step_back(begun)
        executor.state_dict = ()  # no longer needed, and frozen parameters may be large

    def recorder(self, executors: Mapping[int, Executor], statistics: int) -> Recorder | None:
        """Returns the recorder of the statistics server's rows, or None on other ranks."""
        if self.writer is None or self.progress is None:
            return None
        about: dict[str, Any] = {"before": self._before, "hooks": executors[statistics].hooks}
        return Recorder(
            self.writer,
            self.progress,
            lambda role, buffer: executors[role].buffer(buffer).array,
            wall_clock=True,
            **about,
        )

    def restore(self, executor: OwnerExecutor, position: TrainingState) -> None:
        """Restores an owner of weights from the checkpoint that another rank has just written."""
        path = checkpoint.path_of(self._start.output)
        deadline = time.monotonic() + SEEN_S
        while (found := checkpoint.read(path))[0].position != position:  # slow file systems show the old file
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{path}: is not the checkpoint that the first learner wrote for all ranks to continue from"
                )
            time.sleep(0.1)
        executor.restore(found[1])

    def note(self, status: Status, reason: str) -> None:
        """Records a status in the result file that is right if this rank is killed now."""
        assert self.writer is not None
        self.writer.note(status, reason)

    def save(self, status: Status, reason: str) -> None:
        """Saves the existing results of a run that ends early."""
        with suppress(Exception):
            assert self.progress is not None
            self.progress.close()
        with suppress(Exception):
            assert self.writer is not None
            self.writer.fail(status, reason)
