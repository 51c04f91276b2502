"""Devices of the ranks: which vectors are on them, and how other ranks get these."""

import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from mpi4py import MPI

from rudra.compute.device import devices
from rudra.compute.device.kind import CPU
from rudra.compute.executor import Executor
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.transports import IN_MAIN_MEMORY, Transport, Transports, lends, on_devices, slots_of
from rudra.log import log
from rudra.mpi.arena import Arena
from rudra.mpi.bucket_rule import nodes_of
from rudra.mpi.device_arena import DeviceArena
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.quiet import QuietComm
from topologies import Plan


class RankDevices:
    """Device of this rank, and the transports of vectors between all ranks. All ranks call each method together.

    Args:
        ranks: the ranks of the job.
        plan: role assignment.
        device: device for this rank's computations.
        transports: transports of the pairs of ranks that compute on GPUs. None: there are none.
        node: communicator of the ranks of this node.
        places: first rank of the node of every rank.

    Attributes:
        here: device for this rank's computations.
        transports: transports of the pairs of ranks that compute on GPUs. None: there are none.
    """

    def __init__(
        self,
        ranks: JobRanks,
        plan: Plan,
        device: torch.device,
        transports: Transports | None,
        node: QuietComm,
        places: Sequence[int],
    ) -> None:
        self._ranks, self._plan, self._node, self._places = ranks, plan, node, places
        self._rank = ranks.comm.rank
        kinds = [plan.traits(role) for role in plan.on_rank(self._rank)]
        self._learns = any(kind.trains for kind in kinds)
        self._computes = self._learns or any(kind.tests for kind in kinds)
        self.here, self.transports = device, transports

    @property
    def _nodes(self) -> list[int]:
        """Node of every role."""
        return nodes_of(self._plan, self._places)

    @property
    def on_devices(self) -> frozenset[int]:
        """Ranks whose vectors are on their devices, and are copied from there for others."""
        return on_devices(self._plan, self._nodes, self.transports)

    @property
    def _lends(self) -> bool:
        """Whether this rank and others of its node read each other's memory on devices."""
        return lends(self._plan, self._rank, self._nodes, self.transports)

    @property
    def whole(self) -> Collection[int]:
        """Ranks whose learners send and receive whole vectors, because theirs are on a GPU."""
        by_mpi = self.transports is not None and self.transports.between == "mpi"
        return range(self._ranks.comm.size) if by_mpi else self.on_devices

    @property
    def transport(self) -> Transport | None:
        """Transport that decides where the vectors of this rank are, as for `placement.placing`."""
        if self.transports is None:
            return None
        return "ipc" if self._rank in self.on_devices else self.transports.between

    def try_transport(self, job: Job, *, says: bool) -> None:
        """Tries on each node whether ranks read each other's memory on their devices, if the job uses it.

        Args:
            job: the job.
            says: whether this rank says what does not work.
        """
        if self.transports is None or self.transports.within != "ipc":
            return
        arena, wanted = DeviceArena(self.here), devices.DEVICES[job.cluster.device]
        arena.make_slots(1, 1)
        if devices.kind_of(self.here) is not wanted:
            arena.failure = f"torch sees no {wanted.noun}"
        failure = self._meet(arena)
        arena.close()
        found = dict(zip(self._places, self._ranks.comm.allgather(failure), strict=True))  # the same on all of a node
        if not any(found.values()):
            return
        if failure and job.cluster.transport == "ipc":
            raise ConfigError(f"[cluster] transport = 'ipc' does not work here ({failure}); {IN_MAIN_MEMORY}")
        self.transports = self.transports._replace(excluded=frozenset(node for node, why in found.items() if why))
        if not self._computes and self._rank not in self.on_devices:
            self.here = CPU
        for why in dict.fromkeys(filter(None, found.values())) if says else ():
            log.info(f"{job.name}: ranks cannot read each other's GPU memory ({why}): transport is 'staged'")

    def _meet(self, arena: DeviceArena) -> str:
        """Meets the ranks of this node whose vectors are on devices. Returns why they cannot share memory, or nothing.

        All ranks of the node call this, and get the same result.
        """
        color = 0 if self._lends else MPI.UNDEFINED
        sharing, failure = self._node.Split(color, self._node.rank), ""
        if sharing != MPI.COMM_NULL:
            failure = arena.meet(sharing, self._rank)
            sharing.Free()
        return next(filter(None, self._node.allgather(failure)), "")

    def check(self) -> None:
        """Checks which ranks have the same device: groups that reduce by NCCL need devices of their own.

        Other ranks may share one, and a line says what that costs.
        """
        if self.transports is None:
            return
        kind, rank = devices.kind_of(self.here), self._rank
        mine = kind.identity(self.here), self._learns
        found = self._ranks.comm.allgather(mine)
        here = [other for other, its in enumerate(found) if mine[0] and its[0] == mine[0]]
        learning = [other for other in here if found[other][1]]
        if self.transports.nccl and rank in learning[1:]:
            who = f"ranks {learning[0]} and {rank} on {socket.gethostname()}"
            raise ConfigError(
                f"[cluster] transport = 'nccl' needs a GPU for each rank with learners, and {who} have the same; use "
                "fewer learners, or transport = 'auto'"
            )
        if len(here) > 1 and rank == here[0] and kind.takes_turns():
            who = f"ranks {', '.join(map(str, here))} on {socket.gethostname()}"
            log.info(f"{who} share a {kind.noun}, which computes for one of them at a time: start NVIDIA MPS there")

    def make_region(self, executors: Mapping[int, Executor]) -> Arena | None:
        """Allocates the memory that other ranks read on this rank's device, and maps theirs.

        Returns:
            This memory. None: the vectors of this rank are in main memory.
        """
        if self.transports is None or not self.on_devices:
            return None
        reads, node = self.transports.between == "mpi", self._places[self._rank]
        arena = DeviceArena(self.here, reads=reads)
        mine = arena if self._rank in self.on_devices else None
        if self.transports.of_pair(node, node) != "ipc":
            return mine
        sending = [executor for role, executor in executors.items() if not self._plan.traits(role).tests]
        if self._lends:
            slots = slots_of(self._plan, self._rank, self._nodes, self.transports)
            arena.make_slots(slots, 4 * max((executor.largest for executor in sending), default=0))
        if failure := self._meet(arena):
            raise ConfigError(f"[cluster] transport = 'ipc' does not work here ({failure}); use transport = 'staged'")
        return mine

    def facts(self, owner: int) -> dict[str, Any]:
        """Returns attributes of the result file about devices.

        Args:
            owner: world rank of the owner of the weights.
        """
        models = {*self._ranks.comm.allgather(devices.kind_of(self.here).model(self.here))} - {""}
        names = "" if self.transports is None else self.transports.names(self._nodes, self._places[owner])
        return {"transport": names, "device_model": "; ".join(sorted(models))}  # servers compute in main memory
