"""The MPI driver: roles on real ranks.

One thread per rank owns its roles, polls for messages and carries out actions; what is local executors do. A learner's
gradient is computed in that thread where nobody needs the rank meanwhile, and else beside it, as are its transfers
(`rudra.mpi.comm_threads`). Only buffer-mode calls are on the training path: a control message is one small eager send,
a tensor one transfer from its own buffer into the receiver's. Where ranks share cores, a waiting rank sleeps until a
neighbour rings (`rudra.mpi.doorbell`): the core belongs to whoever computes. A rank with a core to itself spins for a
while before it sleeps. Neighbours read tensors where they lie (`rudra.mpi.arena`), and MPI carries their places.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.core.events import (
    COMPUTATIONS,
    Action,
    CancelReceive,
    Commit,
    DeclareLost,
    Event,
    ExecutorAction,
    Fail,
    Finish,
    Halt,
    Lost,
    Receive,
    Reconfigure,
    Record,
    Reduce,
    Save,
    Send,
    Started,
    Stopped,
    StoreEpochWeights,
    Sync,
    Tick,
    Warn,
)
from rudra.core.messages import URGENT, StopRequested
from rudra.core.phases import Phases
from rudra.core.training_state import TrainingState
from rudra.core.wire import encode
from rudra.errors import RunError
from rudra.log import log
from rudra.mpi.arena import Arena
from rudra.mpi.checkpoint_thread import CheckpointThread
from rudra.mpi.clock import clock_origin
from rudra.mpi.control_messages import ControlMessages
from rudra.mpi.failures import Losses
from rudra.mpi.idleness import Idleness
from rudra.mpi.long_work import LongWork
from rudra.mpi.patience import Patience
from rudra.mpi.reduction import library_comm
from rudra.mpi.reductions import Reductions
from rudra.mpi.regroup import RankRegrouping
from rudra.mpi.standstill import Standstill
from rudra.mpi.states import StateTransfer
from rudra.mpi.tags import CHANNELS, CONTROL, FAILURE_TAG, FIRST_TAG, STANDSTILL_TAG, STATES
from rudra.mpi.tensor_traffic import TensorTags, TensorTraffic
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.recorder import Recorder
from rudra.roles import Machine
from rudra.roles.ledger import outlasts
from topologies import Plan

SPIN_S = 20e-3
"""How long a rank that has a core to itself polls before it sleeps: falling asleep and waking up costs more than
a small message, and the core's caches and clock rate besides."""

Make = Callable[[int, Plan, TrainingState], Machine]
"""Makes a role's machine for a new beginning, and its executor ready."""


class Ended(Exception):
    """The launcher told this rank to end."""


@dataclass(slots=True)
class Signalled:
    """What handlers of signals want of a rank.

    Attributes:
        stop: it is to ask the run to end in order.
        urgent: to be done as soon as possible; None: nothing.
        ended: the launcher is ending it.
    """

    stop: bool = False
    urgent: Callable[[], None] | None = None
    ended: bool = False


class HostedRoles:
    """The roles of a rank.

    Args:
        machines: by role.
        make: makes a machine anew; None: no role begins anew.

    Attributes:
        machines: as given; others after the rank has regrouped.
        running: roles that have not halted.
    """

    def __init__(self, machines: dict[int, Machine], make: Make | None) -> None:
        self.machines, self.running = machines, set(machines)
        self._make = make
        self._ticked = dict.fromkeys(machines, 0.0)

    def ticks(self, now: float) -> Iterator[int]:
        """Gives the roles that are to hear that time has passed."""
        for role in list(self.running):
            tick_s = self.machines[role].tick_s
            if tick_s is not None and now - self._ticked[role] >= tick_s:
                self._ticked[role] = now
                yield role

    def waits(self) -> Mapping[int, str]:
        """What each role that runs waits for."""
        return {role: self.machines[role].waiting_for for role in self.running}

    def remake(self, role: int, plan: Plan, position: TrainingState) -> None:
        """Makes the machine of a role again, for training that goes on from there by another plan."""
        assert self._make is not None
        before, self.machines[role] = self.machines[role], self._make(role, plan, position)
        self.machines[role].inherit(before)


class Rank:
    """The roles of one rank, driven until they halt. All ranks make theirs together.

    Args:
        comm: of all ranks of the job.
        plan: who is who at first.
        machines: the roles that live here, by id.
        executors: what they work with.
        recorder: where the statistics server's rows go; None elsewhere.
        checkpoints: writes those of the weights' owner; None elsewhere.
        make_machine: as `Make`.
        phases: of the run.
        stall_warning_s: a wait that is longer is reported.
        stall_limit_s: a wait that is longer ends the run; None: never.
        spins: a rank that waits may keep its core busy for a while; wrong where another rank computes on it.
        halves: gradients travel as float16.
        arena: memory that neighbours read, in which the executors' buffers are.

    Attributes:
        comm: of all ranks.
        phases: of the run.
        plan: who is who.
        signalled: what handlers of signals want; they may set it at any time.
        apart: some rank may never end by itself.
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
        phases: Phases = (),
        *,
        stall_warning_s: float = 60.0,
        stall_limit_s: float | None = None,
        spins: bool = False,
        halves: bool = False,
        arena: Arena | None = None,
    ) -> None:
        self.comm, self.plan, self.phases = comm, plan, phases
        self.signalled = Signalled()
        self.apart = False
        self._code = 0
        self._roles, self._executors, self._recorder = HostedRoles(machines, make_machine), executors, recorder
        self._regrouping = RankRegrouping(self)
        self._events: deque[tuple[int, Event]] = deque((role, Started()) for role in machines)
        self._origin = clock_origin(comm, plan.roles[plan.server].world_rank)
        self._control = ControlMessages(comm, machines)
        self._losses = Losses(comm)
        doorbell, arena = self._control.doorbell, arena or Arena()
        self._work = LongWork(partial(doorbell.ring, comm.rank))
        tags = TensorTags(plan, lambda: self._regrouping.generation)
        self._traffic = TensorTraffic(
            comm,
            plan,
            executors,
            tags,
            arena,
            self._losses,
            halves=halves,
            announce=self.announce,
            wake=self._control.wake,
            in_time=self._regrouping.in_time,
        )
        self._state_tag = partial(tags.tag, channel=STATES)
        self._saver = CheckpointThread(checkpoints, self._work, StateTransfer(comm, plan, self._state_tag))
        library = library_comm(comm, plan, machines)
        self._reductions = Reductions(comm, executors, tags.tag, doorbell, arena)
        self._reductions.renew(plan, machines, library)
        if any(plan.traits(role).overlaps for role in machines):  # transfers and computing go on beside each other
            self._traffic.start_threads(self._work.post, self._losses.wait)
            self._work.compute_beside()
        others = (role.world_rank for role in plan.roles if role.world_rank != comm.rank)
        # What neighbours send comes at once, and they ring; large transfers need somebody who looks after them.
        near = library is None and arena.neighbours.issuperset(range(comm.size))
        self._idleness = Idleness(
            comm,
            doorbell,
            self._losses,
            Patience(stall_warning_s, stall_limit_s),
            Standstill(comm, plan.roles[plan.statistics].world_rank, STANDSTILL_TAG, self.tell),
            spin_s=SPIN_S if spins else 0.0,
            shortest_s=200e-6 if doorbell.reaches(others) else 20e-6,
            longest_s=5e-3 if near else 1e-3,
        )

    @property
    def lost(self) -> set[int]:
        """Ranks that have died: with any of them, nothing collective works any more."""
        return self._losses.dead

    @property
    def states(self) -> StateTransfer:
        """What roles keep that a checkpoint needs, on its way."""
        return self._saver.states

    def look(self) -> bool:
        """Looks, once the roles here have halted, whether a rank has died."""
        if self._losses.active:
            self._losses.look()
        return bool(self._losses.dead)

    def stop(self) -> None:
        """Asks the run to end in order; signal handlers may call this."""
        self.signalled.stop = True

    def pass_on_stop(self) -> None:
        """Tells the weights' owner, wherever it lives, if this rank was asked to stop: it stops everybody."""
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
        """Serves until every role here has halted.

        Returns:
            The exit code that the roles agreed on: 0, or `EXIT_STOPPED` and the like of a run that was stopped.

        Raises:
            RunError: a role failed, here or (on the statistics server's rank) anywhere.
            Ended: the launcher told this rank to end.
        """
        while self._roles.running:
            self._heed_signals()
            if self._step():
                self._idleness.end()
                continue
            now = time.perf_counter()
            for role in self._roles.ticks(now):
                self._handle(role, Tick())
            if self._recorder is not None:
                self._recorder.idle()
            busy = bool(self._work.beside)
            self._idleness.pause(now, self.plan, self._roles.waits, origin=self._origin, busy=busy)
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
        """Does one piece of work; False if there was none."""
        if self._events:
            role, event = self._events.popleft()
            self._handle(role, event)
        elif not (self._poll() or self._go_on()):
            return False
        return True

    def _go_on(self) -> bool:
        """Does a piece of long work; False if there is none."""
        if (done := self._work.go_on()) is None:
            return False
        role, event = done
        if event is not None:
            self._handle(role, event)
        return True

    def _handle(self, role: int, event: Event) -> None:
        if role in self._roles.running:
            for action in self._roles.machines[role].handle(event, time.perf_counter() - self._origin):
                self._do(role, action)
            self._control.ring()

    def _poll(self) -> bool:
        """Turns finished requests into events."""
        self._work.take_results()
        self._events.extend(self._reductions.poll())
        for role, generation, message in self._control.heard():
            self._regrouping.hear(role, generation, message)
        self._traffic.poll()
        if self.states.busy:
            self.states.poll()
        self._control.poll()
        if self._losses.active:
            self._look_for_losses()
        if self._losses.dead or len(self.phases) > 1:
            self._regrouping.poll()
        if self._recorder is not None:
            self._look_for_failures()
        return bool(self._events)

    def _look_for_losses(self) -> None:
        """Tells the roles here which others are no more."""
        ranks = self._losses.look()
        if ranks:
            self._traffic.lose(ranks)
            self.states.lose(ranks)
            lost = [i for i, role in enumerate(self.plan.roles) if role.world_rank in ranks]
            self._events.extend((role, Lost(other)) for other in lost for role in self._roles.machines)

    def _look_for_failures(self) -> None:
        status = MPI.Status()
        try:
            reported = self.comm.Iprobe(MPI.ANY_SOURCE, FAILURE_TAG, status)
        except MPI.Exception:  # a loss that is not acknowledged yet
            return
        if reported:
            text = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv(text, status.Get_source(), FAILURE_TAG)
            raise Reported(text.decode(errors="replace"))

    # Actions of the roles here.

    def _do(self, role: int, action: Action) -> None:
        match action:
            case Send():
                self._send(role, action)
            case Receive():
                self._traffic.receive(role, action)
            case ExecutorAction():
                self._perform(role, action)
            case Reduce():
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
            case Record():
                assert self._recorder is not None
                self._recorder.record(action)
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
                raise failure
            case Halt():
                self._roles.running.discard(role)
                self._code = max(self._code, action.code)
                self.apart |= action.apart

    def _send(self, role: int, action: Send) -> None:
        if action.buffer is not None:
            self._traffic.send(role, action)
            return
        to = self.plan.roles[action.to].world_rank
        data = encode(action.message, self._regrouping.generation)
        self.tell(data, to, FIRST_TAG + action.to * CHANNELS + CONTROL)
        if action.message.kind in URGENT:
            self._control.doorbell.ring(to)

    def _perform(self, role: int, action: ExecutorAction) -> None:
        """Short work at once, long work between other things, or beside them."""
        executor = self._executors[role]
        if isinstance(action, COMPUTATIONS):  # here, and not in another thread
            for field in action.changes:
                executor.renew(getattr(action, field))
        work = executor.perform(action)
        if action.long:
            self._work.begin(role, work, self._regrouping.in_time(partial(self.announce, role)))
        else:
            self._events.extend((role, event) for event in work if event is not None)

    def _save(self, role: int, action: Save) -> None:
        """Brings what all keep that a checkpoint needs to the owner of the weights, who writes it."""
        state = self._executors[role].state(alone=action.alone)
        if role == self.plan.server:
            self._saver.save(action, state, partial(self.announce, role))
        else:
            self.states.give(role, state)

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a rank something small."""
        self._control.tell(data, to, tag)

    def announce(self, role: int, event: Event) -> None:
        """Lets a role here know of something, in its turn."""
        self._events.append((role, event))

    # Regrouping by another plan (`rudra.mpi.regroup`).

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Follows another plan, from a position: forgets what is under way between those who regroup by it."""
        self.plan = plan
        self._saver.states = StateTransfer(self.comm, plan, self._state_tag)
        roles = self._roles.running - {plan.statistics}
        self._traffic.abandon(plan, roles)
        self._reductions.abandon()
        self._work.drop(roles)

        if plan.stage in roles:  # which goes on with what others have in its log
            self._roles.remake(plan.stage, plan, position)

        def counts(role: int, event: Event) -> bool:
            return role not in roles or (role in plan.owners and outlasts(event, plan.statistics))

        self._events = deque((role, event) for role, event in self._events if counts(role, event))

    @property
    def quiet(self) -> bool:
        """Whether nothing that was abandoned can write into a buffer any more."""
        return self._traffic.quiet and self._reductions.quiet

    def regroup(self, position: TrainingState) -> None:
        """Makes the roles again, for training that goes on from there."""
        plan, running = self.plan, self._roles.running
        unknown = [i for i, role in enumerate(plan.roles) if role.world_rank in self.lost and i not in plan.gone]
        self._reductions.renew(plan, running)
        for role in sorted(running - {plan.statistics}):
            self.announce(role, Started())
            if role not in (plan.server, plan.stage):  # who have the plan already
                self._roles.remake(role, plan, position)
            if role != plan.server:  # which knows who is dead
                self._events.extend((role, Lost(other)) for other in unknown)

    def _close(self) -> None:
        """Leaves nothing posted; what was sent is delivered, because every role has said that it is done."""
        self._control.flush(self._losses)
        self._traffic.close()
        self._work.close()
        self._saver.close()
        self._reductions.close()
        self._control.close(self._losses)


class Reported(RunError):
    """A failure on another rank: exit code, whether a rank was lost, and complete text, as that rank sent them."""

    def __init__(self, report: str) -> None:
        code, lost, self.text = report.split(" ", 2)
        super().__init__(self.text)
        self.exit_code, self.lost = int(code), lost == "1"
