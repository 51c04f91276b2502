"""The roles' tables against what happens: no other state follows than they say, and every one that they say does."""

from random import Random
from typing import Any

import pytest
from clusters import SIZE_BYTES, TrialRows, job, validate
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_clusters import dying, placed, undisturbed

from rudra.core.actions import Evaluate, ExecutorAction
from rudra.core.events import Evaluated, Event, SplitMetrics
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.roles import MACHINES, Machine
from rudra.roles.dormant import DormantLearner
from rudra.roles.machine import States
from rudra.simulation.assembly import assemble
from rudra.simulation.timing_only import TimingOnly
from topologies.kinds import Variant

pytestmark = pytest.mark.slow

Change = tuple[str, str, str]
"""A role's kind, its state, and the next one."""


def change(kind: type[Machine], before: States, after: States) -> Change:
    return kind.__name__, before.name, after.name


ELSEWHERE = {
    *(Variant.ELASTIC_LEARNER, Variant.WORKER, Variant.WINDOW_WORKER),
    *(Variant.COORDINATOR, Variant.WINDOW_COORDINATOR),
}
"""Variants that the runs here do not have."""

NAMED = {
    change(kind, state, after)
    for kind in {DormantLearner, *(machine for variant, machine in MACHINES.items() if variant not in ELSEWHERE)}
    for (state, _), to in kind.TRANSITIONS.items()
    for after in to.states
    if after is not state
}


WIDE = {
    **dict.fromkeys(
        [
            (kind, state, "DONE")
            for kind in ("Learner", "GroupLearner", "ShardedLearner")
            for state in ("EXCHANGING", "COMPUTING")
        ],
        "a learner that was dropped may hear of it only with the end of all; a simulated one is gone at once",
    ),
    ("DormantLearner", "DORMANT", "DONE"): "the end of all follows a learner's account, unless a loss closed it",
    **dict.fromkeys(
        [("FirstShard", state, "INITIALISING") for state in ("TRAINING", "DRAINING")],
        "servers that share the weights never begin anew: a learner can be missed, and the job does not change",
    ),
    **dict.fromkeys(
        [
            (kind, state, "REGROUPING")
            for kind, states in {"Replica": ("HASHING", "READY", "WAITING"), "Averager": ("HASHING", "READY")}.items()
            for state in states
        ],
        "a checkpoint is written in no time here",
    ),
}
"""What the tables allow and no simulation does, and why."""


class Judged(TimingOnly):
    """Tests come out at random."""

    def __init__(self, luck: int) -> None:
        self._random = Random(luck)

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        if isinstance(action, Evaluate):
            score = SplitMetrics("test", self._random.random(), self._random.random())
            return Evaluated(action.buffer, (score,), seconds)
        return super().perform(role, action, seconds)


@st.composite
def eventful(draw: st.DrawFn, run: Job) -> Job:
    """The same with checkpoints, targets, falling rates and dropped learners."""
    every = draw(st.sampled_from(["never", "1 updates", "3 updates", "1 epochs"]))
    tolerance: dict[str, Any] = {"on_learner_loss": draw(st.sampled_from(["continue", "stop"]))}
    alone = run.cluster.learners_per_rank == 1
    if alone and run.protocol.name == "hardsync" and run.topology.name in {"base", "sharded", "adv"}:
        tolerance["straggler_timeout_s"] = draw(st.sampled_from([None, 0.05, 0.5]))
    training: dict[str, Any] = {"evaluate": draw(st.sampled_from([False, True, "always"]))}
    optimizer: dict[str, Any] = {}
    if training["evaluate"]:
        training |= draw(st.sampled_from([{}, {"patience": 1}, {"target": "error <= 0.5", "stop_at_target": True}]))
        optimizer = draw(st.sampled_from([{}, {"schedule": "plateau", "schedule_options": {"patience": 1}}]))
    return run.with_(
        results={"checkpoint_every": every},
        fault_tolerance=tolerance,
        training=training,
        optimizer=optimizer,
        simulation={"evaluation_s": draw(st.sampled_from([0.1, 10.0]))},
    )


def follow(run: Job, training_samples: int, seen: set[Change], luck: int, stop_at: float | None = None) -> None:
    """Runs a job and adds what happened; it may fail because a rank died."""

    def note(machine: Machine, before: States, event: Event) -> None:
        validate(machine, before, event)
        seen.add(change(type(machine), before, machine.state))

    tensors = Judged(luck)
    simulation = assemble(
        run,
        run.plan(nodes_of(run)),
        tensors,
        TrialRows(),
        training_samples=training_samples,
        size_bytes=SIZE_BYTES,
        check=note,
    )
    if stop_at is not None:
        simulation.stop_at(stop_at)
    try:
        simulation.run()
    except RunError as error:
        if not error.lost:
            raise


def alike(topology: str, slow: dict[str, float], *faults: dict[str, float], **options: int) -> Job:
    """Three learners, all weights tested."""
    return job(
        "hardsync" if topology == "groups" else "async",
        3,
        epochs=8,
        topology={"name": topology, "options": options},
        simulation={**slow, "faults": faults},
        training={"evaluate": "always"},
    )


def test_every_change_of_state_that_the_tables_name_happens() -> None:
    seen: set[Change] = set()
    replicas = {"name": "replicas", "options": {}}
    follow(job("sma", 1, topology=replicas), 60, seen, 0)
    follow(alike("base", {}).with_(cluster={"active_learners": 2}), 60, seen, 0)
    alone = {"name": "groups", "options": {"groups": 1}}
    follow(job("hardsync", 1, topology=alone, placement={"cut": 1, "rule": "synchronous"}), 60, seen, 0)
    for placement in ({}, {"cut": 1, "rule": "synchronous"}):
        follow(alike("groups", {"evaluation_s": 10.0}, groups=1).with_(placement=placement), 6, seen, 0)
    for tenths in range(5, 60, 3):  # it dies while all compute, add up and update
        slow = {"compute_s": 1.0, "bandwidth_bytes_per_s": 1e6, "update_s": 1.0, "detection_s": 0.1}
        dying_ = alike("groups", slow, {"learner": 1, "dies_at_s": tenths / 10}, groups=1)
        follow(dying_, 60, seen, 0)
        follow(dying_.with_(placement={"cut": 1, "rule": "synchronous"}), 60, seen, 0)
        for rule, topology in (
            *(("easgd", replicas), ("average", replicas)),
            *(("easgd", {**replicas, "options": {"groups": 1}}), ("average", {**replicas, "options": {"groups": 2}})),
            ("easgd", {"name": "hierarchical", "options": {"blocks": 2}}),
        ):
            follow(dying_.with_(protocol={"name": rule}, topology=topology), 60, seen, 0)
    for tenths in range(0, 40, 7):  # somebody stops it while learners compute, ship, and compute again
        merged = alike("base", {"compute_s": 1.0}).with_(placement={"cut": 1})
        follow(merged, 60, seen, 0, stop_at=tenths / 10)
        follow(merged, 60, seen, 0)
    for tenths in range(15, 40, 4):  # one dies while those who were told to stop still compute
        overlapped = alike("adv*", {"compute_s": 1.0, "detection_s": 0.1}, {"learner": 1, "dies_at_s": tenths / 10})
        follow(overlapped.with_(placement={"cut": 1}), 60, seen, 0, stop_at=tenths / 10 - 0.05)
    for placement in ({}, {"cut": 1}):
        follow(alike("adv*", {"bandwidth_bytes_per_s": 1e6}, outstanding=2).with_(placement=placement), 60, seen, 0)

    @seed(0)
    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def explore(data: st.DataObject) -> None:
        clusters = data.draw(st.sampled_from([undisturbed, dying]))
        run, training_samples = data.draw(
            clusters(data.draw(st.sampled_from(["base", "sharded", "adv", "adv*", "groups"])))
        )
        stop_at = data.draw(st.none() | st.floats(0.0, 2.0))
        run = data.draw(eventful(run))
        if data.draw(st.booleans()):
            run = data.draw(placed(run))
        when = data.draw(st.integers(0, 99))
        if NAMED - seen - WIDE.keys():  # not all have happened yet
            follow(run, training_samples, seen, when, stop_at)

    explore()
    missing = sorted(NAMED - seen - WIDE.keys())
    assert not missing, "\n".join(map(str, missing))
