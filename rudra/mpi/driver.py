"""The MPI driver: roles on real ranks.

One thread per rank owns its roles, polls for messages and carries out actions; what is local executors do. A learner's
gradient is computed in that thread where nobody needs the rank meanwhile, and else beside it, as are its transfers
(`rudra.mpi.comm_threads`). Only buffer-mode calls are on the training path: a control message is one small eager send,
a tensor one transfer from its own buffer into the receiver's. Where ranks share cores, a waiting rank sleeps until a
neighbour rings (`rudra.mpi.doorbell`): the core belongs to whoever computes. A rank with a core to itself spins for a
while before it sleeps. Neighbours read tensors where they lie (`rudra.mpi.arena`), and MPI carries their places.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from mpi4py import MPI

from rudra.compute.executor import Executor, arithmetic_of_thread
from rudra.compute.parts import joined
from rudra.core.events import (
    COMPUTATIONS,
    GRADIENT,
    Action,
    CancelReceive,
    Commit,
    Committed,
    DeclareLost,
    Event,
    ExecutorAction,
    Fail,
    Finish,
    Halt,
    Lost,
    Receive,
    ReceiveCancelled,
    Received,
    Reconfigure,
    Record,
    Reduce,
    Save,
    Saved,
    Send,
    Sent,
    Started,
    Stopped,
    StoreEpochWeights,
    Sync,
    Tick,
    Warn,
)
from rudra.core.layout import NamedVectors
from rudra.core.messages import GRADIENTS as GRADIENT_KINDS
from rudra.core.messages import URGENT, GradientPart, Message, StopRequested, WeightsPart
from rudra.core.phases import Phases
from rudra.core.training_state import TrainingState
from rudra.errors import RunError
from rudra.log import log
from rudra.mpi.arena import Arena
from rudra.mpi.clock import clock_origin
from rudra.mpi.comm_threads import CommThread, WorkerThread
from rudra.mpi.control import ControlRing
from rudra.mpi.doorbell import Doorbell
from rudra.mpi.failures import SPEAKS_S, Losses, named_ranks, outcome, stopped_neighbours
from rudra.mpi.leases import Going
from rudra.mpi.patience import Patience
from rudra.mpi.reduction import GroupReduction, library_comm, make_reduction
from rudra.mpi.regroup import RankRegrouping
from rudra.mpi.standstill import LEFT_S, Standstill
from rudra.mpi.states import StateTransfer
from rudra.mpi.tags import (
    AVERAGES,
    CHANNELS,
    CONTROL,
    FAILURE_TAG,
    FIRST_TAG,
    GRADIENTS,
    REDUCTIONS,
    STANDSTILL_TAG,
    STATES,
    WEIGHTS,
)
from rudra.mpi.transfers import Transfers, Wanted
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.recorder import Recorder
from rudra.roles import Machine
from rudra.roles.ledger import outlasts
from rudra.roles.machine import listed
from topologies import Plan
from topologies.kinds import EVERYBODY

SPIN_S = 20e-3
"""How long a rank that has a core to itself polls before it sleeps: falling asleep and waking up costs more than
a small message, and the core's caches and clock rate besides."""


ALONE_S = 5.0
"""How long a rank waits when both are dead that could end the run: the last that they said may still come."""

GENERATIONS = 3
"""Of one tensor, at most, in place of copies: one that is made, and others that are still read."""


class Ended(Exception):
    """The launcher told this rank to end."""


class Rank:
    """The roles of one rank, driven until they halt. All ranks make theirs together.

    Args:
        comm: of all ranks of the job.
        plan: who is who at first.
        machines: the roles that live here, by id.
        executors: what they work with.
        recorder: where the statistics server's rows go; None elsewhere.
        checkpoints: writes those of the weights' owner; None elsewhere.
        make_machine: makes a role's machine for a new beginning, and its executor ready.
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
        states: what roles keep that a checkpoint needs, on its way.
        apart: some rank may never end by itself.
        urgent: for a signal's handler: to be done as soon as possible.
        ended: set when the launcher is ending this rank.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        machines: dict[int, Machine],
        executors: dict[int, Executor],
        recorder: Recorder | None,
        checkpoints: CheckpointWriter | None = None,
        make_machine: Callable[[int, Plan, TrainingState], Machine] | None = None,
        phases: Phases = (),
        *,
        stall_warning_s: float = 60.0,
        stall_limit_s: float | None = None,
        spins: bool = False,
        halves: bool = False,
        arena: Arena | None = None,
    ) -> None:
        self.comm, self.plan, self.phases = comm, plan, phases
        self._machines, self._executors, self._recorder = machines, executors, recorder
        self._regrouping = RankRegrouping(self)
        self._make_machine = make_machine
        self._checkpoints = checkpoints
        self._saver: WorkerThread | None = None  # the thread that writes them
        self._origin = clock_origin(comm, plan.roles[plan.server].world_rank)
        self._doorbell = doorbell = make_doorbell(comm)
        self._to_ring: set[int] = set()
        others = (role.world_rank for role in plan.roles if role.world_rank != comm.rank)
        self._shortest_s = 200e-6 if doorbell.reaches(others) else 20e-6
        self._patience = Patience(stall_warning_s, stall_limit_s)
        self._spin_s = SPIN_S if spins else 0.0
        self._halves = halves
        self._rings = {role: ControlRing(comm, role) for role in machines}
        self._losses = losses = Losses(comm)
        statistics = plan.roles[plan.statistics].world_rank
        self._standstill = Standstill(comm, statistics, STANDSTILL_TAG, self.tell)
        self._beside = 0  # computations and checkpoints under way in other threads
        hosted: dict[int, list[int]] = {}
        for id_, role in enumerate(plan.roles):
            hosted.setdefault(role.world_rank, []).append(id_)
        self._places = {id_: place for roles in hosted.values() for place, id_ in enumerate(roles)}  # of roles on ranks
        self._most = max(map(len, hosted.values()))
        self._arena = arena or Arena()
        self._transfers = Transfers(comm, losses, executors, self._received, self._sent, self._arena)
        self.states = self._new_states()
        self._sending: deque[tuple[MPI.Request, bytes]] = deque()
        self._events: deque[tuple[int, Event]] = deque((role, Started()) for role in machines)
        self._long: deque[tuple[int, Iterator[Event | None]]] = deque()  # local actions, a piece of each in turn
        self._results: deque[Callable[[], None]] = deque()  # of other threads
        self._comm_threads: dict[int, CommThread] = {}
        self._computer: WorkerThread | None = None
        self._writing: set[int] = set()  # communication threads that may still write what was abandoned
        library = library_comm(comm, plan, machines)
        # What neighbours send comes at once, and they ring; large transfers need somebody who looks after them.
        near = library is None and self._arena.neighbours.issuperset(range(comm.size))
        self._longest_s = 5e-3 if near else 1e-3
        self._reductions = self._new_reductions(machines, library)  # by compute group
        if any(plan.traits(role).overlaps for role in machines):
            self._start_threads()
        self._running = set(machines)
        self._code = 0
        self._stop_asked = False
        self._ticked = dict.fromkeys(machines, 0.0)
        self.apart = False
        self.urgent: Callable[[], None] | None = None
        self.ended = False

    @property
    def lost(self) -> set[int]:
        """Ranks that have died: with any of them, nothing collective works any more."""
        return self._losses.dead

    def look(self) -> bool:
        """Looks, once the roles here have halted, whether a rank has died."""
        if self._losses.active:
            self._losses.look()
        return bool(self._losses.dead)

    def stop(self) -> None:
        """Asks the run to end in order; signal handlers may call this."""
        self._stop_asked = True

    def pass_on_stop(self) -> None:
        """Tells the weights' owner, wherever it lives, if this rank was asked to stop: it stops everybody."""
        if not self._stop_asked:
            return
        self._stop_asked = False
        server = self.plan.server
        if server in self._machines:
            self._events.append((server, Stopped()))
            return
        to = self.plan.roles[server].world_rank
        asked = StopRequested(next(iter(self._machines), server))
        self.tell(asked.encode(), to, FIRST_TAG + server * CHANNELS + CONTROL)
        self._doorbell.ring(to)

    def run(self) -> int:
        """Serves until every role here has halted.

        Returns:
            The exit code that the roles agreed on: 0, or `EXIT_STOPPED` and the like of a run that was stopped.

        Raises:
            RunError: a role failed, here or (on the statistics server's rank) anywhere.
            Ended: the launcher told this rank to end.
        """
        idle_since: float | None = None
        while self._running:
            if self.ended:
                raise Ended
            if self.urgent is not None:
                urgent, self.urgent = self.urgent, None
                urgent()
            self.pass_on_stop()
            if self._step():
                idle_since = None
                self._patience.begin()
                continue
            now = time.perf_counter()
            idle_since = now if idle_since is None else idle_since
            waited = now - idle_since
            self._tick(now)
            if due := self._patience.due(waited):
                self._report_wait(waited, ends=due == "end")
            if waited >= ALONE_S and self._losses.dead:
                self._go_on_alone()
            if waited >= LEFT_S and self._losses.dead and not self._beside:
                self._stand_still()
            if self._recorder is not None:
                self._recorder.idle()
            if waited >= self._spin_s:
                self._doorbell.wait(min(self._longest_s, max(self._shortest_s, waited / 8)))
        self._close()
        return self._code

    def _tick(self, now: float) -> None:
        for role in list(self._running):
            tick_s = self._machines[role].tick_s
            if tick_s is not None and now - self._ticked[role] >= tick_s:
                self._ticked[role] = now
                self._handle(role, Tick())

    def _step(self) -> bool:
        """Does one piece of work; False if there was none."""
        if self._events:
            role, event = self._events.popleft()
            self._handle(role, event)
        elif not (self._poll() or self._go_on()):
            return False
        return True

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _handle(self, role: int, event: Event) -> None:
        if role in self._running:
            for action in self._machines[role].handle(event, self._now()):
                self._do(role, action)
            while self._to_ring:
                self._doorbell.ring(self._to_ring.pop())

    def _poll(self) -> bool:
        """Turns finished requests into events."""
        while self._results:
            self._results.popleft()()
        for reduction in self._reductions.values():
            if reduction.busy and (event := reduction.test()) is not None:
                self._events.extend((role, event) for role in reduction.roles)
        for role, ring in self._rings.items():
            while (found := ring.take()) is not None:
                self._regrouping.hear(role, *found)
        self._transfers.poll()
        if self.states.busy:
            self.states.poll()
        while self._sending and outcome(self._sending[0][0]) != "no":
            self._sending.popleft()
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
            self._transfers.lose(ranks)
            self.states.lose(ranks)
            lost = [i for i, role in enumerate(self.plan.roles) if role.world_rank in ranks]
            self._events.extend((role, Lost(other)) for other in lost for role in self._machines)

    def _new_reductions(self, roles: Collection[int], library: MPI.Comm | None = None) -> dict[int, GroupReduction]:
        """This rank's part in those of the groups of these roles, and in that of all learners where groups average."""
        plan, made = self.plan, dict[int, GroupReduction]()
        for role in roles:
            for group in (plan.roles[role].group, *((EVERYBODY,) if plan.sharing != "nothing" else ())):
                if group is None or group in made or not plan.traits(role).trains:
                    continue
                members, channel = plan.together(role, group), AVERAGES if group == EVERYBODY else REDUCTIONS
                tag, size = self._tag(members[0], channel), self._executors[role].size
                made[group] = make_reduction(self.comm, plan, members, tag, size, self._doorbell, library, self._arena)
        return made

    def _new_states(self) -> StateTransfer:
        return StateTransfer(self.comm, self.plan, partial(self._tag, channel=STATES))

    def _tag(self, role: int, channel: int, place: int = 0) -> int:
        """Of tensors for a role, which are never taken for those of before, from one in that place on its rank."""
        generation = 0 if role == self.plan.statistics else self._regrouping.generation
        return FIRST_TAG + ((generation * len(self.plan.roles) + role) * self._most + place) * CHANNELS + channel

    def _sent(self, going: Going) -> None:
        self._executors[going.role].sent(going.name)
        self._events.append((going.role, Sent(going.name, going.to)))

    def _received(self, wanted: Wanted, message: Message | None = None) -> None:
        role, name = wanted.role, wanted.name
        buffer = self._executors[role].buffer(name)
        if wanted.part_of is not None:
            buffer.version += 1
            gradient = name.startswith(GRADIENT)
            message = (GradientPart if gradient else WeightsPart)(wanted.part_of)
        elif message is None:
            message = buffer.read_half() if wanted.halves else buffer.read()
        self._to_ring.add(self.plan.roles[message.sender].world_rank)  # its send is complete now
        self._events.append((role, Received(message, name)))

    def _post(self, result: Callable[[], None]) -> None:
        """Lets another thread's result in."""
        self._results.append(result)
        self._doorbell.ring(self.comm.rank)

    def _do_beside(self, thread: WorkerThread, work: Callable[[], Event], done: Callable[[Event], None]) -> None:
        """Has another thread do something, and takes in what has come of it."""

        def take(event: Event) -> None:
            self._beside -= 1
            done(event)

        self._beside += 1
        thread.submit(lambda: self._post(partial(take, work())))

    def _perform(self, role: int, action: ExecutorAction) -> None:
        """Short work at once, long work between other things, or beside them."""
        if isinstance(action, COMPUTATIONS):  # here, and not in another thread
            for field in action.changes:
                self._executors[role].renew(getattr(action, field))
        work = self._executors[role].perform(action)
        if not action.long:
            self._events.extend((role, event) for event in work if event is not None)
        elif self._computer is None:
            self._long.append((role, work))
        else:
            done = self._regrouping.in_time(lambda event: self._events.append((role, event)))
            self._do_beside(self._computer, lambda: next(event for event in work if event is not None), done)

    def _go_on(self) -> bool:
        """Does a piece of long work; False if there is none."""
        if not self._long:
            return False
        role, work = self._long.popleft()
        if (event := next(work)) is None:
            self._long.append((role, work))
        else:
            self._handle(role, event)
        return True

    def _do(self, role: int, action: Action) -> None:
        match action:
            case Send():
                self._send(role, action)
            case Receive():
                self._receive(role, action)
            case ExecutorAction():
                self._perform(role, action)
            case Reduce():
                self._reductions[action.group].begin(role, action, self._executors[role])
            case CancelReceive():
                self._withdraw(role, action.buffer)
            case DeclareLost():
                self._transfers.drop(action.role, self.plan.roles[action.role].world_rank)
                self._events.append((role, Lost(action.role)))
            case Save():
                self._save(role, action)
            case Commit():
                self._checkpoint(role, Committed, action.timestamp, action.keep)
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
                log.warning(f"{self._who(role)}: {action.text}", extra={"role": self.plan.roles[role].name})
            case Fail():
                failure = RunError(action.text)
                failure.lost = action.lost
                raise failure
            case Halt():
                self._running.discard(role)
                self._code = max(self._code, action.code)
                self.apart |= action.apart

    def tell(self, data: bytes, to: int, tag: int) -> None:
        """Sends a rank something small."""
        self._sending.append((self.comm.Isend(data, to, tag), data))
        self._to_ring.add(to)

    def _send(self, role: int, action: Send) -> None:
        to = self.plan.roles[action.to].world_rank
        if action.buffer is None:
            data = action.message.encode(self._regrouping.generation)
            self.tell(data, to, FIRST_TAG + action.to * CHANNELS + CONTROL)
            if action.message.kind in URGENT:
                self._doorbell.ring(to)
            return
        self._to_ring.add(to)
        channel = GRADIENTS if action.message.kind in GRADIENT_KINDS else WEIGHTS
        halves = self._halves and channel == GRADIENTS
        going = Going(role, action.buffer, action.to)
        tag = self._tag(action.to, channel, self._places[role])
        if to in self._arena.neighbours:
            most = GENERATIONS - 1 - self.plan.traits(role).overlaps
            self._transfers.lend(going, action.message, to, tag, halves=halves, most=most)
            return
        wire = self._executors[role].send(action.buffer, action.message, action.to, halves=halves)
        start = partial(self.comm.Isend, wire, to, tag)
        if channel in self._comm_threads:
            self._comm_threads[channel].carry(start, self._regrouping.in_time(partial(self._sent, going)))
        else:
            self._transfers.send(start(), going)

    def _receive(self, role: int, action: Receive) -> None:
        halves = self._halves and action.gradient
        source = None if action.source is None else self.plan.roles[action.source].world_rank
        channel = GRADIENTS if action.gradient else WEIGHTS
        places = range(self._most) if action.source is None else [self._places[action.source]]
        tag, *or_tags = (self._tag(role, channel, place) for place in places)
        wanted = Wanted(role, action.buffer, source, tag, halves, or_tags)
        self._look_near(wanted)
        if channel in self._comm_threads and not wanted.near:
            assert source is not None
            wire = self._executors[role].buffer(action.buffer).wire
            start = partial(self.comm.Irecv, wire, source, tag)
            received = self._regrouping.in_time(partial(self._received, wanted))
            self._comm_threads[channel].carry(start, received, receives=True)
            return
        if action.source is not None:
            plan = self.plan
            if plan.in_parts(role, action.source) or plan.in_parts(action.source, role):
                wanted.part_of = action.source
        self._transfers.receive(wanted)

    def _look_near(self, wanted: Wanted) -> None:
        """Whether neighbours alone may send what is wanted, and whether it is read in their memory.

        Gradients are, and so are weights by who computes with them as they are until newer ones have come, and hands
        them on to nobody meanwhile.
        """
        if not (neighbours := self._arena.neighbours):
            return
        role, source = wanted.role, wanted.source
        sources = {source} if source is not None else {self.plan.roles[i].world_rank for i in self.plan.children[role]}
        wanted.near = sources <= neighbours
        gradient = wanted.tag % CHANNELS == (FIRST_TAG + GRADIENTS) % CHANNELS
        keeps = self.plan.traits(role).overlaps and not self.plan.receivers[role]
        wanted.reads = not wanted.halves if gradient else keeps and self._executors[role].computes_in_place

    def _withdraw(self, role: int, buffer: str) -> None:
        """Takes a receive back, unless something is coming already, which then arrives as ever."""
        if self._transfers.withdraw(role, buffer):
            self._events.append((role, ReceiveCancelled(buffer)))

    def _save(self, role: int, action: Save) -> None:
        """Brings what all keep that a checkpoint needs to the owner of the weights, who writes it."""
        state = self._executors[role].state(alone=action.alone)
        if role != self.plan.server:
            self.states.give(role, state)
            return

        def write(others: list[NamedVectors] | None) -> None:
            if others is not None:
                self._checkpoint(role, Saved, action.position, [state, *others])
            else:
                self._events.append((role, Saved(action.position.timestamp, "a rank died")))

        if action.alone:
            write([])
        else:
            self.states.gather(write)

    def _checkpoint(self, role: int, event: type[Saved] | type[Committed], *what: Any) -> None:
        """Lets the thread for checkpoints do one of its two steps; the disk may be slow."""
        writer = self._checkpoints
        assert writer is not None

        def work() -> Event:
            error = ""
            try:
                if event is Saved:
                    position, states = what
                    writer.save(position, joined(states))
                else:
                    writer.commit(*what[1:])
            except OSError as problem:
                error = f"{writer.path}: {problem.strerror or problem}"
            timestamp = what[0].timestamp if event is Saved else what[0]
            return event(timestamp, error)

        self._saver = self._saver or WorkerThread("checkpoint", self._post)
        self._do_beside(self._saver, work, lambda event: self._events.append((role, event)))

    def _who(self, role: int) -> str:
        return self.plan.roles[role].title

    def _report_wait(self, waited: float, *, ends: bool) -> None:
        for role in self._running:
            line = f"has waited {waited:.0f} s for {self._machines[role].waiting_for}"
            if ends:
                stopped = named_ranks(stopped_neighbours(self.comm.size))
                raise RunError(f"{line}; stopped by a signal: {stopped}" if stopped else line)
            log.warning(f"{self._who(role)} {line}", extra={"role": self.plan.roles[role].name})

    def _stand_still(self) -> None:
        """Ends the run if all others that are left wait, too."""
        waits = [f"{self._who(role)} for {self._machines[role].waiting_for}" for role in sorted(self._running)]
        others = {role.world_rank for role in self.plan.roles} - self._losses.dead - {self.comm.rank}
        if all_wait := self._standstill.wait(", ".join(waits), others, self._now()):
            failure = RunError(
                f"a rank has died, and for {LEFT_S:.0f} s all that are left have waited: {listed(all_wait)}"
            )
            failure.lost = True
            raise failure

    def _go_on_alone(self) -> None:
        """Ends the run if neither the owner of the weights nor the statistics server is left, of whom each would."""
        roles = [self.plan.roles[i] for i in sorted({self.plan.server, self.plan.statistics})]
        if all(role.world_rank in self._losses.dead for role in roles):
            names = listed([role.title for role in roles])
            left = sorted({role.world_rank for role in self.plan.roles} - self._losses.dead)
            time.sleep(SPEAKS_S * min(left.index(self.comm.rank), 3))  # the first ends the others
            failure = RunError(f"{names} died, and the run cannot go on without them")
            failure.lost = True
            raise failure

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

    # Regrouping by another plan (`rudra.mpi.regroup`).

    def announce(self, role: int, event: Event) -> None:
        """Lets a role here know of something, in its turn."""
        self._events.append((role, event))

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Follows another plan, from a position: forgets what is under way between those who regroup by it."""
        self.plan = plan
        self.states = self._new_states()
        roles = self._running - {plan.statistics}
        going = self._transfers.abandon(roles, plan.statistics)
        for role in roles:
            self._executors[role].lent = Counter(send.name for send in going if send.role == role)
        self._writing = set(self._comm_threads)
        for channel, thread in self._comm_threads.items():
            thread.abandon(self._regrouping.in_time(partial(self._writing.discard, channel)))
        for reduction in self._reductions.values():
            reduction.abandon()
        self._long = deque(work for work in self._long if work[0] not in roles)

        if plan.stage in roles:  # which goes on with what others have in its log
            self._remake(plan.stage, position)

        def counts(role: int, event: Event) -> bool:
            return role not in roles or (role in plan.owners and outlasts(event, plan.statistics))

        self._events = deque((role, event) for role, event in self._events if counts(role, event))

    @property
    def quiet(self) -> bool:
        """Whether nothing that was abandoned can write into a buffer any more."""
        return self._transfers.quiet and not self._writing and all(r.quiet for r in self._reductions.values())

    def regroup(self, position: TrainingState) -> None:
        """Makes the roles again, for training that goes on from there."""
        plan = self.plan
        unknown = [i for i, role in enumerate(plan.roles) if role.world_rank in self.lost and i not in plan.gone]
        self._reductions = self._new_reductions(self._running)
        for role in sorted(self._running - {plan.statistics}):
            self.announce(role, Started())
            if role not in (plan.server, plan.stage):  # who have the plan already
                self._remake(role, position)
            if role != plan.server:  # which knows who is dead
                self._events.extend((role, Lost(other)) for other in unknown)

    def _remake(self, role: int, position: TrainingState) -> None:
        """Makes the machine of a role again, for training that goes on from there by the plan of now."""
        assert self._make_machine is not None
        before, self._machines[role] = self._machines[role], self._make_machine(role, self.plan, position)
        self._machines[role].inherit(before)

    def _close(self) -> None:
        """Leaves nothing posted; what was sent is delivered, because every role has said that it is done."""
        while self._sending:
            self._losses.wait(self._sending.popleft()[0])
        self._transfers.close()
        for thread in (*self._comm_threads.values(), *filter(None, (self._computer, self._saver))):
            thread.close()
        for reduction in self._reductions.values():
            reduction.close()
        for ring in self._rings.values() if not self._losses.dead else ():
            ring.close(self._losses)
        self._doorbell.close()

    def _start_threads(self) -> None:
        """A learner that overlaps communication has a thread to push, one to pull, and one to compute."""
        self._comm_threads = {
            channel: CommThread(name, self._post, self._losses.wait)
            for channel, name in ((GRADIENTS, "push"), (WEIGHTS, "pull"))
        }
        self._computer = WorkerThread("compute", self._post)
        self._computer.submit(arithmetic_of_thread())


def make_doorbell(comm: MPI.Comm) -> Doorbell:
    """This rank's doorbell; all ranks call this together."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    neighbours = node.allgather(comm.rank)
    node.Free()
    return Doorbell(comm.bcast(secrets.token_hex(8)), comm.rank, neighbours)


class Reported(RunError):
    """A failure on another rank: exit code, whether a rank was lost, and complete text, as that rank sent them."""

    def __init__(self, report: str) -> None:
        code, lost, self.text = report.split(" ", 2)
        super().__init__(self.text)
        self.exit_code, self.lost = int(code), lost == "1"
