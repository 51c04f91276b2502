"""Set-up of a rank: data, model, executors and files, in steps that all ranks take together.

If one rank cannot take a step, all ranks end, and one line reports the reason.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from rudra.compute.averaging import CHUNK
from rudra.compute.bank.choice import choose_form
from rudra.compute.bank.gathering import bank_of
from rudra.compute.bank.graphs import compute_at_once
from rudra.compute.device import placement
from rudra.compute.device.devices import kind_of
from rudra.compute.device.kind import CPU
from rudra.compute.executor import Executor, prepare_torch
from rudra.compute.first_gradient import try_first_gradient
from rudra.compute.hogwild import give_window, layout_of
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.memory_plan import check_device_memory
from rudra.compute.owners import OwnerExecutor
from rudra.core.bucket_rules import held
from rudra.core.phases import Phases
from rudra.core.priority import NICE
from rudra.core.training_state import TrainingState
from rudra.core.work import by_speed, speeds_text
from rudra.data.load import Data, DataInfo, in_memory
from rudra.errors import ConfigError
from rudra.job.transports import IN_MAIN_MEMORY, Transports
from rudra.log import log
from rudra.memory import give_back_freed_memory, keep_freed_memory
from rudra.mpi.arena import Arena
from rudra.mpi.bucket_choice import BucketChoice
from rudra.mpi.bucket_rule import BucketRule, nodes_of
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.libraries import Library, library_of
from rudra.mpi.node_data import NodeData
from rudra.mpi.quiet import QuietComm
from rudra.mpi.rank_devices import RankDevices
from rudra.mpi.run_files import RunFiles
from rudra.mpi.shared_window import share_window
from rudra.mpi.speed_test import Trial
from rudra.mpi.tensor_traffic import GENERATIONS
from rudra.prepare.begin import first_position, restore, say_lost
from rudra.prepare.phases import phases_of
from rudra.prepare.resolve import ResolvedJob, settle
from rudra.prepare.start import StartDecision
from rudra.results.warm_start import final_weights
from rudra.roles import Machine, make_in_phase
from topologies import Plan

RESERVED = 24
"""Number of buffers for each role, including float16 forms. Neighbours reserve address space for all."""


class RankSetup:
    """The objects that a rank creates before training.

    Args:
        ranks: the ranks of the job.
        resolved: the job and its plan.
        start: start of the run.
        device: device for this rank's computations.
        transports: transports of the pairs of ranks that compute on GPUs. None: there are none.
        node: communicator of the ranks of this node.
        places: first rank of the node of every rank.

    Attributes:
        job: current job, settled after the data has been loaded.
        plan: role assignment.
        roles: ids of this rank's roles.
        phases: phases of the run.
        machines: role id -> state machine of the role.
        executors: role id -> executor of the role.
        arena: shared memory that holds the executors' buffers and that neighbours read.
        files: files of the run.
        places: first rank of the node of every rank.
        devices: device of this rank, and how vectors get from device to device.
        buckets: size of buckets that the ranks chose.
        library: library that adds in the group of this rank's learners. None: the ranks do.
    """

    phases: Phases
    machines: dict[int, Machine]

    def __init__(
        self,
        ranks: JobRanks,
        resolved: ResolvedJob,
        start: StartDecision,
        device: torch.device,
        transports: Transports | None,
        node: QuietComm,
        places: Sequence[int],
    ) -> None:
        self.job, self.plan = resolved
        self._node, self.places = node, places
        self.roles = self.plan.on_rank(ranks.comm.rank)
        self.executors: dict[int, Executor] = {}
        self.arena: Arena = Arena()
        self.files = RunFiles(start)
        self._gradients, self._bank = "", ""
        self._ranks, self._start = ranks, start
        self.devices = RankDevices(ranks, self.plan, device, transports, node, places)
        self.buckets = BucketChoice(ranks, places)
        self.library: Library | None = None

    @property
    def keeps_results(self) -> bool:
        """Whether the statistics server is on this rank."""
        return self.plan.statistics in self.roles

    def prepare(self, progress: dict[str, Any]) -> int | None:
        """Takes all steps.

        Args:
            progress: keyword arguments `mode` and `columns` of the progress bar.

        Returns:
            None, or the exit code of the first rank that could not take a step.
        """
        measured = (self._try, self._time, self._divide) if self.job.cluster.shares == "auto" else ()
        data = (
            self._load,
            self.devices.check,
            lambda: self.devices.try_transport(self.job, says=self.keeps_results),
            lambda: self._data.share(),
            self._compare_data,
            self._settle,
            self._take_settled,
        )
        network = (
            self._build,
            lambda: self.buckets.test_network(self.phases),
            lambda: self.buckets.choose(self.job, self.plan, self.executors),
            lambda: self.buckets.try_to_pull(self.phases, self.executors),
        )
        ready = (
            *network,
            self._restore,
            self._meet_neighbours,
            self._make_library,
            self._share_window,
            lambda: self._open(progress),
        )
        for step in (*data, *measured, *ready):
            error = self._ranks.agree(step)
            if error is not None:
                return error
        return None

    def _load(self) -> None:
        kinds = [self.plan.traits(i) for i in self.roles]
        learns = any(kind.trains or kind.concludes for kind in kinds)
        serves = any(kind.serves for kind in kinds)
        prepare_torch(self.job.cluster, self.job.cluster.threads_per_rank or 1 if learns or serves else 1)
        kind_of(self.devices.here).select(self.devices.here)  # for the user's model and pinned memory
        if learns:
            keep_freed_memory()
        if self.keeps_results and not learns and not self.job.evaluations_decide:  # training has priority
            os.nice(max(0, NICE - os.nice(0)))  # an earlier run in this process may have done so
        tests = self.keeps_results or (learns and self.job.training.evaluate == "workers")
        self._data = NodeData(self._ranks, self._node, self.job, train=learns, test=tests)
        self._data.load()

    def _compare_data(self) -> None:
        self._data.compare(self._start, warns=self.keeps_results)

    @property
    def _deciding(self) -> int:
        """World rank of the first learner, on a GPU if there is one. It decides how all ranks compute gradients."""
        first = min(self.plan.learners, key=self.job.learners_on_cpu(self.plan).__contains__)
        return self.plan.roles[first].world_rank

    def _settle(self) -> None:
        """Tries the first gradient and the bank on the rank that decides."""
        gradients: str = self.job.training.gradients
        if self._ranks.comm.rank == self._deciding:
            assert self._data.data is not None
            if self._start.checkpoint is None or gradients == "auto":
                gradients = try_first_gradient(self.job, self.plan, self._data.data, self.devices.here)
            self._bank = choose_form(self.job, self.plan, self._data.data, self.devices.here, gradients)
        self._gradients = gradients

    def _take_settled(self) -> None:
        """Adopts the decision of that rank."""
        gradients, bank = self._ranks.comm.bcast((self._gradients, self._bank), self._deciding)
        self.job = settle(self.job, gradients=gradients, bank=bank)
        if self.job.cluster.graphed:
            prepare_torch(self.job.cluster, self.job.cluster.torch_threads)

    def _try(self) -> None:
        """Prepares the learners for measuring their speed."""
        self._trial = Trial(self.job, self.plan, self.roles, self._data.data, self.devices.here, self.devices.transport)

    def _time(self) -> None:
        """Measures the speed while all learners compute at the same time."""
        self._trial.measure(self._ranks.comm.allreduce(self._trial.round_s, MPI.MAX))

    def _divide(self) -> None:
        """Gives each learner a share in proportion to its speed, and continues with a job that names these shares."""
        parts: list[dict[int, float]] = self._ranks.comm.allgather(self._trial.seconds)
        self._trial.close()
        taken = {role: seconds for part in parts for role, seconds in part.items()}
        seconds = [taken[role] for role in self.plan.whole.learners]
        shares = by_speed(seconds)
        if self.keeps_results:
            text = speeds_text(seconds, self.job.training.minibatch_size, shares)
            log.info(f"{self.job.name}: when all compute, {text}")
        self.job = settle(self.job, gradients=self.job.training.gradients, shares=shares)
        if self._data.data is not None and self._trial.seconds:
            check_device_memory(self.job, self.plan, self._data.data, self.devices.here)

    def _build(self) -> None:
        source, data = self.plan.roles[self.plan.statistics].world_rank, self._data.data
        self._info: DataInfo = self._ranks.comm.bcast(None if data is None else data.info, source)
        self.job.check_samples(self._info.training_samples)
        self.phases = phases_of(self.job, self.plan, self._info.training_samples)
        position = first_position(self._start, self.job, self.plan)
        self.machines = {i: self._machine(i, self.plan, position) for i in self.roles}
        apart = self._ranks.comm.rank in self.devices.on_devices
        self._near = self.job.cluster.node_memory and self._node.size > 1 and not apart
        if not self.roles:
            return
        data = data or Data(None, None, self._info)
        learning = sum(self.plan.traits(i).trains for i in self.roles)
        at_once = self.job.cluster.graphed and learning > 1
        self.executors = make_executors(
            self.job,
            self.plan,
            self.roles,
            data,
            prefetch=not in_memory(data.training),
            at_once=at_once,
            device=self.devices.here,
            placing=placement.placing(self.devices.here, self.plan, transport=self.devices.transport),
            first_weights=final_weights,
            memory=self.arena.allocate if self._near else None,
        )
        learners = [each for each in self.executors.values() if isinstance(each, LearnerExecutor)]
        if self.job.cluster.fused and len(learners) > 1:
            bank = bank_of(self.job, self.plan, learners)
            for learner in learners:
                learner.bank = bank
        if at_once:
            assert data.training is not None
            compute_at_once(self.job, learners, data.training, say=self._ranks.comm.rank == self._deciding)
        for executor in self.executors.values():
            if executor.hooks is not None:
                executor.hooks.output = self._start.output.stem
            # Slices make the step of a small model no faster, and threads that share cores would synchronise after each
            # slice.
            alone = self.job.cluster.torch_threads == 1
            executor.lazy_average = executor.row_format is None and executor.size > CHUNK and alone
            executor.lazy_average &= executor.device.type == CPU.type  # a device is faster with whole vectors

    def _restore(self) -> None:
        """Allocates the memory for training, and restores the state from a checkpoint if there is one."""
        give_back_freed_memory()  # memory from building the model
        if self.job.training.compile and self.keeps_results:
            log.info(f"{self.job.name}: compiling the gradient's code")
        node = nodes_of(self.plan, self.places)
        for role, executor in self.executors.items():
            executor.prepare()
            overlaps = self.plan.traits(role).overlaps or (self.plan.overlapped and role == self.plan.server)
            if self._near and overlaps:
                executor.reserve(GENERATIONS - 1)
            if self._ranks.comm.rank not in self.devices.on_devices:  # it receives them in rooms
                about = executor.size, executor.parameters, self.buckets.auto
                executor.reserve(held(self.job, self.plan, node, role, *about))
        restore(self.executors.values(), self._start, self.job, self.plan)
        if self.keeps_results:
            say_lost(self._start, self.job, self.plan)

    def _meet_neighbours(self) -> None:
        """Maps the buffers of other ranks of this node, and lets them map this rank's buffers."""
        self.arena = self.devices.make_region(self.executors) or self.arena
        apart = any(executor.direct for executor in self.executors.values())
        apart |= self._ranks.comm.rank in self.devices.on_devices
        near = self._node.Split(MPI.UNDEFINED if apart else 0, self._node.rank)  # others get messages
        if self._near and near != MPI.COMM_NULL:
            rooms = sum(
                (executor.largest * 6 + executor.tail + 2 * mmap.ALLOCATIONGRANULARITY) * self._most_buffers(role)
                for role, executor in self.executors.items()
            )
            failure = self.arena.meet(near, self._ranks.comm.rank, rooms)
            if failure and near.rank == 0:
                host = f"node memory is not available on {socket.gethostname()}"
                log.warning(f"{host} ({failure}): its ranks exchange messages instead, which is slower")
        for comm in (near, self._node):
            if comm != MPI.COMM_NULL:
                comm.Free()

    def _make_library(self) -> None:
        """Creates the library that adds in compute groups, if the job uses one."""
        transports = self.devices.transports
        by_nccl = transports is not None and transports.nccl
        try:
            self.library = library_of(self._ranks.comm, self.plan, self.roles, self.devices.here if by_nccl else None)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"[cluster] transport = 'nccl' does not work here ({reason}); {IN_MAIN_MEMORY}"
            ) from error

    def _most_buffers(self, role: int) -> int:
        """Returns the largest number of buffers of a role at a time.

        A stage server has three for each learner. Others may keep one for each learner whose gradients come in buckets,
        and another one if that learner dies.
        """
        traits, learners = self.plan.traits(role), self.plan.learner_numbers
        return RESERVED + 3 * learners * traits.concludes + 2 * learners * (traits.serves and not traits.concludes)

    def _share_window(self) -> None:
        """Gives the workers of a node and their coordinator one shared memory for the weights, if the job wants it."""
        if not self.plan.window:
            return
        plan, comm = self.plan, self._ranks.comm
        world, owner, mine = list(range(comm.size)), plan.server, [plan.traits(role) for role in self.roles]
        member = any(kind.trains or kind.serves for kind in mine)
        if several := plan.window_leaders:  # each has its own window, and the owner of the weights has none
            node = next((plan.roles[role].node for role in self.roles if plan.traits(role).trains), MPI.UNDEFINED)
            comm = comm.Split(node, comm.rank)
            if comm == MPI.COMM_NULL:
                return
            world = comm.allgather(self._ranks.comm.rank)
            owner = next(leader for leader in several if plan.roles[leader].node == node)
        executor = self.executors.get(owner)
        shape = None if executor is None else layout_of(self.job, plan, executor.size)
        window, failure = share_window(comm, world.index(plan.roles[owner].world_rank), shape, member=member)
        if several:
            comm.Free()
        if failure:
            raise ConfigError(
                f"[hogbatch] weights = 'shared': its memory is not available here ({failure}); valid: server"
            )
        if window is not None:
            give_window(self.executors, window)

    def _open(self, progress: dict[str, Any]) -> None:
        """Creates the files."""
        settled, statistics = ResolvedJob(self.job, self.plan), self.machines.get(self.plan.statistics)
        facts = self.buckets.facts | self.devices.facts(self.plan.roles[self.plan.server].world_rank)
        self.files.open(self._ranks, settled, self.executors, statistics, self._info, self._data, facts, progress)

    def bucket_rule(self, plan: Plan) -> BucketRule:
        """Returns the rule of buckets for a plan."""
        node = nodes_of(plan, self.places)
        return BucketRule(self.job, plan, node, self.buckets.auto, self.buckets.pulls, self.devices.whole)

    def make_machine(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        """Creates a role for a restart. A role that updates weights restores the checkpoint just written."""
        executor = self.executors[role]
        if isinstance(executor, OwnerExecutor) and role not in plan.followers:  # these have a state of their own
            self.files.restore(executor, position)
        return self._machine(role, plan, position)

    def _machine(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        return make_in_phase(role, self.phases, plan.gone, self._info.training_samples, position)
