"""Driver of a replay: passes recorded events to roles of a simulation with zero durations."""

from collections import deque
from collections.abc import Sequence
from math import isnan

import numpy as np
from msgspec import structs

from rudra.core.actions import Action, Compute, Copy, Hash, Receive, Record, Reduce, ResetReplica, Send
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import Computed, Event, Hashed, Lost, Received, Started
from rudra.core.messages import NOT_PULLING, ActivationGradient, AssignWork, PushedGradient, Ready, Weights
from rudra.core.phases import Phases, phase_at
from rudra.core.records import GRADIENT_NORM, Gradient
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.core.work import Work, portion
from rudra.errors import ProtocolError
from rudra.job.simulation import SimulationTable
from rudra.roles import Machine
from rudra.roles.coordinator import Coordinator
from rudra.roles.correcting import needs_pulled_weights, pulled_name
from rudra.roles.elastic import ReplicaSteps
from rudra.roles.ledger import Owner
from rudra.roles.machine import Setup, States, short_digest
from rudra.roles.optimizer_settings import changed_settings
from rudra.roles.periods import joined
from rudra.roles.stage_server import StageServer
from rudra.roles.worker import works
from rudra.simulation.assembly import machines_of
from rudra.simulation.costs import CostModel
from rudra.simulation.driver import Simulation
from rudra.simulation.record import Comparison, Left, RecordedRun, differs
from rudra.simulation.replay_stages import AsRecorded, ThroughStage, ahead
from rudra.simulation.tensors import RealTensors
from topologies import Plan

_AT_ONCE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30, "message_s": 0.0, "update_s": 0.0, "jitter": 0.0}


class FedLearner(Machine):
    """Learner that computes on request, and has reported that it is ready.

    Args:
        role: Id in the plan.
        plan: Roles and their ranks.
        digest: Digest of the initial weights.
    """

    state: States

    def __init__(self, role: int, plan: Plan, digest: int) -> None:
        super().__init__(role, plan)
        parent, source = plan.roles[role].parent, plan.weight_source(plan.roles[role])
        assert parent is not None
        assert source is not None
        self._source = source
        self._served = not plan.roles[self._source].kind_traits.trains
        leads = not plan.roles[parent].kind_traits.trains
        self._ready = [Send(parent, Ready(role, digest))] if leads else []
        self.returned: ActivationGradient | None = None  # latest answer of a stage server
        self.given: AssignWork | None = None  # latest assignment of a coordinator

    def handle(self, event: Event, now: float) -> list[Action]:
        if self.id not in self.plan.learners:
            return []
        if isinstance(event, Started):
            return [Receive(WEIGHTS, self._source)] if self._served else [*self._ready]
        if isinstance(event, Received) and isinstance(event.message, AssignWork):
            self.given = event.message
        if isinstance(event, Received) and isinstance(event.message, ActivationGradient):
            self.returned = event.message
        return [*self._ready] if isinstance(event, Received) and isinstance(event.message, Weights) else []


class ReplayDriver:
    """Driver that leads a run's roles through its record, in a simulation with zero durations.

    Args:
        record: Record to repeat.
        phases: Phases of the run.
        training_samples: Number of training samples per epoch.
        tensors: Carries out the roles' actions on tensors.
        comparison: Receiver of every row.
    """

    def __init__(
        self, record: RecordedRun, phases: Phases, training_samples: int, tensors: RealTensors, comparison: Comparison
    ) -> None:
        plan = phases[0].plan
        costs = CostModel(SimulationTable(**_AT_ONCE), plan, 1)
        self._phases, self._tensors, self._training_samples = phases, tensors, training_samples
        self._comparison = comparison
        self._replicas: ReplicaSteps | None = None
        self._begun_at = 0  # number of gradients applied when all roles began or restarted
        self._exchanged: set[int] = set()  # learners whose replica differs from the weights
        self._role = {plan.roles[role].index: role for role in plan.whole.learners}  # by the learner's number
        self._works: dict[int, Work] = {}  # learner -> samples of its next mini-batch
        self._steps: dict[int, int] = {}  # learner -> step of its next mini-batch
        self._parts: dict[int, deque[Work]] = {}  # worker -> remaining parts of its assigned work
        machines, self._make_as_ever = machines_of(phases, training_samples)
        if plan.served:
            machines |= {role: self._make(role, plan, BEGINNING) for role in plan.whole.learners}
        first = phases[0]
        setup = Setup(first.job, plan, training_samples, first.schedule)
        merged = plan.stage is not None and record.merged
        if plan.stage is not None and merged:
            machines[plan.stage] = AsRecorded(plan.stage, setup, record.events)
        self._simulation = Simulation(plan, machines, tensors, comparison, costs, size_bytes=1, seed=0, make=self._make)
        self._rows, self._losses = record.gradients, record.losses
        used = record.stages["front"] if merged else self._rows["timestamp"]
        stamps, counts = np.unique(used, return_counts=True)
        self._needed = dict(zip(stamps.tolist(), counts.tolist(), strict=True))  # timestamp -> gradients to come
        self._kept: set[int] = set()
        owner = machines[plan.server]
        assert isinstance(owner, Owner)
        self._ledger = owner.ledger
        self._coordinator = owner if isinstance(owner, Coordinator) else None
        self._restarts = record.restarts  # indices of rows that follow a reset of all replicas
        self._keeps_pulled = needs_pulled_weights(first.job)
        self._through: ThroughStage | None = None
        self._stage: Machine | None = None
        if plan.stage is not None and not plan.served:
            self._stage = machines[plan.stage]
        elif plan.stage is not None:
            rows = record.stages if merged else None
            about = (self._role, self._begin_staged, self._returned)
            self._through = ThroughStage(self._simulation, tensors, rows, *about)

    def _make(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        """Makes a role at a training state. Learners of a server compute what the record contains from there on."""
        if not plan.served or not plan.traits(role).trains:
            return self._make_as_ever(role, plan, position)
        self._begun_at = position.applied
        if role not in plan.learners:
            return FedLearner(role, plan, 0)
        phase = phase_at(self._phases, position)
        job, schedule = phase.job, phase.schedule
        if plan.averaging:
            self._replicas = ReplicaSteps(Setup(job, plan, self._training_samples, schedule, position))
            self._exchanged.discard(role)
            for action in changed_settings(role, self._phases, job, plan):
                self._tensors.perform(role, action, 0.0)
        if plan.scheduled:
            self._parts[role] = deque()
        else:
            mine = portion(plan, role, job.training.minibatch_size, job.cluster.parts)
            self._works[role] = mine.work(position.drawn_from(mine.stream))
        self._steps[role] = position.step(plan.roles[role].index)
        (hashed,) = self._tensors.executors[plan.server].perform(Hash(WEIGHTS))
        assert isinstance(hashed, Hashed)
        return FedLearner(role, plan, short_digest(hashed.digest))

    def repeat(self, updates: int) -> None:
        """Repeats the record up to and including an update.

        Raises:
            Left: The replay differs from the record.
        """
        simulation = self._simulation
        simulation.start()
        if not simulation.plan.served:
            while simulation.queue.heap and (self._made < updates or self._ledger.over):
                simulation.queue.step()
            return
        simulation.queue.run()
        self._keep()
        place = 0
        while place < len(self._rows) and self._ledger.timestamp < updates:
            try:
                if len(self._losses) and self._losses[0]["gradients"] <= place:
                    self._lose(int(self._losses[0]["role"]))
                    self._losses = self._losses[1:]
                    continue
                place += self._apply(place)
            except ProtocolError as error:
                raise Left(self._ledger.timestamp + 1, str(error)) from None
        if self._ledger.timestamp < updates:
            raise Left(self._ledger.timestamp + 1, "a row of /gradients is missing in the record")
        if self._through is not None and self._ledger.over:
            self._through.finish()

    @property
    def _period(self) -> int:
        """Returns the number of mini-batches of a gradient."""
        return 1 if self._replicas is None else self._replicas.rule.period

    @property
    def _made(self) -> int:
        """Returns the number of updates that all roles have made, if there is no server."""
        if not isinstance(self._stage, StageServer) or isinstance(self._stage, AsRecorded):
            return self._ledger.timestamp  # all roles, or the stage server has a clock of its own
        return min(self._ledger.timestamp, self._stage.timestamp)

    def _apply(self, place: int) -> int:
        """Computes gradients that were pushed as one, and everything that follows. Returns the number of rows they
        have."""
        if place in self._restarts:
            self._exchanged.clear()
        if self._coordinator is not None:
            self._go_on_as_scheduled(self._coordinator, place)
        members = self._together(self._rows[place])
        rows = self._rows[place : place + len(members)]
        computed = [self._compute_row(row, role) for row, role in zip(rows, members, strict=False)]
        if len(computed) < len(members):
            raise Left(self._ledger.timestamp + 1, "a row of /gradients is missing in the record")
        if len(members) > 1:
            reductions = {role: Reduce(GRADIENT, 0, 0, g, False) for role, g in zip(members, computed, strict=True)}
            self._tensors.reduce(reductions, self._simulation.plan.partial_sums(members))
        sender = members[0]
        parent = self._simulation.plan.roles[sender].parent
        assert parent is not None
        asks = self._coordinator is not None and not self._parts[sender] and place + 1 not in self._restarts
        message = PushedGradient(sender, int(rows[0]["timestamp"]), NOT_PULLING, tuple(computed), asks)
        before = self._ledger.timestamp
        simulation = self._simulation
        buffer = GRADIENT if self._replicas is None else REPLICA
        simulation.network.send(simulation.actors[sender], Send(parent, message, buffer), simulation.now)
        simulation.queue.run()
        if self._ledger.timestamp > before:
            self._keep()
        return len(members)

    def _go_on_as_scheduled(self, coordinator: Coordinator, place: int) -> None:
        """Lets a coordinator assign work again after a resume from a checkpoint, as earlier assignments were lost."""
        if place in self._restarts and place != self._begun_at:
            for parts in self._parts.values():
                parts.clear()
            for action in coordinator.deal_anew():
                self._simulation.do[type(action)](self._simulation.actors[coordinator.id], action, self._simulation.now)
            self._simulation.queue.run()
        if place + 1 in self._restarts:
            coordinator.hold_back()

    def _lose(self, role: int) -> None:
        """Ends a learner that died at this point of the record."""
        before = self._ledger.timestamp
        self._simulation.tell(self._simulation.plan.server, Lost(role))
        self._simulation.queue.run()
        if self._ledger.timestamp > before:
            self._keep()

    def _together(self, row: np.void) -> tuple[int, ...]:
        """Returns the learners whose gradients were added up before they were pushed, including this row's learner."""
        learner = int(row["learner"])
        role = self._role.get(learner)
        if role is None:
            update = self._ledger.timestamp + 1
            who = f"gradient of learner {learner}, step {row['step']}"
            raise Left(update, f"{who}: there are {len(self._role)} learners")
        if role not in self._simulation.plan.learners:
            raise Left(self._ledger.timestamp + 1, f"gradient of learner {learner}, which does not take part")
        return self._simulation.plan.group_of(role)

    def _compute_row(self, row: np.void, role: int) -> Gradient:
        """Computes the gradient that a row describes, if it is the learner's next one."""
        learner, step, timestamp = (int(row[name]) for name in ("learner", "step", "timestamp"))
        update, who = self._ledger.timestamp + 1, f"gradient of learner {learner}, step {step}"
        if row["update"] != update:
            differs(update, f"{who}: update", row["update"], update)
        if self._role.get(learner) != role:
            differs(update, "gradient of learner", learner, self._simulation.plan.roles[role].index)
        works = self._works_of(role, who)
        if step != self._steps[role] + self._period - 1:
            differs(update, f"gradient of learner {learner}, step", step, self._steps[role] + self._period - 1)
        work, samples = works[-1], sum(work.count for work in works)
        first, older = (
            works[0].first,
            work.first + work.count - samples,
        )  # older: as in older files
        first = older if row["first"] == older else first
        for name, value in (("stream", work.stream), ("first", first), ("samples", samples)):
            if row[name] != value:
                differs(update, f"{who}: {name}", row[name], value)
        if self._through is not None:
            made = [self._through.gradient(learner, step, timestamp)]
            if made[0].step != step:
                raise Left(update, f"{who}: a row of /stages is missing in the record")
            self._tensors.perform(role, Copy(ahead(step), GRADIENT), 0.0)
            self._tensors.posted(role, ahead(step))
            self._steps[role] += 1
            self._works[role] = work.after(1)
            return self._described(learner, timestamp, made, works)
        self._take_weights(role, timestamp, who)
        made = [
            self._compute(role, Compute(self._steps[role] + i, each, WEIGHTS, GRADIENT, timestamp), i + 1)
            for i, each in enumerate(works)
        ]
        norms = [(learner, c.samples, c.step, c.norm) for c in made if not isnan(c.norm)]
        if norms:
            self._comparison.record(Record("gradient_norms", np.array(norms, GRADIENT_NORM)))
        self._steps[role] += self._period
        if self._coordinator is None:
            self._works[role] = work.after(1)
        else:
            self._parts[role].popleft()
        self._exchanged.add(role)
        self._tensors.posted(role, WEIGHTS)
        return self._described(learner, timestamp, made, works)

    def _works_of(self, role: int, who: str) -> list[Work]:
        """Returns the samples of a learner's next gradient, per mini-batch."""
        if self._coordinator is None:
            return [self._works[role].after(i) for i in range(self._period)]
        machine, parts = self._simulation.actors[role].machine, self._parts[role]
        assert isinstance(machine, FedLearner)
        if machine.given is not None:
            plan, job = self._simulation.plan, self._phases[0].job
            team = job.hogbatch.team(plan.learner_numbers)
            parts.extend(works(*machine.given.rows[0].item(), team[plan.roles[role].index].threads))
            machine.given = None
        if not parts:
            raise Left(self._ledger.timestamp + 1, f"{who}: the coordinator assigned no work for it")
        return [parts[0]]

    def _described(self, learner: int, timestamp: int, made: Sequence[Computed], works: Sequence[Work]) -> Gradient:
        """Returns a computed gradient as it is pushed."""
        rows = [
            Gradient(-1, learner, c.samples, c.step, w.first, timestamp, -1, 1.0, c.loss, c.errors, w.stream)
            for c, w in zip(made, works, strict=True)
        ]
        return joined(rows, timestamp)

    def _take_weights(self, role: int, timestamp: int, who: str) -> None:
        """Gives a learner the weights of a timestamp, and drops them if no other gradient needs them."""
        tensors, server = self._tensors, self._simulation.plan.server
        if timestamp not in self._kept:
            text = f"is of weights {timestamp} in the record, but they could not have reached it by then"
            raise Left(self._ledger.timestamp + 1, f"{who}: {text}")
        tensors.transfer(server, version_name(timestamp), role, WEIGHTS)
        if self._keeps_pulled:
            sender = self._simulation.plan.group_of(role)[0]
            tensors.perform(server, Copy(version_name(timestamp), pulled_name(sender)), 0.0)
        self._needed[timestamp] -= 1
        if not self._needed[timestamp]:
            self._kept.discard(timestamp)
            tensors.posted(server, version_name(timestamp))

    def _begin_staged(self, role: int, step: int, timestamp: int) -> Work:
        """Gives a learner the inputs for the first layers of a mini-batch."""
        learner = self._simulation.plan.roles[role].index
        self._take_weights(role, timestamp, f"mini-batch {step} of learner {learner}")
        return self._works[role].after(step - self._steps[role])

    def _returned(self, role: int) -> ActivationGradient:
        """Returns the stage server's answer to a learner."""
        machine = self._simulation.actors[role].machine
        assert isinstance(machine, FedLearner)
        if machine.returned is None:
            raise Left(self._ledger.timestamp + 1, "the stage server does not finish a mini-batch of the record")
        found, machine.returned = machine.returned, None
        return found

    def _compute(self, role: int, action: Compute, number: int) -> Computed:
        """Computes a gradient. If the learner has a replica, the replica makes its step."""
        tensors, replicas = self._tensors, self._replicas
        if replicas is None:
            return tensors.compute(role, action)
        begins = number == 1
        if begins and role not in self._exchanged:
            tensors.perform(role, ResetReplica(REPLICA, WEIGHTS), 0.0)
        computed = tensors.compute(role, structs.replace(action, weights=REPLICA))
        corrects = begins and role in self._exchanged
        tensors.perform(role, replicas.step(action.timestamp, number, corrects=corrects), 0.0)
        return computed

    def _keep(self) -> None:
        """Keeps the current weights if the record still needs them."""
        timestamp = self._ledger.timestamp
        if self._needed.get(timestamp):
            self._kept.add(timestamp)
            self._tensors.perform(self._simulation.plan.server, Copy(WEIGHTS, version_name(timestamp)), 0.0)


def version_name(timestamp: int) -> str:
    return f"weights of {timestamp}"
