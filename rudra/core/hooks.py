"""Hooks: the user's own code, called where weights are updated, after epochs and at the end (`[[hooks]]` in a job).

Both drivers call them through what they share, the executors of roles and the recorder. A hook decides nothing: it sees
a `Moment`, and its role waits for it. What it raises ends the run, as the user's error. Two come with Rudra, `csv` and
`tensorboard` (`rudra.results.journals`).
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra.core.events import Compute, Computed, Finish, Record, Update
from rudra.core.layout import Entry
from rudra.core.messages import Rows
from rudra.errors import ConfigError, HookError, Interrupted, RudraError
from rudra.job.job import Job
from rudra.job.tables import Hook
from rudra.plugins import choose, misfit
from topologies import Plan
from topologies.plan import REPLICA, Role

At = Literal["update", "epoch", "end"]
Floats = npt.NDArray[np.float32]
Source = Callable[[], Floats]
"""Gives the floats of a buffer, (size,)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a hook is called with. What is not known at that moment, or not of that role, is None or empty.

    Attributes:
        at: "update", "epoch" or "end".
        role: whose moment it is, such as "learner 3".
        world_rank: of that role.
        job: name of the job.
        timestamp: of the weights.
        time_s: seconds of training, virtual ones in a simulation: when the update, or the learner's computation, began;
            when the epoch ended; at the end, of the last of these.
        epoch: 1, 2, …: the one that the update is of; the one that has ended.
        samples: of the gradients that made the update; of the mini-batch.
        learning_rate: of the update.
        step: number of the learner's mini-batch, from 0.
        loss: mean over the samples of the mini-batch.
        errors: how many of its samples are wrong, each by the share of it; NaN where the task knows no error.
        row: on the statistics server: the epoch's row of /epochs; at the end that of /totals.
        metrics: split -> name -> value: what the test of the epoch's weights measured beside loss and error.
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
    _layout: Sequence[Entry] = field(default=(), repr=False, compare=False)
    _source: Source | None = field(default=None, repr=False, compare=False)

    def weights(self) -> dict[str, Floats]:
        """Parameters, and buffers that travel, by name, read-only, without a copy; empty where the role holds none.

        They are good during the call of the hook alone: copy what is to stay.
        """
        if self._source is None:
            return {}
        floats = self._source().view()
        floats.flags.writeable = False
        return {e.name: floats[e.offset : e.offset + e.size].reshape(e.shape) for e in self._layout}


class Called(NamedTuple):
    """One hook: what errors call it, and when what is called."""

    name: str
    at: At
    every: int
    function: Callable[[Moment], object]


class RoleHooks:
    """Calls the hooks of one role.

    Args:
        hooks: in the job's order.
        job: its name.
        id_: the role's place in the plan.
        role: whose moments they are.
        layout: of the flat weights.
        replica: it is a learner that updates weights of its own, and has one moment for mini-batch and update.
    """

    def __init__(
        self, hooks: Sequence[Called], job: str, id_: int, role: Role, layout: Sequence[Entry], *, replica: bool
    ) -> None:
        self._hooks, self._job, self._id, self._role, self._layout = hooks, job, id_, role, layout
        self._replica = replica
        self._minibatch: dict[str, Any] = {}  # of a replica, until it updates
        self._metrics: Rows | None = None  # of the epoch that is recorded next
        self._last: dict[str, Any] = {}  # what is known of the run so far, for its end
        self._source: Source | None = None  # of the weights that the role holds at the end

    def updated(self, action: Update, source: Source) -> None:
        """The role, which owns weights, has updated them."""
        self._last, self._source = {"timestamp": action.timestamp, "time_s": action.time_s}, source
        more = {"epoch": action.epoch, "samples": action.samples, "learning_rate": action.learning_rate}
        about = self._last | more | self._minibatch
        self._call("update", action.timestamp, f"update {action.timestamp}", source, about)

    def computed(self, action: Compute, found: Computed, source: Source) -> None:
        """The role, a learner, has computed a gradient."""
        minibatch = {"step": action.step, "loss": found.loss, "errors": found.errors}
        if self._replica:
            self._minibatch = minibatch
            return
        self._last = {"timestamp": action.timestamp, "time_s": action.time_s}
        about = self._last | minibatch | {"samples": found.samples}
        self._call("update", action.step + 1, f"mini-batch {action.step}", source, about)

    def recorded(self, action: Record, weights: Callable[[int, str], Floats | None]) -> None:
        """The role, the statistics server, has recorded rows; `weights` gives the floats of a role's buffer."""
        if action.table == "metrics":
            self._metrics = action.rows
        elif action.table == "epochs":
            row = _plain(action.rows[0])
            number = row["epoch"]
            self._last = {name: row[name] for name in ("timestamp", "time_s", "epoch")}
            about = {**self._last, "row": row, "metrics": _metrics(self._metrics, number)}
            self._call("epoch", number, f"epoch {number}", self._floats(action.weights, weights), about)

    def finished(self, action: Finish, weights: Callable[[int, str], Floats | None]) -> None:
        """The role, the statistics server, has recorded everything."""
        row = _plain(action.totals[0])
        self._last |= {"timestamp": row["timestamp"], "time_s": row["time_s"], "row": row}
        self._source = self._floats(action.weights, weights)

    def ended(self) -> None:
        """The role is done."""
        self._call("end", 1, "the end", self._source, self._last)

    def _floats(self, buffer: str | None, weights: Callable[[int, str], Floats | None]) -> Source | None:
        floats = None if buffer is None else weights(self._id, buffer)
        return None if floats is None else lambda: floats

    def _call(self, at: At, number: int, which: str, source: Source | None, about: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            if hook.at != at or number % hook.every:
                continue
            role = self._role
            moment = Moment(at, role.name, role.world_rank, self._job, **about, _layout=self._layout, _source=source)
            try:
                hook.function(moment)
            except Interrupted:
                raise
            except BaseException as error:  # sys.exit too: all of it is the user's
                who, what = f"{role.name} (rank {role.world_rank})", f"{type(error).__name__}: {error}".rstrip(": ")
                ours = hook.name in Hook.SHIPPED
                whose = "" if ours else ", which is the user's own code,"
                text = f"{who}: hook {hook.name}{whose} failed at {which}: {what}"
                raise HookError(text) from (None if ours and isinstance(error, RudraError) else error)


def hooks_of(job: Job, plan: Plan, roles: Collection[int], layout: Sequence[Entry]) -> dict[int, RoleHooks]:
    """The hooks of some roles of one process, by role; of roles without any there is nothing.

    Args:
        job: resolved.
        plan: who is who.
        roles: their ids.
        layout: of the flat weights.

    Raises:
        ConfigError: there is no such callable, or it does not take what it would be called with.
    """
    found: dict[int, list[Called]] = {}
    here = set(roles)
    for place, hook in enumerate(job.hooks):
        if mine := here.intersection(hook.roles(plan)):
            called = _called(place, hook)
            for role in mine:
                found.setdefault(role, []).append(called)
    return {
        role: RoleHooks(hooks, job.name, role, plan.roles[role], layout, replica=plan.about(role) is REPLICA)
        for role, hooks in found.items()
    }


def _called(place: int, hook: Hook) -> Called:
    where, named = f"[hooks] {place}.call", hook.call
    found = choose(where, named, hook.SHIPPED)
    name = named if isinstance(named, str) else getattr(named, "__qualname__", type(named).__qualname__)
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, and cannot be called")
    for module, extra in getattr(found, "requires", {}).items():
        if find_spec(module) is None:
            raise ConfigError(f"{where}: {name} needs {module}: pip install '{extra}'")
    with suppress(ValueError):  # some built-in callables have no signature
        signature = inspect.signature(found)
        try:
            signature.bind(None, **hook.options)
        except TypeError as error:
            text = misfit(error, signature, hook.options, first=1)
            raise ConfigError(f"{where}: {name} is called as hook(moment, **options): {text}") from None
    return Called(name, hook.at, hook.every, partial(found, **hook.options))


def _plain(row: np.void) -> dict[str, Any]:
    """A row as numbers and texts."""
    values = zip(row.dtype.names or (), row.item(), strict=True)
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values}


def _metrics(rows: Rows | None, epoch: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for number, _, split, name, value in [] if rows is None else rows.tolist():
        if number == epoch:
            found.setdefault(split.decode(), {})[name.decode()] = value
    return found
