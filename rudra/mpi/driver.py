"""The MPI driver: roles on real ranks.

One thread per rank owns its roles, polls for messages and carries out actions. Executors do the local work. This thread
also computes a learner's gradient if no other rank needs this rank during the computation. Otherwise gradients and
transfers have their own threads (`rudra.mpi.comm_threads`). Only buffer-mode calls are on the training path: a control
message is one small eager send, and a tensor is one transfer from the sender's buffer to the receiver's. If ranks share
cores, a waiting rank sleeps until a neighbour rings (`rudra.mpi.doorbell`) and leaves the core to the ranks that
compute. A rank with its own core spins for a while before it sleeps. Neighbours read tensors in the owner's memory
(`rudra.mpi.arena`), and MPI carries only their places.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import speculation_of
from rudra.core.actions import (
    COMPUTATIONS,
    Action,
    BackpropFirstStage,
    CancelReceive,
    Commit,
    Compute,
    DeclareLost,
    ExecutorAction,
    Fail,
    Finish,
    Halt,
    Receive,
    Reconfigure,
    Record,
    Reduce,
    Save,
    Send,
    StoreEpochWeights,
    Sync,
    Warn,
)
from rudra.core.bursts import BankDone, BurstMade
from rudra.core.events import Event, Lost, Stopped, Tick
from rudra.core.messages import URGENT, StopRequested
from rudra.core.phases import Phases
from rudra.core.training_state import TrainingState
from rudra.core.wire import encode
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.log import log
from rudra.mpi.arena import Arena
from rudra.mpi.bucket_rule import BucketRule
from rudra.mpi.bursts import Bursts, bursts_of_rank
from rudra.mpi.checkpoint_thread import CheckpointThread
from rudra.mpi.clock import clock_origin
from rudra.mpi.control_messages import ControlMessages
from rudra.mpi.deadlock import Standstill
from rudra.mpi.failure_reports import raise_reported
from rudra.mpi.failures import Losses
from rudra.mpi.hosted_roles import HostedRoles, Make
from rudra.mpi.idleness import Idleness
from rudra.mpi.libraries import Library
from rudra.mpi.lockstep import DriverHands
from rudra.mpi.long_work import LongWork
from rudra.mpi.patience import Patience
from rudra.mpi.reductions import Reductions
from rudra.mpi.regroup import RankRegrouping
from rudra.mpi.states import StateTransfer
from rudra.mpi.tags import CHANNELS, CONTROL, FIRST_TAG, STANDSTILL_TAG, STATES
from rudra.mpi.tensor_traffic import TensorTags, TensorTraffic
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.recorder import Recorder
from rudra.roles import Machine
from topologies import Plan


class Ended(Exception):
    """The launcher asked this rank to end."""


@dataclass(slots=True)
class Signalled:
    """Requests of signal handlers to a rank.

    Attributes:
        stop: whether to ask the run to stop in order.
        urgent: function to call as soon as possible, or None if there is none.
        ended: whether the launcher is ending this rank.
    """

    stop: bool = False
    urgent: Callable[[], None] | None = None
    ended: bool = False

    def hurries(self) -> bool:
        """Whether this rank must handle a request as soon as possible."""
        return self.stop or self.ended or self.urgent is not None


class Rank:
    """The roles of one rank, driven until they halt. All ranks create theirs together.

    Args:
        comm: communicator of all ranks of the job.
        plan: initial role assignment.
        machines: role id -> state machine, for the roles of this rank.
        executors: role id -> executor that does the role's local work.
        recorder: writes the statistics server's rows, or None on other ranks.
        checkpoints: writes checkpoints on the rank of the weights' owner, or None on other ranks.
        make_machine: creates the machine of a role that restarts (see `Make`).
        phases: phases of the run.
        stall_warning_s: seconds after which a wait is reported.
        stall_limit_s: seconds after which a wait ends the run. None: never.
        spins: whether a waiting rank may keep its core busy for a while. Must be False if another rank computes on that
            core.
        halves: whether gradients travel as float16.
        arena: shared memory that holds the executors' buffers and that neighbours read.
        job: job that determines the buckets of gradients.
        places: first rank of the node of every rank.
        bucket_rule: returns the rule of buckets for a plan.
        library: library that adds in the group of this rank's learners. None: the ranks do.

    Attributes:
        comm: communicator of all ranks.
        phases: phases of the run.
        plan: current role assignment.
        states: transfer of the roles' states that a checkpoint needs.
        signalled: requests of signal handlers, which may change it at any time.
        apart: whether some rank may never end by itself.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        machines: dict[int, Machine],
        executors: dict[int, Executor],
        recorder: Recorder | None,
        checkpoints: CheckpointWriter | None = None,
        make_machine: Make | None = None,
        phases: Phases = Phases(),  # noqa: B008
        *,
        stall_warning_s: float = 60.0,
        stall_limit_s: float | None = None,
        spins: bool = False,
        halves: bool = False,
        arena: Arena | None = None,
        job: Job,
        places: Sequence[int],
        bucket_rule: Callable[[Plan], BucketRule],
        library: Library | None = None,
    ) -> None:
        self._job, self._bucket_rule = job, bucket_rule
        self.comm, self.plan, self.phases = comm, plan, phases
        self.signalled = Signalled()
        self.apart = False
        self._code = 0
        self._roles, self._executors, self._recorder = HostedRoles(machines, make_machine), executors, recorder
        self._regrouping = RankRegrouping(self)
        self._origin = clock_origin(comm, plan.roles[plan.server].world_rank, places)
        self._control = ControlMessages(comm, machines, places)
        self._losses = Losses(comm)
        doorbell, arena = self._control.doorbell, arena or Arena()
        self._work = LongWork(partial(doorbell.ring, comm.rank))
        tags = TensorTags(plan, lambda: self._regrouping.generation)

        def rate_after(samples: int, updates: int) -> float | None:
            return self._roles.machines[plan.server].rate_after(samples, updates)

        self._traffic = TensorTraffic(
            comm,
            plan,
            executors,
            tags,
            arena,
            self._losses,
            halves=halves,
            announce=self.announce,
            post=self._work.post,
            wake=self._control.wake,
            delivered=self._control.delivered.add,
            in_time=self._regrouping.in_time,
            hurries=self.signalled.hurries,
            speculation=speculation_of(job, plan, executors, rate_after) if comm.size == 1 and not halves else None,
        )
        self.states = StateTransfer(comm, plan, partial(tags.tag, channel=STATES))
        self._saver = CheckpointThread(checkpoints, self._work, self.states)
        overlaps = any(plan.traits(role).overlaps for role in machines)  # transfers run in parallel with computation
        post, hurries = None if overlaps else self._work.post, self.signalled.hurries
        rule = bucket_rule(plan)
        self._reductions = Reductions(comm, executors, tags.tag, doorbell, arena, job, rule.auto, post, hurries)
        self._reductions.renew(plan, machines, library)
        if overlaps:
            self._traffic.start_threads()
            self._work.compute_beside()
        self._traffic.use_buckets(rule)
        self._follow_banks()
        self._bursts = self._new_bursts()
        others = (role.world_rank for role in plan.roles if role.world_rank != comm.rank)
        # Messages of neighbours arrive at once, with a ring. Large transfers make progress only if this rank polls.
        near = library is None and arena.neighbours.issuperset(range(comm.size))
        self._idleness = Idleness(
            comm,
            doorbell,
            self._losses,
            Patience(stall_warning_s, stall_limit_s),
            Standstill(comm, plan.roles[plan.statistics].world_rank, STANDSTILL_TAG, self.tell),
            spins=spins,
            shortest_s=200e-6 if doorbell.reaches(others) else 20e-6,
            longest_s=5e-3 if near else 1e-3,
        )

    @property
    def lost(self) -> set[int]:
        """Ranks that have died. After the first death collective calls no longer work."""
        return self._losses.dead

    def look(self) -> bool:
        """Returns whether a rank has died. The roles here must have halted."""
        if self._losses.active:
            self._losses.look()
        return bool(self._losses.dead)

    def stop(self) -> None:
        """Asks the run to stop in order. Signal handlers may call this."""
        self.signalled.stop = True

    def pass_on_stop(self) -> None:
        """Reports a stop request of this rank to the weights' owner, which stops all ranks."""
        if not self.signalled.stop:
            return
        self.signalled.stop = False
        server = self.plan.server
        if server in self._roles.machines:
            self.announce(server, Stopped())
            return
        to = self.plan.roles[server].world_rank
        asked = StopRequested(next(iter(self._roles.machines), server))
        self.tell(encode(asked), to, FIRST_TAG + server * CHANNELS + CONTROL)
        self._control.doorbell.ring(to)

    def run(self) -> int:
        """Drives the roles until all of them have halted.

        Returns:
            The exit code that the roles agreed on: 0, or a code such as `EXIT_STOPPED` if the run was stopped.

        Raises:
            RunError: a role failed, here or (on the statistics server's rank) anywhere.
            Ended: the launcher asked this rank to end.
        """
        idle, signalled = False, self.signalled
        while self._roles.running:
            if signalled.stop or signalled.ended or signalled.urgent is not None:
                self._heed_signals()
            if self._step():
                if idle:
                    self._idleness.end()
                    idle = False
                continue
            idle = True
            now = time.perf_counter()
            for role in self._roles.ticks(now):
                self._handle(role, Tick())
            if self._recorder is not None:
                self._recorder.idle()
            beside = self._work.threaded or self._reductions.driven
            busy = beside or self._work.under_way
            self._idleness.pause(now, self.plan, self._roles.waits, origin=self._origin, busy=busy, beside=beside)
        self._close()
        return self._code

    def _heed_signals(self) -> None:
        signalled = self.signalled
        if signalled.ended:
            raise Ended
        if signalled.urgent is not None:
            urgent, signalled.urgent = signalled.urgent, None
            urgent()
        self.pass_on_stop()

    def _step(self) -> bool:
        """Does one piece of work, or returns False if there is none."""
        bursts = self._bursts
        if self._roles.events:
            role, event = self._roles.events.popleft()
            if bursts is None or not bursts.postpones(role, event):
                self._handle(role, event)
            return True
        if (bursts is not None and bursts.proceed()) or self._poll():
            return True
        if self._control.delivered:
            self._control.ring_delivered()
        if bursts is None:
            return self._advance()
        return self._advance() or (not self._work.works_for(bursts.learners) and bursts.release())

    def _advance(self) -> bool:
        """Does a piece of long work, or returns False if there is none."""
        if (done := self._work.advance()) is None:
            return False
        (role, event), bursts = done, self._bursts
        if isinstance(event, BurstMade | BankDone):
            assert bursts is not None
            bursts.take(event)
        elif event is not None and (bursts is None or not bursts.keeps(role, event)):
            self._handle(role, event)
        return True

    def _handle(self, role: int, event: Event) -> None:
        if role in self._roles.running:
            for action in self._roles.machines[role].handle(event, time.perf_counter() - self._origin):
                self._do(role, action)
            self._control.ring()

    def _poll(self) -> bool:
        """Turns finished requests into events."""
        if self._work.results:
            self._work.take_results()
        if self._reductions.of_groups:
            self._roles.events.extend(self._reductions.poll())
        for role, generation, message in self._control.heard():
            self._regrouping.hear(role, generation, message)
        self._traffic.poll()
        if self.states.busy:
            self.states.poll()
        self._control.poll()
        if self._losses.active:
            self._look_for_losses()
        if self._losses.dead or self.phases.may_change:
            self._regrouping.poll()
        if self._recorder is not None and self.comm.size > 1:
            raise_reported(self.comm)
        return bool(self._roles.events)

    def _look_for_losses(self) -> None:
        """Notifies the roles here of other roles that died."""
        ranks = self._losses.look()
        if ranks:
            self._traffic.lose(ranks)
            self._reductions.lose(ranks)
            self.states.lose(ranks)
            lost = [i for i, role in enumerate(self.plan.roles) if role.world_rank in ranks]
            self._roles.events.extend((role, Lost(other)) for other in lost for role in self._roles.machines)

    # Actions of the roles here.

    def _do(self, role: int, action: Action) -> None:
        match action:  # the frequent ones first
            case Send():
                self._send(role, action)
            case Receive():
                self._traffic.receive(role, action)
            case ExecutorAction():
                if self._bursts is None or not self._bursts.holds(role, action):
                    self._perform(role, action)
            case Record():
                assert self._recorder is not None
                if (decided := self._recorder.record(action)) is not None:
                    self.announce(role, decided)
            case Reduce():
                if self._bursts is None or not self._bursts.reduces(role, action):
                    self._reductions.begin(role, action)
            case CancelReceive():
                self._traffic.withdraw(role, action.buffer)
            case DeclareLost():
                self._traffic.drop(action.role)
                self.announce(role, Lost(action.role))
            case Save():
                self._save(role, action)
            case Commit():
                self._saver.commit(action.timestamp, action.keep, partial(self.announce, role))
            case Reconfigure():
                self._regrouping.regroup(action)
            case Sync():
                assert self._recorder is not None
                self._recorder.sync()
            case StoreEpochWeights():
                assert self._recorder is not None
                self._recorder.keep(role, action)
            case Finish():
                assert self._recorder is not None
                self._recorder.finish(role, action)
            case Warn():
                about = self.plan.roles[role]
                log.warning(f"{about.title}: {action.text}", extra={"role": about.name})
            case Fail():
                failure = RunError(action.text)
                failure.lost = action.lost
                failure.cause = "" if action.cause is None else self.plan.roles[action.cause].title
                raise failure
            case Halt():
                self._roles.running.discard(role)
                self._follow_banks()
                self._code = max(self._code, action.code)
                self.apart |= action.apart

    def _send(self, role: int, action: Send) -> None:
        if action.buffer is not None:
            self._traffic.send(role, action)
            return
        to, generation = self.plan.roles[action.to].world_rank, self._regrouping.generation
        if to == self.comm.rank:
            self._control.tell_here(action.to, generation, action.message)
            return
        data = encode(action.message, generation)
        self.tell(data, to, FIRST_TAG + action.to * CHANNELS + CONTROL)
        if action.message.kind in URGENT:
            self._control.doorbell.ring(to)

    def _perform(self, role: int, action: ExecutorAction) -> None:
        """Does short work at once, and long work in pieces or in another thread."""
        executor = self._executors[role]
        if isinstance(action, COMPUTATIONS):  # in this thread only
            executor.make_room(action)
        if isinstance(action, Compute | BackpropFirstStage) and isinstance(executor, LearnerExecutor):
            executor.ready = self._reductions.expect(role, action) or self._traffic.expect(role, action.gradient)
        work = executor.attempt(action)
        if action.long:
            self._work.begin(role, work, self._regrouping.in_time(partial(self.announce, role)))
        else:
            self._roles.events.extend((role, event) for event in self._work.do_now(role, work))

    def _save(self, role: int, action: Save) -> None:
        """Sends a role's state for a checkpoint to the owner of the weights, which writes the checkpoint."""
        state = self._executors[role].state(alone=action.alone)
        if role == self.plan.server:
            self._saver.save(action, state, partial(self.announce, role))
        else:
            self.states.give(role, action.position.timestamp, state)

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a small message to a rank."""
        self._control.tell(data, to, tag)

    def announce(self, role: int, event: Event) -> None:
        """Appends an event for a role of this rank to the queue."""
        self._roles.events.append((role, event))

    def _follow_banks(self) -> None:
        """Lets the bank of this rank wait only for learners that take part."""
        learners = {role: each for role, each in self._executors.items() if isinstance(each, LearnerExecutor)}
        active = self._roles.running.intersection(self.plan.learners)
        running = [each for role, each in learners.items() if role in active]
        for learner in learners.values():
            if learner.bank is not None:
                learner.bank.follow(running)

    def _new_bursts(self) -> Bursts | None:
        """Returns the bursts of this rank. None: its roles are asked for each step."""
        hands = DriverHands(
            self._roles.machines,
            self._do,
            self._perform,
            self._handle,
            self._work.begin_here,
            self._roles.events,
            lambda: time.perf_counter() - self._origin,
            self._reductions,
        )
        return bursts_of_rank(self._job, self.plan, self._executors, hands, buckets=self._reductions.buckets)

    # Regrouping by another plan (`rudra.mpi.regroup`).

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Follows another plan from a position: drops pending events, transfers and work of roles that regroup."""
        self.plan = plan
        self.states.follow(plan)
        roles = self._roles.running - {plan.statistics}
        self._traffic.abandon(plan, roles)
        self._reductions.abandon()
        if self._bursts is not None:
            self._bursts.abandon()
        self._bursts = None
        self._work.drop(roles)
        self._roles.abandon(plan, position)

    @property
    def quiet(self) -> bool:
        """Returns whether nothing that was abandoned can write into a buffer any more."""
        return self._traffic.quiet and self._reductions.quiet

    def regroup(self, position: TrainingState) -> None:
        """Creates the roles again, for training that continues from a position."""
        self._follow_banks()
        self._reductions.renew(self.plan, self._roles.running)
        self._traffic.use_buckets(self._bucket_rule(self.plan))
        self._roles.restart(self.plan, position, self.lost)
        self._bursts = self._new_bursts()

    def _close(self) -> None:
        """Completes sends and cancels receives. All sends are delivered, because every role has reported its end."""
        self._control.flush(self._losses)
        self._traffic.close()
        self._work.close()
        self._saver.close()
        self._reductions.close()
        self._control.close(self._losses)
