"""Short texts for actions, and the events that a role gets, for tests that assert exact traces.

Roles are written S (parameter server), T (statistics server), R0, R1, … (tree servers) and L0, L1, … (learners).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from rudra.compute.schedule import schedule_of
from rudra.core.actions import (
    Accumulate,
    Action,
    AverageGroup,
    CancelReceive,
    Compute,
    ComputeNorms,
    DeclareLost,
    Fail,
    Halt,
    MergeEvaluation,
    PullReplica,
    Receive,
    Reconfigure,
    Record,
    Reduce,
    ReorderParts,
    ResetReplica,
    Send,
    StepReplica,
    StoreEpochWeights,
    Update,
    WriteShared,
)
from rudra.core.events import Computed, Event, Hashed, Received, Sent, Updated
from rudra.core.messages import (
    MESSAGES,
    ChildDone,
    Message,
    MessageKind,
    PullAnswer,
    PushedGradient,
    Shutdown,
    Stop,
    TrainingStarted,
)
from rudra.core.records import Gradient
from rudra.core.training_state import BEGINNING
from rudra.job.job import Job
from rudra.roles import Machine, make
from rudra.roles.machine import short_digest
from topologies import Plan
from topologies.kinds import LEARNER, PARAMETER_SERVER, STAGE_REPLICA, STAGE_SERVER, STATISTICS_SERVER, TREE_SERVER

SERVER, STATISTICS, FIRST_LEARNER = 0, 1, 2
SAMPLES = 4
NAMES = ("S", "T", *(f"L{i}" for i in range(8)))
LETTERS = {
    PARAMETER_SERVER: "S",
    STAGE_SERVER: "B",
    STAGE_REPLICA: "C",
    STATISTICS_SERVER: "T",
    TREE_SERVER: "R",
    LEARNER: "L",
}
QUIET = {"report_s": 1e9}
"""Rows are sent only where they must be, which keeps traces short."""
SHORT: dict[type[Action], str] = {
    AverageGroup: "combine",
    CancelReceive: "withdraw",
    ComputeNorms: "measure",
    DeclareLost: "drop",
    MergeEvaluation: "sum",
    PullReplica: "approach",
    Reconfigure: "regroup",
    ReorderParts: "arrange",
    ResetReplica: "restart",
    StepReplica: "step",
    StoreEpochWeights: "keep",
    WriteShared: "publish",
}
"""Short texts of actions whose names are long."""
HASHED = Hashed("0123456789abcdef" + 48 * "0")
DIGEST = short_digest(HASHED.digest)
START, STOP = Received(TrainingStarted(SERVER, 0)), Received(Stop(SERVER))
DONE = Received(Shutdown(STATISTICS, 0, apart=False))


def job(name: str, learners: int = 2, **tables: Any) -> Job:
    training = {"minibatch_size": SAMPLES, "epochs": 2, **tables.pop("training", {})}
    rule = {"name": name, **tables.pop("protocol", {})}
    return Job(training=training, protocol=rule, cluster={"learners": learners}, results=QUIET, **tables).resolved()


def machine(
    role: int, run: Job, training_samples: int = 10**6, nodes: Sequence[int] | None = None, *, epoch: int = 0
) -> Machine:
    """A role of a job, which begins after so many epochs."""
    plan = run.plan(nodes)
    position = msgspec.structs.replace(BEGINNING, epoch=epoch)
    return make(role, run, plan, training_samples, schedule_of(run, plan, training_samples), position)


def plan(learners: int = 2) -> Plan:
    return job("async", learners).plan()


def names_of(plan: Plan) -> list[str]:
    return [LETTERS[r.kind] + (str(r.index) if r.kind in {TREE_SERVER, LEARNER} else "") for r in plan.roles]


def brief(action: Action, names: Sequence[str] = NAMES) -> str:
    """One action in a few words; what a test does not name is not in it."""
    match action:
        case Send(to, message, buffer):
            tensor = f" [{buffer}]" if buffer else ""
            return f"{message.kind.name}@{getattr(message, 'timestamp', 0)} to {names[to]}{tensor}"
        case Receive(buffer, source, gradient):
            assert gradient == buffer.startswith(("gradient", "activations"))
            return f"receive {buffer}" + ("" if source is None else f" from {names[source]}")
        case Reduce(buffer, group, sequence, _, to_all):
            return f"reduce {buffer} of step {sequence} in group {group}" + (" to all" if to_all else "")
        case Accumulate(into, gradient, fraction, scale):
            return f"{into} takes {fraction:g} of {scale:g} * {gradient}"
        case Update(gradient, _, rate):
            return f"update by {gradient} at {rate:g}"
        case Compute(step, _, weights, gradient):
            return f"compute {step} {weights} {gradient}"
        case Record(table):
            return f"record {table}"
        case Halt(code=0, apart=False):
            return "halt"
        case Fail(text):
            return f"fail {text}"
        case _:
            shown = (getattr(action, name) for name in type(action).__match_args__)
            fields = [str(value) for value in shown if not isinstance(value, np.ndarray) and value != ()]
            name = SHORT.get(type(action), type(action).__name__.lower())
            return " ".join(filter(None, [name, *fields]))


def feed(role: Machine, *events: Event, now: float = 0.0) -> list[str]:
    """What the role wants after these events; its invariants are checked after each."""
    wanted: list[str] = []
    for event in events:
        before = role.state
        wanted += [brief(action, names_of(role.plan)) for action in role.handle(event, now)]
        role.validate()
        role.validate_step(before, event)
    return wanted


def sent_gradient(learner: int, step: int, timestamp: int, samples: int = SAMPLES) -> Gradient:
    return Gradient(-1, learner, samples, step, step * SAMPLES, timestamp, -1, 1.0, 0.5, 1, learner)


def gradient(learner: int, step: int, timestamp: int, buffer: str, samples: int = SAMPLES) -> Received:
    gradients = (sent_gradient(learner, step, timestamp, samples),)
    message = PushedGradient(FIRST_LEARNER + learner, timestamp, timestamp, gradients)
    return Received(message, buffer)


def any_message(kind: MessageKind, sender: int, **fields: Any) -> Message:
    """A message of a kind; what is not given is nothing."""
    type_ = MESSAGES[kind]
    nothing = {int: 0, float: 0.0, bool: False}
    missing = [f for f in msgspec.structs.fields(type_) if f.required and f.name not in {"sender", *fields}]
    message: Message = type_(sender, **{f.name: nothing.get(f.type, ()) for f in missing}, **fields)
    return message


def computed(step: int, loss: float = 0.5) -> Computed:
    return Computed(step, loss, 1, SAMPLES)


def answer(timestamp: int, sender: int = SERVER) -> Received:
    return Received(PullAnswer(sender, timestamp))


def updated(timestamp: int, digest: int = 0, seconds: float = 0.0) -> Updated:
    return Updated(timestamp, digest, seconds)


def bye(learner: int, pushed: int) -> Received:
    return Received(ChildDone(FIRST_LEARNER + learner, pushed))


def returned(*learners: int) -> list[Sent]:
    """The weights that were sent to these learners have arrived."""
    return [Sent("weights", FIRST_LEARNER + i) for i in learners]


def rows_sent(actions: Iterable[Action], kind: MessageKind) -> Iterator[np.void]:
    """Rows of a kind among what a role sends."""
    for action in actions:
        if isinstance(action, Send) and action.message.kind is kind and action.message.rows is not None:
            yield from action.message.rows
