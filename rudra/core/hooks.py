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

from rudra.core.events import BackpropFirstStage, Compute, Computed, Finish, Record, Update
from rudra.core.layout import Entry
from rudra.core.messages import Rows
from rudra.errors import ConfigError, HookError, Interrupted, RudraError
from rudra.job.job import Job
from rudra.job.tables import Hook
from rudra.plugins import choose, misfit
from topologies import Plan
from topologies.plan import Role

At = Literal["update", "epoch", "end"]
Floats = npt.NDArray[np.float32]
ReadFloats = Callable[[], Floats]
"""Gives the floats of a buffer, (size,)."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a hook is called with. Fields that do not apply to the moment or to the role are None or empty.

    Attributes:
        at: kind of the moment: `"update"`, `"epoch"` or `"end"`.
        role: name of the role that calls the hook, such as `"learner 3"`.
        world_rank: MPI rank that hosts the role.
        job: name of the job.
        timestamp: timestamp of the weights: the number of updates that made them.
        time_s: training time in seconds, virtual in a simulation. At an update: when the update, or the learner's
            computation, began. At an epoch: when the epoch ended. At the end: that of the role's last moment.
        epoch: number of the epoch, from 1: that of the update, or the one that has ended.
        samples: number of samples: those of the update's gradients, or of the learner's mini-batch.
        learning_rate: learning rate of the update, after schedule, warm-up and modulation.
        step: number of the mini-batch among those of the learner, from 0.
        loss: mean loss over the samples of the mini-batch.
        errors: wrong samples of the mini-batch, each counted by the share of it that is wrong; NaN where the task knows
            no error.
        row: column -> value, on the statistics server alone: at an epoch the epoch's row of `/epochs`, at the end the
            row of `/totals` (`docs/results.md` lists the columns).
        metrics: split (`"test"`, `"validation"`) -> metric -> value: what the test of the epoch's weights measured
            beside loss and error.
        output: name of the result file without its directory and suffix.
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
    _layout: Sequence[Entry] | None = field(default=(), repr=False, compare=False)
    _source: ReadFloats | None = field(default=None, repr=False, compare=False)

    def weights(self) -> dict[str, Floats]:
        """The weights of the moment, as views without a copy.

        The arrays are read-only, and valid only during the call of the hook: copy what you keep.

        Returns:
            Name -> array float32 in the tensor's own shape, of all parameters and of the buffers that travel with the
            gradients. Empty where the role holds no weights.

        Raises:
            RudraError: the role holds a part of them alone (topology `sharded`).
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
    """One hook: what errors call it, when what is called, and whether the job names the role whose moments count."""

    name: str
    at: At
    every: int
    function: Callable[[Moment], object]
    named: bool = False


class RoleHooks:
    """Calls the hooks of one role.

    Args:
        hooks: in the job's order.
        job: its name.
        id_: the role's place in the plan.
        role: whose moments they are.
        layout: of the flat weights; None: the role holds a part of them.
        replica: it is a learner that updates weights of its own, and has one moment for mini-batch and update.
    """

    def __init__(
        self, hooks: Sequence[Called], job: str, id_: int, role: Role, layout: Sequence[Entry] | None, *, replica: bool
    ) -> None:
        self._hooks, self._job, self._id, self._role, self._layout = hooks, job, id_, role, layout
        self._replica = replica
        self.output = ""
        self._minibatch: dict[str, Any] = {}  # of a replica, until it updates
        self._metrics: Rows | None = None  # of the epoch that is recorded next
        self._last: dict[str, Any] = {}  # what is known of the run so far, for its end
        self._source: ReadFloats | None = None  # of the weights that the role holds at the end

    def updated(self, action: Update, source: ReadFloats, replica: ReadFloats | None = None) -> None:
        """The role, which owns weights, has updated them; who names it may want its replica, if it has one."""
        self._last, self._source = {"timestamp": action.timestamp, "time_s": action.time_s}, source
        more = {"epoch": action.epoch, "samples": action.samples, "learning_rate": action.learning_rate}
        about = self._last | more | self._minibatch
        self._call("update", action.timestamp, f"update {action.timestamp}", source, about, replica)

    def computed(self, action: Compute | BackpropFirstStage, found: Computed, source: ReadFloats) -> None:
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
            role = self._role
            floats = source if replica is None or not hook.named else replica
            moment = Moment(
                at,
                role.name,
                role.world_rank,
                self._job,
                **about,
                output=self.output,
                _layout=self._layout,
                _source=floats,
            )
            try:
                hook.function(moment)
            except Interrupted:
                raise
            except BaseException as error:  # sys.exit too: all of it is the user's
                who, what = role.title, f"{type(error).__name__}: {error}".rstrip(": ")
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
    made = {}
    for role, hooks in found.items():
        kind = plan.traits(role)
        replica = kind.trains and kind.updates
        partial_ = role in plan.owners or plan.stage is not None
        whole = None if plan.parted and partial_ and role != plan.statistics else layout
        made[role] = RoleHooks(hooks, job.name, role, plan.roles[role], whole, replica=replica)
    return made


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
    return Called(name, hook.at, hook.every, partial(found, **hook.options), hook.role is not None)


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
