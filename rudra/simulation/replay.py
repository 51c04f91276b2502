"""Replay: a recorded run once more, in one process, through the same roles, to the same bits.

A replay is a simulation in which not virtual time but the record decides what happens next. A gradient is computed
when its (learner, step) is the next one in the record, of the weights whose timestamp the record gives, and goes the
way that it went then; whatever is sent arrives at once. So the servers receive the same gradients, of the same
weights, in the same order, and by their own rules form the same averages and updates. Weights that the record still
needs are kept. Where there is no server, nothing but the job decides what happens, and the replay simply trains
again. What is recorded now is compared with the record, row by row, and the first difference ends the replay.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from tqdm import tqdm

from protocols import Averaging, Hogbatch
from rudra.compute import models
from rudra.compute.executor import torch_as_in
from rudra.compute.flat import sha256
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.compute.schedule import phases_of
from rudra.core.events import (
    GRADIENT,
    REPLICA,
    WEIGHTS,
    Action,
    Compute,
    Computed,
    Copy,
    Event,
    Hash,
    Hashed,
    Lost,
    Receive,
    Received,
    Reduce,
    Restart,
    Send,
    Started,
)
from rudra.core.layout import Entry, interleaved
from rudra.core.messages import NOT_PULLING, ActivationGradient, AssignWork, PushedGradient, Ready, Weights
from rudra.core.phases import Phases, phase_at
from rudra.core.records import Gradient
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.core.work import Work, portion
from rudra.data.fingerprint import fingerprints, from_plain
from rudra.data.load import Data, DataInfo, load
from rudra.errors import ConfigError, ProtocolError, ReplayError, printable
from rudra.files import check_output
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.log import log
from rudra.machine import cores
from rudra.results.export import save
from rudra.results.reader import Results, open_results
from rudra.results.recorder import arithmetic
from rudra.results.resume import DECISIVE, DECISIVE_LISTS, decisive
from rudra.results.warm_start import final_weights
from rudra.roles import Machine
from rudra.roles.averaging import joined
from rudra.roles.coordinator import Coordinator
from rudra.roles.elastic import ReplicaSteps
from rudra.roles.ledger import Owner
from rudra.roles.machine import Setup, States, short_digest
from rudra.roles.stages import StageServer
from rudra.roles.worker import works
from rudra.simulation.assembly import machines_of
from rudra.simulation.costs import CostModel
from rudra.simulation.driver import Simulation
from rudra.simulation.record import Comparison, Difference, Left, RecordedRun, compare_weights, differs
from rudra.simulation.replay_stages import AsRecorded, ThroughStage, ahead
from rudra.simulation.tensors import RealTensors
from rudra.trust import admit
from topologies import Plan

REPLAY_MAY_CHANGE = ("data.path", "training.warm_start")
"""Keys of the job that say where something is: all that a replay may change."""

INDIFFERENT = (
    "training.evaluate",
    "training.evaluate_training_set",
    "training.evaluation_batch_size",
    "task.metrics",
    "training.target",
    "training.target_window",
    "training.stop_at_target",
    "training.patience",
    "cluster.learners_per_rank",
    "cluster.node_memory",
)
"""Keys of the `DECISIVE` tables that do not decide what the weights become."""

_AT_ONCE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30, "message_s": 0.0, "update_s": 0.0, "jitter": 0.0}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        updates: number of updates that were repeated, all of them with the bits of the record.
        recorded: number of updates that the result file holds.
        status: status of the recorded run: `"finished"`, `"failed"`, `"interrupted"` or `"running"`.
        weights_sha256: SHA-256 of the weights after the last repeated update.
        difference: the first difference from the record, with `update` (its timestamp) and `text`; None: there is none.
        note: why the replay stopped before the end of the record; else empty.
    """

    updates: int
    recorded: int
    status: str
    weights_sha256: str
    difference: Difference | None
    note: str = ""

    @property
    def identical(self) -> bool:
        """Whether everything that was repeated has the bits of the record."""
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
) -> Replayed:
    """Repeats a recorded run in this process, and compares it with its record bit for bit.

    Before it compares, it logs a warning for each difference between this machine and that of the run.

    Args:
        path: result file of a run or a simulation.
        job: the job that was run. It is needed only if the job named Python objects, which a file cannot hold. Of a
            job that is given, no code is imported that the file names.
        until: update after which to stop and write the weights; 0: before the first update; None: repeat everything.
        output: path for the weights of `until`, a state dict that `torch.load` reads; None: named after the result file
            and the update.
        overrides: changes, each a text `table.key=value`, of `data.path` or `training.warm_start`, the only keys that a
            replay may change.
        quiet: whether to show no progress bar.
        force: whether to replace an existing `output`.
        trust: whether to import the code that the file names, also if another user wrote it.

    Returns:
        What was repeated, and the first difference. A difference raises nothing.

    Raises:
        ReplayError: the record does not determine the weights, or has no such update.
        ConfigError: the job cannot be made again, or is not the job of the run.
        TrustError: the file names code, and neither did this user's run write it nor is `trust` set.
        DataError: the data is missing, or not that of the run.
        ResultsError: the result file is missing or damaged.
    """
    path = Path(path)
    with open_results(path) as results:
        record = RecordedRun(results)
        if reason := results.attributes["not_replayable"]:
            raise ReplayError(f"{path}: cannot be replayed: {reason}")
        if until is not None and not 0 <= until <= record.updates_count:
            raise ReplayError(f"{path}: --until {until}: valid: 0 to {record.updates_count}, the updates recorded")
        job = _as_lowered(results, _restored(results, overrides, trust) if job is None else _checked(results, job))
        plan = record.plan
        _check_kind(path, results.plan(), job)
        if until is None and output is not None:
            raise ConfigError("--output is for the weights of --until")
        target = None
        if until is not None:
            target = path.with_name(f"{path.stem}-{until}.pt") if output is None else Path(output)
            check_output(target, force)
        for line in surroundings(results):
            log.warning(f"{path}: {line}")
    with torch_as_in(job):
        return _repeat(job, plan, record, until, target, quiet)


def surroundings(results: Results) -> list[str]:
    """In what this machine differs from that of the run, so that bits may differ too; one line each."""
    then = results.attributes
    lines = [
        f"{name.replace('_', ' ')} was {printable(str(then[name]))}, here it is {value}; "
        "the weights may differ in their last bits"
        for name, value in arithmetic().items()
        if then[name] != value
    ]
    if then["threads_per_rank"] > cores():
        lines.append(f"computed with {then['threads_per_rank']} threads; they share {cores()} cores here")
    with torch_as_in(Job(cluster={"flush_denormals": False})):
        flushable = torch.set_flush_denormal(True)
    if then["flush_denormals"] and not flushable:
        lines.append("denormal numbers were flushed to zero, which this processor cannot; the weights may differ")
    return lines


class _Fed(Machine):
    """A learner that computes what it is told, and has reported that it is ready to.

    Args:
        role: id in the plan.
        plan: who is who.
        digest: of the initial weights.
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
        self.returned: ActivationGradient | None = None  # what a stage server said last
        self.given: AssignWork | None = None  # what a coordinator did

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Started):
            return [Receive(WEIGHTS, self._source)] if self._served else [*self._ready]
        if isinstance(event, Received) and isinstance(event.message, AssignWork):
            self.given = event.message
        if isinstance(event, Received) and isinstance(event.message, ActivationGradient):
            self.returned = event.message
        return [*self._ready] if isinstance(event, Received) and isinstance(event.message, Weights) else []


class _Replay:
    """Drives the roles of a run through its record, in a simulation in which nothing takes time.

    Args:
        record: what to repeat.
        phases: of the run.
        training_samples: of one epoch.
        tensors: does what roles want done with tensors.
        comparison: what is told of every row.
    """

    def __init__(
        self, record: RecordedRun, phases: Phases, training_samples: int, tensors: RealTensors, comparison: Comparison
    ) -> None:
        plan = phases[0].plan
        costs = CostModel(SimulationTable(**_AT_ONCE), plan, 1)
        self._phases, self._tensors = phases, tensors
        self._role = {plan.roles[role].index: role for role in plan.learners}  # by the learner's number
        self._works: dict[int, Work] = {}  # of each learner, the samples of its next mini-batch
        self._steps: dict[int, int] = {}  # and its number
        self._parts: dict[int, deque[Work]] = {}  # of each worker, what is left of what a coordinator gave it
        machines, self._make_as_ever = machines_of(phases, training_samples)
        if plan.served:
            machines |= {role: self._make(role, plan, BEGINNING) for role in plan.learners}
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
        self._exchanged: set[int] = set()  # learners whose replica is not what the weights are
        self._restarts = record.restarts  # places of rows before which all replicas are
        self._replicas = ReplicaSteps(setup) if plan.averaging and plan.served else None
        self._period = 1 if self._replicas is None else self._replicas.rule.period
        self._through: ThroughStage | None = None
        self._stage: Machine | None = None
        if plan.stage is not None and not plan.served:
            self._stage = machines[plan.stage]
        elif plan.stage is not None:
            rows = record.stages if merged else None
            about = (self._role, self._begin_staged, self._returned)
            self._through = ThroughStage(self._simulation, tensors, rows, *about)

    def _make(self, role: int, plan: Plan, position: TrainingState) -> Machine:
        """A role that begins at a position: learners that have a server compute what the record says from there on."""
        if not plan.served or not plan.traits(role).trains:
            return self._make_as_ever(role, plan, position)
        job = phase_at(self._phases, position.epoch).job
        if plan.scheduled:
            self._parts[role] = deque()
        else:
            mine = portion(plan, role, job.training.minibatch_size, job.cluster.parts)
            self._works[role] = mine.work(position.drawn_from(mine.stream))
        self._steps[role] = position.step(plan.roles[role].index)
        (hashed,) = self._tensors.executors[plan.server].perform(Hash(WEIGHTS))
        assert isinstance(hashed, Hashed)
        return _Fed(role, plan, short_digest(hashed.digest))

    def repeat(self, updates: int) -> None:
        """Goes through the record up to and with that update.

        Raises:
            Left: the replay differs from the record.
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
    def _made(self) -> int:
        """Updates that everybody has made, where there is no server."""
        if not isinstance(self._stage, StageServer) or isinstance(self._stage, AsRecorded):
            return self._ledger.timestamp  # all, or the stage server has a clock of its own
        return min(self._ledger.timestamp, self._stage.timestamp)

    def _apply(self, place: int) -> int:
        """Computes what was pushed as one gradient and lets everything happen that follows; how many rows that was."""
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
        """Has a coordinator deal anew where the run went on from a checkpoint, as nobody was given work after that."""
        if place in self._restarts:
            for parts in self._parts.values():
                parts.clear()
            for action in coordinator.deal_anew():
                self._simulation.do[type(action)](self._simulation.actors[coordinator.id], action, self._simulation.now)
            self._simulation.queue.run()
        if place + 1 in self._restarts:
            coordinator.hold_back()

    def _lose(self, role: int) -> None:
        """A learner died here."""
        before = self._ledger.timestamp
        self._simulation.tell(self._simulation.plan.server, Lost(role))
        self._simulation.queue.run()
        if self._ledger.timestamp > before:
            self._keep()

    def _together(self, row: np.void) -> tuple[int, ...]:
        """The learners whose gradients were added up before they were pushed, this row's among them."""
        learner = int(row["learner"])
        role = self._role.get(learner)
        if role is None:
            update = self._ledger.timestamp + 1
            who = f"gradient of learner {learner}, step {row['step']}"
            raise Left(update, f"{who}: there are {len(self._role)} learners")
        return self._simulation.plan.group_of(role)

    def _compute_row(self, row: np.void, role: int) -> Gradient:
        """Computes the gradient that a row describes, if it is the next one of that learner."""
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
        first, older = works[0].first, work.first + work.count - samples  # what older versions wrote
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
            self._compute(role, Compute(self._steps[role] + i, each, WEIGHTS, GRADIENT), timestamp, i + 1)
            for i, each in enumerate(works)
        ]
        self._steps[role] += self._period
        if self._coordinator is None:
            self._works[role] = work.after(1)
        else:
            self._parts[role].popleft()
        self._exchanged.add(role)
        self._tensors.posted(role, WEIGHTS)
        return self._described(learner, timestamp, made, works)

    def _works_of(self, role: int, who: str) -> list[Work]:
        """The samples of a learner's next gradient, mini-batch by mini-batch."""
        if self._coordinator is None:
            return [self._works[role].after(i) for i in range(self._period)]
        machine, parts = self._simulation.actors[role].machine, self._parts[role]
        assert isinstance(machine, _Fed)
        if machine.given is not None:
            plan, job = self._simulation.plan, self._phases[0].job
            team = job.team(plan.learner_numbers)
            parts.extend(works(*machine.given.rows[0].item(), team[plan.roles[role].index].threads))
            machine.given = None
        if not parts:
            raise Left(self._ledger.timestamp + 1, f"{who}: the coordinator gave no work for it")
        return [parts[0]]

    def _described(self, learner: int, timestamp: int, made: Sequence[Computed], works: Sequence[Work]) -> Gradient:
        """What was computed, as it is pushed."""
        rows = [
            Gradient(-1, learner, c.samples, c.step, w.first, timestamp, -1, 1.0, c.loss, c.errors, w.stream)
            for c, w in zip(made, works, strict=True)
        ]
        return joined(rows, timestamp)

    def _take_weights(self, role: int, timestamp: int, who: str) -> None:
        """Gives a learner the weights of a timestamp, which are kept no longer than they are needed."""
        tensors, server = self._tensors, self._simulation.plan.server
        if timestamp not in self._kept:
            text = f"is of weights {timestamp} in the record, but those could not reach it by then"
            raise Left(self._ledger.timestamp + 1, f"{who}: {text}")
        tensors.transfer(server, _version(timestamp), role, WEIGHTS)
        self._needed[timestamp] -= 1
        if not self._needed[timestamp]:
            self._kept.discard(timestamp)
            tensors.posted(server, _version(timestamp))

    def _begin_staged(self, role: int, step: int, timestamp: int) -> Work:
        """Gives a learner what it needs for the first layers of a mini-batch."""
        learner = self._simulation.plan.roles[role].index
        self._take_weights(role, timestamp, f"mini-batch {step} of learner {learner}")
        return self._works[role].after(step - self._steps[role])

    def _returned(self, role: int) -> ActivationGradient:
        """What the stage server answered a learner."""
        machine = self._simulation.actors[role].machine
        assert isinstance(machine, _Fed)
        if machine.returned is None:
            raise Left(self._ledger.timestamp + 1, "the stage server does not conclude a mini-batch of the record")
        found, machine.returned = machine.returned, None
        return found

    def _compute(self, role: int, action: Compute, timestamp: int, number: int) -> Computed:
        """Computes a gradient, and has a replica that a learner may have make its step."""
        tensors, replicas = self._tensors, self._replicas
        if replicas is None:
            return tensors.compute(role, action)
        begins = number == 1
        if begins and role not in self._exchanged:
            tensors.perform(role, Restart(REPLICA, WEIGHTS), 0.0)
        computed = tensors.compute(role, structs.replace(action, weights=REPLICA))
        corrects = begins and role in self._exchanged
        tensors.perform(role, replicas.step(timestamp, number, corrects=corrects), 0.0)
        return computed

    def _keep(self) -> None:
        """Keeps the weights of this moment, if the record still needs them."""
        timestamp = self._ledger.timestamp
        if self._needed.get(timestamp):
            self._kept.add(timestamp)
            self._tensors.perform(self._simulation.plan.server, Copy(WEIGHTS, _version(timestamp)), 0.0)


def _version(timestamp: int) -> str:
    return f"weights of {timestamp}"


def _repeat(job: Job, plan: Plan, record: RecordedRun, until: int | None, target: Path | None, quiet: bool) -> Replayed:
    updates = record.updates_count if until is None else until
    loaded = load(job.data, test=False, seed=job.training.seed, ignored=job.task.ignored)
    _check_data(record, loaded)
    info = loaded.info
    executors = make_executors(
        job, plan, tuple(range(len(plan.roles))), loaded, prefetch=False, first_weights=final_weights
    )
    for executor in executors.values():
        executor.prepare()
    tensors = RealTensors(executors, halves=job.cluster.gradient_format == "float16")
    phases = phases_of(job, plan, info.training_samples)
    bar = tqdm(total=updates, unit=" updates", desc=record.path.name, leave=False, disable=quiet or None)
    driver = _Replay(record, phases, info.training_samples, tensors, Comparison(record, bar.update))
    difference: Difference | None = None
    owners = [owner for owner in map(executors.__getitem__, plan.owners) if isinstance(owner, OwnerExecutor)]
    with bar:
        try:
            compare_weights(0, "initial", record.attributes["initial_weights_sha256"], sha256(_weights(owners)))
            driver.repeat(updates)
            if record.finished and updates == record.updates_count:
                compare_weights(updates, "final", record.state["weights_sha256"], sha256(_weights(owners)))
        except Left as left:
            difference = left.difference
    if target is not None and difference is None:
        _save(target, job, info, executors[plan.statistics].layout, torch.from_numpy(_weights(owners)))
    done = updates if difference is None else max(0, difference.update - 1)
    digest = sha256(_weights(owners))
    return Replayed(done, record.recorded, record.state["status"], digest, difference, record.note)


def _check_kind(path: Path, plan: Plan, job: Job) -> None:
    """Raises ReplayError where the file's attributes and roles are not those of its job."""
    protocol = job.make_protocol(plan)
    kinds = {"averaging": isinstance(protocol, Averaging), "scheduled": isinstance(protocol, Hogbatch)}
    for name, wanted in kinds.items():
        if getattr(plan, name) != wanted:
            raise ReplayError(f"{path}: damaged: attribute '{name}' is not what its job has")
    try:
        drawn = job.make_topology().plan(len(plan.learners), [plan.roles[i].node for i in plan.learners])
    except ValueError as error:
        raise ReplayError(f"{path}: damaged: /roles does not fit its job: {error}") from None
    if drawn.overlapped != plan.overlapped:
        raise ReplayError(f"{path}: damaged: attribute 'overlapped' is not what its job has")
    for name in ("kind", "index", "parent", "source", "group"):
        if [getattr(role, name) for role in drawn.roles] != [getattr(role, name) for role in plan.roles]:
            raise ReplayError(f"{path}: damaged: column {name} of /roles is not what its job has")


def _check_data(record: RecordedRun, loaded: Data) -> None:
    """Raises ReplayError where the training data are not those of the record."""
    try:
        then = from_plain(json.loads(record.attributes.get("data_fingerprints", "{}")))
    except (ValueError, AttributeError, RecursionError):
        raise ReplayError(f"{record.path}: damaged: attribute 'data_fingerprints' is not what Rudra writes") from None
    now = fingerprints(loaded)
    if "training" in then and (what := now["training"].difference(then["training"])):
        raise ReplayError(f"{record.path}: [data] the training set has changed since the run: {what}")


def _weights(owners: Sequence[OwnerExecutor]) -> npt.NDArray[np.float32]:
    """All weights, of those who own them."""
    parts = interleaved(owner.stretches for owner in owners)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy(force=True)


def _save(path: Path, job: Job, info: DataInfo, layout: Sequence[Entry], weights: torch.Tensor) -> None:
    """Writes weights as a state dict of the model; what they lack is as it was at first."""
    state = models.build(job.model, info, job.training.seed).state_dict()
    for entry in layout:
        if entry.name in state:  # some buffers are not
            state[entry.name].copy_(weights[entry.offset : entry.offset + entry.size].view(entry.shape))
    save(state, path)


# The job of the record.


def _restored(results: Results, overrides: Sequence[str], trust: bool) -> Job:
    """The job that a file holds; hooks are no part of what is repeated."""
    objects = results.attributes["python_objects"].split(", ")
    if given := ", ".join(name for name in objects if not name.startswith("hooks.")):
        raise ReplayError(
            f"{results.path}: {given} was given as a Python object, which a file cannot hold; "
            "from Python, rudra.replay(file, job=job) takes the job that has it"
        )
    tables = {"name": results.job["name"], **{key: results.job.get(key, []) for key in DECISIVE_LISTS}}
    tables |= {table: results.job.get(table, {}) for table in DECISIVE}
    admit(results.path, json.loads(results.attributes["job"]), tables, results.attributes, trust=trust)
    for override in overrides:
        target, equals, value = (part.strip() for part in override.partition("="))
        if target not in REPLAY_MAY_CHANGE or not equals:
            raise ConfigError(f"--set {override}: a replay changes nothing but {' and '.join(REPLAY_MAY_CHANGE)}")
        table, _, key = target.partition(".")
        tables[table][key] = value
    try:
        return _quiet(Job(**tables))
    except ConfigError as error:
        raise ConfigError(f"{results.path}: {error}") from None


def _checked(results: Results, job: Job) -> Job:
    """The job that the caller gives, if it is the one of the record."""
    then = decisive(results.job)
    decided = ("learners", "threads_per_rank", "device", *(["shares"] if job.cluster.shares == "auto" else []))
    cut = then["placement"]["cut"] if job.placement.by_rule else job.placement.cut
    job = job.with_(cluster={key: then["cluster"][key] for key in decided}, placement={"cut": cut})
    if job.training.gradients == "auto":
        job = job.with_(training={"gradients": then["training"]["gradients"]})
    unknown = results.attributes["python_objects"].split(", ")
    now = json.loads(job.to_json())
    for table in DECISIVE:
        for key, value in now[table].items():
            name = f"{table}.{key}"
            if value != then[table][key] and name not in {*unknown, *REPLAY_MAY_CHANGE, *INDIFFERENT}:
                raise ConfigError(f"{results.path}: ran with {name} = {then[table][key]}; the job given has {value}")
    for key in DECISIVE_LISTS:
        if now[key] != (before := results.job.get(key, [])):
            raise ConfigError(f"{results.path}: ran with {key} = {before}; the job given has {now[key]}")
    return _quiet(job)


def _as_lowered(results: Results, job: Job) -> Job:
    """The job with the rates that tests led to, as milestones: what falls at a plateau falls after the epoch under way.

    It is under way in the update after the event; where there is none, it does not matter.
    """
    if job.optimizer.plateau is None:
        return job
    events, updates = results.events, results.updates
    milestones: list[int] = []
    for timestamp in events["timestamp"][events["kind"] == b"plateau"].tolist():
        if timestamp < len(updates):
            milestones.append(max(int(updates["epoch"][timestamp]) - 1, *milestones, 0) + 1)
    made = {"schedule": "step", "milestones": milestones, "schedule_options": {}}
    return _quiet(job.with_(optimizer=made))


def _quiet(job: Job) -> Job:
    """The same training with nothing beside it, and with rows that come at once."""
    return job.with_(
        hooks=(),
        training={
            "evaluate": job.optimizer.plateau is not None,
            "evaluate_training_set": False,
            "patience": None,
        },
        fault_tolerance={"non_finite_loss": "warn"},
        results={
            "minibatches": False,
            "report_s": 0.0,
            "checkpoint_every": "never",
            "keep_every": None,
            "keep_best": False,
        },
    )
