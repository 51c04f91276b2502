"""Hooks: the user's own code, called after updates, after epochs and at the end (`[[hooks]]` in a job).

Both drivers call hooks through the executors of roles and the recorder, which they share. A hook gets a `Moment`, and
its role waits for it. It cannot change the run. An exception in it ends the run, as an error of the user. Two hooks
come with Rudra, `csv` and `tensorboard` (`rudra.results.logging_hooks`).
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra.core.actions import BackpropFirstStage, Compute, Finish, Record, Update
from rudra.core.events import Computed, Decided
from rudra.core.layout import Entry
from rudra.core.messages import Rows
from rudra.errors import ConfigError, HookError, Interrupted, RudraError
from rudra.job.job import Job
from rudra.job.table import Named, short
from rudra.job.tables import Hook
from rudra.plugins import choose, misfit
from topologies import Plan
from topologies.plan import Role

At = Literal["update", "epoch", "end"]
Floats = npt.NDArray[np.float32]
ReadFloats = Callable[[], Floats]
"""Function that returns the floats of a buffer, (size,)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Argument of a hook. Fields that do not apply to the moment or to the role are None or empty.

    Attributes:
        at: Kind of the moment: `"update"`, `"epoch"` or `"end"`.
        role: Name of the role that calls the hook, such as `"learner 3"`.
        world_rank: MPI rank that hosts the role.
        job: Name of the job.
        timestamp: Timestamp of the weights: the number of updates that made them.
        time_s: Training time in seconds, virtual in a simulation. At an update: start of the update, or of the
            learner's computation. At an epoch: its end. At the end: time of the role's last moment.
        epoch: Number of the epoch, from 1: the epoch of the update, or the epoch that has ended.
        samples: Number of samples in the update's gradients, or in the learner's mini-batch.
        learning_rate: Learning rate of the update, after schedule, warm-up and modulation.
        step: Number of the mini-batch among the learner's mini-batches, from 0.
        loss: Mean loss over the samples of the mini-batch.
        errors: Number of wrong samples in the mini-batch. A partly wrong sample counts as a fraction. NaN: the task has
            no error.
        row: Column -> value, only on the statistics server. At an epoch: row of `/epochs`. At the end: row of `/totals`
            (`docs/results.md` lists the columns).
        metrics: Split (`"test"`, `"validation"`) -> metric -> value: results of the epoch's evaluation in addition to
            loss and error.
        output: Name of the result file without its directory and suffix.
        history: Rows of `/epochs` of all recorded epochs, this one included, only for the function of `[decisions]`.
    """

    at: At
    role: str
    world_rank: int
    job: str
    timestamp: int | None = None
    time_s: float | None = None
    epoch: int | None = None
    samples: int | None = None
    learning_rate: float | None = None
    step: int | None = None
    loss: float | None = None
    errors: float | None = None
    row: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    output: str = ""
    history: tuple[dict[str, Any], ...] = ()
    _layout: Sequence[Entry] | None = field(default=(), repr=False, compare=False)
    _source: ReadFloats | None = field(default=None, repr=False, compare=False)

    def weights(self) -> dict[str, Floats]:
        """Returns the weights of the moment, as views without a copy.

        The arrays are read-only, and valid only during the call of the hook. Copy what you keep.

        Returns:
            Name -> array float32 in the tensor's own shape, of all parameters and of the buffers that travel with the
                gradients. Empty if the role holds no weights.

        Raises:
            RudraError: The role holds only a part of the weights (topology `sharded`).
        """
        if self._source is None:
            return {}
        if self._layout is None:
            raise RudraError(
                f"moment.weights(): the {self.role} holds a part of the weights; learners hold all of them, "
                "and so does the statistics server after an epoch"
            )
        floats = self._source().view()
        floats.flags.writeable = False
        return {e.name: floats[e.offset : e.offset + e.size].reshape(e.shape) for e in self._layout}


class Called(NamedTuple):
    """Hook of a job: its name in errors, its function, its moments, and whether the job names the role."""

    name: str
    at: At
    every: int
    function: Callable[[Moment], object]
    named: bool = False


class RoleHooks:
    """Caller of the hooks of one role.

    Args:
        hooks: Hooks in the order of the job.
        job: Name of the job.
        id_: Id of the role in the plan.
        role: The role.
        layout: Layout of the flat weights. None: the role holds a part of them.
        replica: Whether the role is a learner that updates weights of its own, and so has one moment for mini-batch and
            update.
        decide: Function of `[decisions]`, on the statistics server. None: there is none.
    """

    def __init__(
        self,
        hooks: Sequence[Called],
        job: str,
        id_: int,
        role: Role,
        layout: Sequence[Entry] | None,
        *,
        replica: bool,
        decide: Called | None = None,
    ) -> None:
        self._hooks, self._job, self._id, self._role, self._layout = hooks, job, id_, role, layout
        self._replica, self._decide = replica, decide
        self._history: list[dict[str, Any]] = []  # rows of recorded epochs
        self.output = ""
        self._minibatch: dict[str, Any] = {}  # of a replica, until it updates
        self._metrics: Rows | None = None  # of the epoch that is recorded next
        self._last: dict[str, Any] = {}  # what is known of the run so far, for its end
        self._source: ReadFloats | None = None  # of the weights that the role holds at the end

    def updated(self, action: Update, source: ReadFloats, replica: ReadFloats | None = None) -> None:
        """Calls the hooks of an update, for an owner of weights. A hook of a named role may request its replica."""
        self._last, self._source = {"timestamp": action.timestamp, "time_s": action.time_s}, source
        more = {"epoch": action.epoch, "samples": action.samples, "learning_rate": action.learning_rate}
        about = self._last | more | self._minibatch
        self._call("update", action.timestamp, f"update {action.timestamp}", source, about, replica)

    def computed(self, action: Compute | BackpropFirstStage, found: Computed, source: ReadFloats) -> None:
        """Calls the hooks of a gradient, for a learner."""
        minibatch = {"step": action.step, "loss": found.loss, "errors": found.errors}
        if self._replica:
            self._minibatch = minibatch
            return
        self._last = {"timestamp": action.timestamp, "time_s": action.time_s}
        about = self._last | minibatch | {"samples": found.samples}
        self._call("update", action.step + 1, f"mini-batch {action.step}", source, about)

    def recall(self, epochs: Rows) -> None:
        """Takes note of the rows of epochs from before the checkpoint that the run resumes from."""
        if self._decide is not None:
            self._history += map(_plain, epochs)

    def recorded(self, action: Record, weights: Callable[[int, str], Floats | None]) -> Decided | None:
        """Calls the hooks of an epoch, for the statistics server, and the function that decides changes of the job.

        Args:
            action: Record of rows.
            weights: Function that returns the floats of a role's buffer.

        Returns:
            The answer of that function to an epoch, or None if there is no such function.
        """
        if action.table == "metrics":
            self._metrics = action.rows
        if action.table != "epochs":
            return None
        row = _plain(action.rows[0])
        number = row["epoch"]
        self._last = {name: row[name] for name in ("timestamp", "time_s", "epoch")}
        about = {**self._last, "row": row, "metrics": _metrics(self._metrics, number)}
        source = self._floats(action.weights, weights)
        self._call("epoch", number, f"epoch {number}", source, about)
        if self._decide is None:
            return None
        self._history.append(row)
        moment = self._moment("epoch", source, {**about, "history": tuple(self._history)})
        answer = self._ask(self._decide, moment, f"epoch {number}")
        try:
            change = "" if answer is None else _as_json(answer)
        except ValueError as error:
            text = f"{self._role.title}: {self._decide.name} of [decisions] returned {error} at epoch {number}"
            raise HookError(f"{text}; use None, or a table such as {{'optimizer': {{'learning_rate': 0.1}}}}") from None
        return Decided(number, row["timestamp"], row["time_s"], change)

    def finished(self, action: Finish, weights: Callable[[int, str], Floats | None]) -> None:
        """Calls the hooks of the end, for the statistics server."""
        row = _plain(action.totals[0])
        self._last |= {"timestamp": row["timestamp"], "time_s": row["time_s"], "row": row}
        self._source = self._floats(action.weights, weights)

    def ended(self) -> None:
        """Calls the hooks of the end of this role."""
        self._call("end", 1, "the end", self._source, self._last)

    def _floats(self, buffer: str | None, weights: Callable[[int, str], Floats | None]) -> ReadFloats | None:
        floats = None if buffer is None else weights(self._id, buffer)
        return None if floats is None else lambda: floats

    def _call(
        self,
        at: At,
        number: int,
        which: str,
        source: ReadFloats | None,
        about: Mapping[str, Any],
        replica: ReadFloats | None = None,
    ) -> None:
        for hook in self._hooks:
            if hook.at != at or number % hook.every:
                continue
            floats = source if replica is None or not hook.named else replica
            self._ask(hook, self._moment(at, floats, about), which)

    def _moment(self, at: At, source: ReadFloats | None, about: Mapping[str, Any]) -> Moment:
        role = self._role
        return Moment(
            at,
            role.name,
            role.world_rank,
            self._job,
            **about,
            output=self.output,
            _layout=self._layout,
            _source=source,
        )

    def _ask(self, hook: Called, moment: Moment, which: str) -> object:
        """Calls a function of the user's, and returns what it returns."""
        try:
            return hook.function(moment)
        except Interrupted:
            raise
        except BaseException as error:  # sys.exit too: all of it is the user's
            who, what = self._role.title, f"{type(error).__name__}: {error}".rstrip(": ")
            ours = hook.name in Hook.SHIPPED
            whose = "" if ours else ", which is the user's own code,"
            kind = "function" if hook is self._decide else "hook"
            text = f"{who}: {kind} {hook.name}{whose} failed at {which}: {what}"
            raise HookError(text) from (None if ours and isinstance(error, RudraError) else error)


def hooks_of(job: Job, plan: Plan, roles: Collection[int], layout: Sequence[Entry]) -> dict[int, RoleHooks]:
    """Returns the hooks of some roles of one process, by role. Roles without hooks are not included.

    Args:
        job: Resolved job.
        plan: Role assignment.
        roles: Ids of the roles.
        layout: Layout of the flat weights.

    Raises:
        ConfigError: The callable does not exist, or does not accept the arguments of a hook.
    """
    found: dict[int, list[Called]] = {}
    here = set(roles)
    decide = None
    if job.decisions.given and plan.statistics in here:
        name, function = _function("[decisions] call", job.decisions.call, job.decisions.options)
        decide, found[plan.statistics] = Called(name, "epoch", 1, function), []
    for place, hook in enumerate(job.hooks):
        if mine := here.intersection(hook.roles(plan)):
            name, function = _function(f"[hooks] {place}.call", hook.call, hook.options, Hook.SHIPPED)
            called = Called(name, hook.at, hook.every, function, hook.role is not None)
            for role in mine:
                found.setdefault(role, []).append(called)
    made = {}
    for role, hooks in found.items():
        kind = plan.traits(role)
        replica = kind.trains and kind.updates
        partial_ = role in plan.owners or plan.stage is not None
        whole = None if plan.parted and partial_ and role != plan.statistics else layout
        decides = decide if role == plan.statistics else None
        made[role] = RoleHooks(hooks, job.name, role, plan.roles[role], whole, replica=replica, decide=decides)
    return made


def _function(
    where: str, named: Named | None, options: Mapping[str, Any], shipped: Mapping[str, str] = {}
) -> tuple[str, Callable[[Moment], object]]:
    """Returns the name and the function of a key of the job, which is called with a moment and these options."""
    found = choose(where, named, shipped)
    name = named if isinstance(named, str) else getattr(named, "__qualname__", type(named).__qualname__)
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, and cannot be called")
    for module, extra in getattr(found, "requires", {}).items():
        if find_spec(module) is None:
            raise ConfigError(f"{where}: {name} needs {module}: pip install '{extra}'")
    with suppress(ValueError):  # some built-in callables have no signature
        signature = inspect.signature(found)
        try:
            signature.bind(None, **options)
        except TypeError as error:
            text = misfit(error, signature, options, first=1)
            kind = "hook" if shipped else "function"
            raise ConfigError(f"{where}: {name} is called as {kind}(moment, **options): {text}") from None
    return name, partial(found, **options)


def _as_json(answer: object) -> str:
    """Returns JSON of a table of tables.

    Raises:
        ValueError: The answer is something else. The text names it.
    """
    if not isinstance(answer, Mapping) or not all(isinstance(keys, Mapping) for keys in answer.values()):
        raise ValueError(short(answer))
    try:
        return json.dumps(answer, default=_number, allow_nan=False) if any(answer.values()) else ""
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{short(answer)}, which is not plain") from None


def _number(value: object) -> object:
    """Returns a number or an array of NumPy's or torch's as plain numbers."""
    if callable(plain := getattr(value, "tolist", None)):
        return plain()
    raise TypeError


def _plain(row: np.void) -> dict[str, Any]:
    """Returns a row as numbers and texts."""
    values = zip(row.dtype.names or (), row.item(), strict=True)
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values}


def _metrics(rows: Rows | None, epoch: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for number, _, split, name, value in [] if rows is None else rows.tolist():
        if number == epoch:
            found.setdefault(split.decode(), {})[name.decode()] = value
    return found
