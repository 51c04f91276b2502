"""Made-up clusters for hypothesis: any costs, protocol and topology, and learners that die at any time.

Strategies name the simplest value first: hypothesis shrinks to it.
"""

from typing import Any

from clusters import job, timing
from hypothesis import strategies as st
from rules import Bounded, Eager

from rudra.errors import RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.roles import Machine
from rudra.roles.ledger import Owner
from rudra.simulation.checked_run import TrialRows, validate
from rudra.simulation.driver import Check
from topologies.kinds import TREE_SERVER

WIDTHS = st.integers(2, 4)
FAN_OUTS = st.none() | st.integers(1, 4) | st.tuples(st.integers(1, 3), WIDTHS) | st.tuples(WIDTHS, WIDTHS, WIDTHS)
SURVIVABLE: dict[str, list[dict[str, Any]]] = {
    "base": [{}],
    "sharded": [{"shards": 2}, {"shards": 3}, {"shards": 4}],
    "adv": [{"fan_out": 2}, {"fan_out": 3}, {"fan_out": (2, 2)}, {"fan_out": (2, 2, 2)}],
    "adv*": [{}, {"weight_fan_out": 1}, {"fan_out": 2}, {"fan_out": (2, 2), "weight_fan_out": 3}],
    "groups": [{"groups": 1}, {"groups": 2}, {"groups": 3}],
}
"""Topology -> its options where learners die."""

TIMES = st.sampled_from([0.0, 1e-4, 1e-3, 0.05])
COSTS = {
    "compute_s": st.sampled_from([1e-3, 0.05]),
    "jitter": st.sampled_from([0.0, 0.1, 0.9]),
    "latency_s": TIMES,
    "latency_jitter_s": TIMES,
    "bandwidth_bytes_per_s": st.sampled_from([1e6, 1e7, 1e9, 1e13]),  # with the first, a tensor takes 0.35 s
    "nodes": st.sampled_from([None, 1, 2, 3]),
    "servers_on_first_node": st.booleans(),
    "blocking_servers": st.booleans(),
    "local_latency_s": st.sampled_from([None, 0.0, 0.05]),
    "local_bandwidth_bytes_per_s": st.sampled_from([None, 1e5, 1e13]),
    "cores_per_node": st.sampled_from([None, 1, 3]),
    "node_slowdown": st.sampled_from([0.0, 0.5]),
    "straggler_probability": st.sampled_from([0.0, 0.1]),
    "distribution": st.sampled_from(["uniform", "lognormal", "exponential"]),
    "message_s": TIMES,
    "gradient_s": TIMES,
    "update_s": st.sampled_from([0.0, 1e-3, 0.05, 0.3]),
    "evaluation_s": st.sampled_from([0.0, 0.01, 1.0, 10.0]),
    "evaluation_core_s": st.sampled_from([0.0, 0.01, 10.0]),
    "detection_s": st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
}


def options_of(topology: str, learners: int) -> st.SearchStrategy[dict[str, Any]]:
    """Any options that a topology takes."""
    if topology == "sharded":
        return st.fixed_dictionaries({"shards": st.integers(1, 4)})
    if topology == "groups":
        groups = st.integers(1, learners)
        return st.fixed_dictionaries({"groups": groups, "reduction": st.sampled_from(["ordered", "mpi"])})
    tree = {} if topology == "base" else {"fan_out": FAN_OUTS}
    if topology == "adv*":
        tree |= {"weight_fan_out": st.integers(1, 4), "outstanding": st.sampled_from([None, 1, 2, 3])}
    return st.fixed_dictionaries(tree)


@st.composite
def cluster(draw: st.DrawFn, topology: str, learners: int, options: dict[str, Any], rules: list[Any]) -> Job:
    """A job for so many learners, under one of the rules."""
    if topology == "adv*":
        rules = [rule for rule in rules if rule != "hardsync"]
    protocol = draw(st.sampled_from(rules))
    slowdown = {i: draw(st.sampled_from([1.0, 3.0, 20.0])) for i in range(learners)}
    return job(
        protocol,
        learners,
        n=draw(st.integers(1, options.get("groups", learners))) if protocol == "softsync" else None,
        epochs=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**20)),
        topology={"name": topology, "options": options},
        simulation={"slowdown": slowdown, **draw(st.fixed_dictionaries(COSTS))},
        results={"report_s": draw(st.sampled_from([0.0, 0.25, 100.0]))},
        training={"evaluate": draw(st.booleans())},
    )


@st.composite
def undisturbed(draw: st.DrawFn, topology: str) -> tuple[Job, int]:
    """A job in which nobody dies, and the samples of an epoch."""
    learners = draw(st.integers(1, 7 if topology in {"base", "sharded"} else 11))
    options = draw(options_of(topology, learners))
    run = draw(cluster(topology, learners, options, ["hardsync", "softsync", "async"]))
    return run, draw(st.integers(1, 90))


@st.composite
def survivable(draw: st.DrawFn, topology: str) -> Job:
    """A job that can go on without some of its learners."""
    learners = draw(st.integers(1 if topology != "groups" else 3, 11))
    options = draw(st.sampled_from(SURVIVABLE[topology]))
    rules = ["hardsync", "softsync", "async", Eager, *([Bounded] if topology in {"base", "sharded"} else [])]
    return draw(cluster(topology, learners, options, ["hardsync"] if options.get("groups") == 1 else rules))


@st.composite
def dying(draw: st.DrawFn, topology: str) -> tuple[Job, int]:
    """A job with learners that die at any time of its run, and the samples of an epoch."""
    run, samples = draw(survivable(topology)), draw(st.integers(1, 150))
    run = run.with_(cluster={"learners_per_rank": draw(st.sampled_from([1, 1, 2, 3]))})
    return draw(faulty(run, samples)), samples


@st.composite
def faulty(draw: st.DrawFn, run: Job, samples: int) -> Job:
    """The same job with learners and servers of a tree that die: two at once now and then, or before training."""
    began_s, ended_s = duration(run, samples)
    part = st.sampled_from([0.3, 0.6]) | st.floats(-0.01, 1.0)
    moments = part.map(lambda part: max(0.0, began_s + part * (ended_s - began_s)))
    learners = st.integers(0, run.learners - 1)
    most = draw(st.sampled_from([1, 2, run.learners]))
    dead = draw(st.lists(learners, min_size=1, max_size=most, unique=True))
    faults: list[dict[str, Any]] = [{"learner": i, "dies_at_s": draw(moments)} for i in dead]
    servers = [role.index for role in run.plan(nodes_of(run)).roles if role.kind == TREE_SERVER]
    if servers:
        falling = draw(st.lists(st.sampled_from(servers), max_size=2, unique=True))
        faults += [{"tree_server": i, "dies_at_s": draw(moments)} for i in falling]
    if draw(st.booleans()):
        faults.append({"learner": 0, "slows_at_s": draw(moments), "factor": 10.0, "for_s": ended_s / 4})
    return run.with_(simulation={"faults": faults})


def duration(run: Job, samples: int) -> tuple[float, float]:
    """When training begins, and when the run ends."""
    began_s = 0.0

    def look(machine: Machine, *about: object) -> None:
        nonlocal began_s
        if isinstance(machine, Owner) and machine.id == machine.plan.server:
            began_s = machine.ledger.clock.start_time

    ended_s = timing(run, samples, look).time_s
    return began_s, ended_s


@st.composite
def placed(draw: st.DrawFn, run: Job) -> Job:
    """The same job with the last layers at a stage server, or at several."""
    rule = draw(st.sampled_from(["merged", *(["synchronous"] if run.protocol.name == "hardsync" else [])]))
    run = run.with_(fault_tolerance={"straggler_timeout_s": None})
    if rule == "merged" and run.optimizer.plateau is not None:
        run = run.with_(optimizer={"schedule": "step", "schedule_options": {}})
    several = rule == "synchronous" and run.topology.name in ("base", "sharded")
    servers = draw(st.integers(1, run.learners)) if several else 1
    clips = run.topology.name in ("base", "adv", *(["groups", "adv*"] if rule == "merged" else []))
    optimizer = {"clip_norm": draw(st.sampled_from([None, 1.0]))} if clips else {}
    return run.with_(placement={"cut": 1, "rule": rule, "servers": servers}, optimizer=optimizer)


def outlived(run: Job, samples: int, after: Check = validate) -> TrialRows | None:
    """The record of a run; None: those that died cannot be done without."""
    try:
        return timing(run, samples, after)
    except RunError as error:
        if not error.lost:
            raise
        return None
