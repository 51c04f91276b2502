"""Record of a run in its result file, and the comparison of a replay with it."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rudra.core.actions import Finish, Record, StoreEpochWeights, TableName
from rudra.core.decisions import recorded
from rudra.core.messages import Rows
from rudra.results.reader import Results
from topologies import Plan

MEASURED = ("time_s", "update_s", "evaluation_began_s", "evaluation_s", "wait_s", "compute_s")
"""Columns with measured times, which differ in a replay."""

NORM_KEYS: dict[TableName, list[str]] = {
    "gradient_norms": ["learner", "samples", "step"],
    "update_norms": ["timestamp"],
}
"""Columns that identify a row of norms."""

NOTICED_S = 1.0
"""Time within which all ranks notice that a rank has died."""


class Difference(NamedTuple):
    """First place where a replay differs from the record.

    Attributes:
        update: Timestamp of the first update that differs, or 0 for the initial weights.
        text: Description of the difference.
    """

    update: int
    text: str


class RecordedRun:
    """Record of a run, as far as it is complete: a run that was killed may have lost rows at the end.

    Attributes:
        plan: Plan that a replay follows.
        losses: Events of roles that died. Roles are named as in `plan`.
        decided: Changes of the job that were decided during the run.
        restarts: Numbers of applied gradients at each resume from a checkpoint.
        norms: Rows of norms, by table.
    """

    def __init__(self, results: Results) -> None:
        self.path, self.attributes, self.state = results.path, results.attributes, results.state
        self.gradients, self.updates = results.recorded("gradients"), results.recorded("updates")
        self.norms = {name: results.recorded(name) for name in NORM_KEYS}
        self.epochs, self.roles = results.epochs, results.roles
        self.finished = self.state["status"] == "finished"
        self.updates_count = len(self.updates)
        if self.finished:
            self.updates_count = int(results.totals["timestamp"][0])
        else:
            needed = np.cumsum(self.updates["gradients"])
            self.updates_count = int(np.searchsorted(needed, len(self.gradients), "right"))
            self._cut(self.updates_count)
        self.recorded = self.updates_count
        events = results.events
        self.changes = events[events["kind"] == b"change"]
        self.decided = recorded(events)
        self.losses = events[np.isin(events["kind"], [b"lost", b"dropped"])]
        self.restarts = frozenset(events["gradients"][np.isin(events["kind"], [b"restart", b"branch"])].tolist())
        self.note = ""
        # The parts of weights at several servers are together the weights of a single server.
        plan = results.plan()
        self.plan, there = plan.unparted()
        self.losses["role"] = [there.get(role, role) for role in self.losses["role"].tolist()]
        several = len(plan.stages) > 1
        self.stages, self.events = _in_order(results.stages, self.gradients) if several else results.stages, events
        self.merged = results.job.get("placement", {}).get("rule") == "merged"
        if self.plan.stage is not None:
            self._stop_where_stages_are_unknown(events)
        if len(self.losses):
            self._stop_where_none_can_follow(events, self.plan)

    def _cut(self, updates: int) -> None:
        """Discards the records after an update."""
        self.updates_count = updates
        self.updates = self.updates[:updates]
        self.gradients = self.gradients[: int(self.updates["gradients"].sum())]

    def _stop_where_stages_are_unknown(self, events: Rows) -> None:
        """Cuts the record where a stage server's state is unknown: when a learner died, or when the run was resumed.

        A stage server with merged layers is ahead of the first layers. A resumed run computes these mini-batches again,
        so rows of `/stages` are missing from before the checkpoint.
        """
        kinds = [b"lost", *([b"restart", b"branch"] if self.merged else [])]
        for row in events[np.isin(events["kind"], kinds)][:1]:
            self.finished = False
            self._cut(min(int(row["timestamp"]), self.updates_count))
            self.note = "; the work of the stage server from there on is not recorded"
            self.losses = self.losses[:0]
        gaps = np.flatnonzero(np.diff(self.stages["timestamp"], prepend=0) > 1)
        if self.merged and len(gaps):
            self.stages = self.stages[: gaps[0]]
            known = _mini_batches(self.stages)
            unknown = (row["update"] for row in self.gradients if (row["learner"], row["step"]) not in known)
            self._cut(min(next(unknown, self.updates_count + 1) - 1, self.updates_count))

    def _stop_where_none_can_follow(self, events: Rows, plan: Plan) -> None:
        """Cuts the record where a replay cannot follow: at a restart with roles that had died, a loss in a tree, or a
        change of the plan."""
        first = self.losses[0]
        again = events[np.isin(events["kind"], [b"restart", b"branch"]) & (events["gradients"] >= first["gradients"])]
        ends = [(int(row["timestamp"]), "the run was restarted with learners that had died") for row in again[:1]]
        regrouped = [row for row in self.losses if not plan.expendable(row["role"])]
        if regrouped:
            name = plan.roles[regrouped[0]["role"]].name
            ends.append((int(regrouped[0]["timestamp"]), f"{name} died, and the remaining ranks regrouped"))
        elif any(timestamp in self.changes["timestamp"] for timestamp in self.losses["timestamp"]):
            at = next(row for row in self.losses if row["timestamp"] in self.changes["timestamp"])
            ends.append((int(at["timestamp"]), "a learner died while all roles restarted"))
        elif any(role.kind_traits.relays for role in plan.roles):
            before = int((self.updates["time_s"] < first["time_s"] - NOTICED_S).sum())
            ends.append((before, "a learner died, and servers of a tree do not record when they noticed it"))
        if ends:
            update, why = min(ends)
            self.finished = False
            self._cut(min(update, self.updates_count))
            self.note = f"; {why}"


def _mini_batches(rows: Rows) -> set[tuple[int, int]]:
    """Returns the learners and steps of the rows' mini-batches."""
    return set(zip(rows["learner"].tolist(), rows["step"].tolist(), strict=True))


def _in_order(stages: Rows, gradients: Rows) -> Rows:
    """Returns the rows of several stage servers in the order of a single one, up to the first row that one of them
    lost."""
    places = {(row["learner"], row["step"]): place for place, row in enumerate(stages)}
    wanted = ((row["learner"], row["step"]) for row in gradients)
    return stages[[places[key] for key in takewhile(places.__contains__, wanted)]]


class Left(Exception):
    """Raised when a replay differs from the record."""

    def __init__(self, update: int, text: str) -> None:
        super().__init__(text)
        self.difference = Difference(update, text)


class Comparison:
    """Recorder of a replay, which compares new rows with the recorded rows.

    Args:
        record: Record of the run.
        show: Function called after every finished update.

    Attributes:
        norms: Rows of norms that the replay has made, by table.
    """

    def __init__(self, record: RecordedRun, show: Callable[[], object]) -> None:
        self._record, self._show = record, show
        self._seen = {"gradients": 0, "updates": 0, "stages": 0}
        self.norms: dict[TableName, list[Rows]] = {name: [] for name in NORM_KEYS}
        self._known: dict[TableName, dict[Any, Any]] = {
            name: dict(zip(rows[NORM_KEYS[name]].tolist(), rows, strict=True)) for name, rows in record.norms.items()
        }
        self._hashes = {int(row["epoch"]): row["weights_sha256"] for row in record.epochs}

    def record(self, action: Record) -> None:
        if action.table == "stages":
            known = len(self._record.stages) - self._seen["stages"]  # a stage server that was killed may have lost some
            self._compare(action.rows[:known], self._record.stages, "stages", "timestamp")
        elif action.table == "gradients":
            self._compare(action.rows, self._record.gradients, "gradients", "update")
        elif action.table == "updates":
            self._compare(action.rows, self._record.updates, "updates", "timestamp")
            self._show()
        elif action.table in self.norms:
            self.norms[action.table].append(action.rows)
            self._compare_norms(action.rows, action.table)
        elif action.table == "epochs":
            for row in action.rows:
                then, now = self._hashes.get(int(row["epoch"])), row["weights_sha256"]
                if then and then != now:  # empty if the statistics server was late
                    differs(int(row["timestamp"]), f"weights of epoch {row['epoch']}, sha256", then, now)

    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...

    def _compare_norms(self, now: Rows, table: TableName) -> None:
        """Compares norms with the record, as far as it has them. A replay may measure more, or fewer."""
        keys = NORM_KEYS[table]
        for row in now:
            then = self._known[table].get(row[keys].item())
            if then is None:
                continue
            for name in row.dtype.names or ():
                if not np.isnan(then[name]) and then[name] != row[name]:
                    self._differs_in_norm(row, name.replace("_", " "), then[name], row[name])

    def _differs_in_norm(self, row: np.void, what: str, then: float, now: float) -> NoReturn:
        if "timestamp" in (row.dtype.names or ()):
            differs(int(row["timestamp"]), f"gradient of the update, {what}", then, now)
        applied = self._record.gradients
        its = (applied["learner"] == row["learner"]) & (applied["step"] == row["step"])
        who = f"gradient of learner {row['learner']}, step {row['step']}"
        differs(int(applied["update"][its].max(initial=0)), f"{who}: {what}", then, now)

    def _compare(self, now: Rows, then: Rows, table: str, clock: str) -> None:
        """Compares rows with the next rows of a table."""
        first = self._seen[table]
        self._seen[table] += len(now)
        then = then[first : first + len(now)].copy()
        for name in set(MEASURED) & set(now.dtype.names or ()):
            then[name] = now[name][: len(then)]
        if now.tobytes() == then.tobytes():
            return
        for place, row in enumerate(now):
            update = int(row[clock])
            if place >= len(then):
                raise Left(update, f"a row of /{table} is missing in the record")
            for name in row.dtype.names or ():
                if row[name].tobytes() != then[place][name].tobytes():
                    what = {"digest": "weights, digest"}.get(name, name.replace("_", " "))
                    who = f"gradient of learner {row['learner']}, step {row['step']}: " if table == "gradients" else ""
                    differs(update, who + what, then[place][name], row[name])


def compare_weights(update: int, which: str, then: str, now: str) -> None:
    if then != now:
        differs(update, f"{which} weights, sha256", then, now)


def differs(update: int, what: str, then: Any, now: Any) -> NoReturn:
    then, now = (
        value.decode(errors="backslashreplace") if isinstance(value, bytes) else value for value in (then, now)
    )
    raise Left(update, f"{what}: {then} in the record, {now} in the replay")
