"""The simulator itself: what its network and its clock promise, with roles of a few lines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
import pytest
from clusters import TrialRows, job, timing

from protocols import Clock, Protocol
from rudra.core.actions import Accumulate, Action, Compute, ExecutorAction, Fail, Halt, Hash, Receive, Send, Update
from rudra.core.events import Computed, Event, Hashed, Received, Sent, Started, Updated
from rudra.core.messages import PlateauReached, PushedGradient, Snapshot, SnapshotCredit
from rudra.core.work import Work
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.roles import Machine
from rudra.simulation.costs import CostModel
from rudra.simulation.driver import Simulation
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan, Role
from topologies.kinds import LEARNER, PARAMETER_SERVER

Seen = tuple[float, str]

WORK = Work(0, 0, 4, 4)


class State(Enum):
    ONLY = auto()


class Scripted(Machine):
    """A role that does what a function says and keeps what happened and when."""

    TRANSITIONS: ClassVar[Any] = {}

    def __init__(self, role: int, plan: Plan, script: Callable[[Event], list[Action]]) -> None:
        super().__init__(role, plan)
        self.state = State.ONLY
        self.script = script
        self.seen: list[tuple[float, Event]] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        self.seen.append((now, event))
        return self.script(event)

    def at(self, kind: type[Event]) -> list[float]:
        return [now for now, event in self.seen if isinstance(event, kind)]


@dataclass
class Transfers(TimingOnly):
    """Keeps what happened to buffers, in order."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        return Hashed(f"{role} {action.buffer}") if isinstance(action, Hash) else super().perform(role, action, seconds)

    def lent(self, role: int, buffer: str) -> None:
        self.log.append(("lent", role, buffer))

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        self.log.append(("transfer", source, source_buffer, to, to_buffer))

    def sent(self, role: int, buffer: str) -> None:
        self.log.append(("sent", role, buffer))


COSTS = {
    "compute_s": 5.0,
    "jitter": 0.0,
    "latency_s": 0.25,
    "bandwidth_bytes_per_s": 100.0,
    "message_s": 0.0,
    "update_s": 0.0,
}


def simulate(
    *scripts: Callable[[Event], list[Action]], costs: dict[str, Any] | None = None, seed: int = 0
) -> tuple[list[Scripted], Transfers, float]:
    run = Job(cluster={"learners": 2}, simulation={**COSTS, **(costs or {})})
    learners = (Role(LEARNER, i, 1 + i, 0, node=node) for i, node in enumerate(nodes_of(run)))
    plan = Plan((Role(PARAMETER_SERVER, 0, 0), *learners))
    machines = {i: Scripted(i, plan, script) for i, script in enumerate(scripts)}
    tensors = Transfers()
    model = CostModel(run.simulation, plan, 4)
    simulation = Simulation(plan, machines, tensors, TrialRows(), model, size_bytes=100, seed=seed)
    return list(machines.values()), tensors, simulation.run()


def tensor(to: int, value: int = 0) -> Send:
    return Send(to, PushedGradient(9, 0, value, ()), "mine")


def once(*actions: Action) -> Callable[[Event], list[Action]]:
    return lambda event: [*actions, Halt()] if isinstance(event, Started) else []


def computing(event: Event) -> list[Action]:
    """Computes one gradient."""
    return [Compute(0, WORK, "w", "g")] if isinstance(event, Started) else [Halt()]


def collecting(count: int, value: Callable[[Any], Any], got: list[Any]) -> Callable[[Event], list[Action]]:
    """Keeps a value of each message, up to so many."""

    def script(event: Event) -> list[Action]:
        if isinstance(event, Received):
            got.append(value(event.message))
        return [Halt()] if len(got) == count else []

    return script


def test_a_transfer_waits_for_a_posted_buffer() -> None:
    """Posted at 5; the transfer itself takes 1."""

    def late(event: Event) -> list[Action]:
        match event:
            case Started():
                return [Compute(0, WORK, "weights", "gradient")]
            case Computed():
                return [Receive("theirs", gradient=True)]
        return [Halt()]

    def sender(event: Event) -> list[Action]:
        return [tensor(1)] if isinstance(event, Started) else [Halt()]

    (server, learner), tensors, end = simulate(sender, late)
    assert learner.at(Received) == server.at(Sent) == [6.0]
    assert end == 6.0
    assert tensors.log == [("lent", 0, "mine"), ("transfer", 0, "mine", 1, "theirs"), ("sent", 0, "mine")]


def test_a_posted_buffer_waits_for_a_tensor() -> None:
    def receiver(event: Event) -> list[Action]:
        return [Receive("theirs", gradient=True)] if isinstance(event, Started) else [Halt()]

    (_, learner), _, _ = simulate(once(tensor(1)), receiver)
    assert learner.at(Received) == [0.25 + 1.0], "latency and transfer"
    assert learner.seen[-1][1] == Received(PushedGradient(9, 0, 0, ()), "theirs")


def test_a_buffer_takes_only_what_its_source_sends() -> None:
    got: list[Any] = []

    def server(event: Event) -> list[Action]:
        if isinstance(event, Started):
            return [Receive("second", 2, gradient=True), Receive("first", 1, gradient=True)]
        got.append((event.message.held, event.buffer))  # type: ignore[union-attr]
        return [Halt()] if len(got) == 2 else []

    simulate(server, once(tensor(0, value=1)), once(tensor(0, value=2)))
    assert sorted(got) == [(1, "first"), (2, "second")]


@pytest.mark.parametrize("latency_jitter_s", [0.0, 1e-9])
@pytest.mark.parametrize("local_latency_s", [None, 0.0])
def test_tensors_that_wait_for_a_buffer_are_taken_in_order_of_arrival(
    latency_jitter_s: float, local_latency_s: float | None
) -> None:
    """Whether arrivals need events of their own or not: learner 1 sends at 0, the server at 0.25, buffers come at 5."""
    got: list[int] = []

    def receiver(event: Event) -> list[Action]:
        match event:
            case Started():
                return [Compute(0, WORK, "weights", "gradient")]
            case Received(message):
                got.append(message.held)
        return [Receive("one", gradient=True)] if len(got) < 4 else [Halt()]

    def server(event: Event) -> list[Action]:
        return [tensor(1, 3), tensor(1, 4), Halt()] if isinstance(event, Received) else []

    wake = Send(0, SnapshotCredit(2))
    costs = {"latency_jitter_s": latency_jitter_s, "local_latency_s": local_latency_s}
    simulate(server, receiver, once(tensor(1, 1), tensor(1, 2), wake), costs=costs)
    assert got == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_messages_between_two_roles_never_overtake(seed: int) -> None:
    """Each is delayed by up to a hundred times the distance between them."""

    def sender(event: Event) -> list[Action]:
        step = -1 if isinstance(event, Started) else event.step  # type: ignore[union-attr]
        if step == 30:
            return [Halt()]
        sent = [Send(0, PlateauReached(1, 2 * (step + 1) + i)) for i in range(2)]
        return [*sent, Compute(step + 1, WORK, "weights", "gradient")]

    got: list[int] = []
    costs = {"compute_s": 0.01, "latency_s": 0.0, "latency_jitter_s": 1.0, "message_s": 0.003}
    simulate(collecting(62, lambda message: message.times, got), sender, costs=costs, seed=seed)
    assert got == list(range(62))


def test_messages_of_different_senders_do_overtake() -> None:
    """Else the delays would do nothing."""
    orders = set()
    for seed in range(10):
        got: list[int] = []
        server = collecting(2, lambda message: message.sender, got)
        senders = [once(Send(0, SnapshotCredit(i))) for i in (1, 2)]
        simulate(server, *senders, costs={"latency_jitter_s": 1.0}, seed=seed)
        orders.add(tuple(got))
    assert orders == {(1, 2), (2, 1)}


def test_the_server_handles_one_message_after_the_other() -> None:
    senders = [once(*[Send(0, SnapshotCredit(i))] * 2) for i in (1, 2)]
    (role, *_), _, _ = simulate(collecting(4, type, []), *senders, costs={"message_s": 2.0})
    assert role.at(Received) == [0.25, 2.25, 4.25, 6.25]


@pytest.mark.parametrize(("slowdown", "ready"), [({}, 5.0), ({0: 3.0}, 15.0), ({1: 3.0}, 5.0)])
def test_compute_takes_its_time(slowdown: dict[int, float], ready: float) -> None:
    (_, role), _, _ = simulate(once(), computing, costs={"slowdown": slowdown})
    assert role.at(Computed) == [ready]


def test_a_failure_names_the_role() -> None:
    with pytest.raises(RunError, match=r"^learner 0: out of luck$"):
        simulate(once(), once(Fail("out of luck")), once())


def all_rows(seed: int, protocol: str) -> dict[str, bytes]:
    noisy = {"jitter": 0.5, "latency_jitter_s": 0.05, "evaluation_s": 0.5}
    rows = timing(job(protocol, 5, seed=seed, epochs=3, simulation=noisy), 120)
    return {name: rows[name].tobytes() for name in rows.tables}


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_a_seed_determines_everything(protocol: str) -> None:
    first = all_rows(3, protocol)
    assert set(first) == {"gradients", "updates", "minibatches", "epochs"}
    assert all_rows(3, protocol) == first
    assert all_rows(4, protocol)["updates"] != first["updates"]


class Never(Protocol):
    """Refuses every pull, so nobody can go on."""

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return False


def test_a_deadlock_says_who_waits_for_whom() -> None:
    stuck = job("softsync", 2).with_(protocol={"name": Never})
    with pytest.raises(RunError) as error:
        timing(stuck, 1000)
    assert str(error.value).split("; ") == [
        "parameter server waits for a gradient from learner 0, learner 1",
        "statistics server waits for the account of the parameter server",
        "learner 0 waits for the parameter server to answer its pull (it holds timestamp 0)",
        "learner 1 waits for the parameter server to answer its pull (it holds timestamp 0)",
    ]


def test_rows_belong_to_their_receiver() -> None:
    """The statistics server writes into the rows of an epoch; the server's own must not change with them."""
    sent = np.zeros(1, [("x", "<i4")])
    message = Snapshot(1, 0, 0, sent)

    def receiver(event: Event) -> list[Action]:
        if isinstance(event, Started):
            return [Receive("one")]
        assert isinstance(event, Received)
        event.message.rows["x"] = 5
        return [Halt()]

    simulate(receiver, once(Send(0, message, "mine")))
    assert sent["x"] == 0


# What takes how long.


def collector(buffers: int, tensors: int) -> Callable[[Event], list[Action]]:
    """Takes so many tensors into so many buffers, each posted again at once."""
    left = tensors

    def script(event: Event) -> list[Action]:
        nonlocal left
        if isinstance(event, Started):
            return [Receive(f"buffer {i}", gradient=True) for i in range(buffers)]
        left -= isinstance(event, Received)
        assert isinstance(event, Received)
        return [Receive(event.buffer or "", gradient=True)] if left else [Halt()]

    return script


def test_what_several_send_at_once_goes_through_the_receivers_port_one_by_one() -> None:
    """Each takes 1 after a latency of 0.25, though there is a buffer for both."""
    (server, *_), _, _ = simulate(collector(2, 4), *[once(tensor(0), tensor(0))] * 2)
    assert server.at(Received) == [1.25, 2.25, 3.25, 4.25]


def test_what_goes_to_several_goes_through_the_senders_port_one_by_one() -> None:
    (_, one, two), _, _ = simulate(once(tensor(1), tensor(2)), collector(1, 1), collector(1, 1))
    assert (one.at(Received), two.at(Received)) == ([1.25], [2.25])


def test_ports_of_different_nodes_and_directions_do_not_wait_for_each_other() -> None:
    """0 sends to 1, 1 to 2 and 2 to 0, all at once."""

    def ring(to: int) -> Callable[[Event], list[Action]]:
        def script(event: Event) -> list[Action]:
            match event:
                case Started():
                    return [Receive("theirs", gradient=True), tensor(to)]
                case Received():
                    return [Halt()]
            return []

        return script

    roles, _, _ = simulate(ring(1), ring(2), ring(0))
    assert [role.at(Received) for role in roles] == [[1.25]] * 3


@pytest.mark.parametrize(
    ("costs", "arrivals"),
    [
        ({}, [1.25, 2.25]),
        ({"nodes": 1}, [1.25, 2.25]),  # one node, and the servers on their own: its port out is shared
        ({"nodes": 1, "servers_on_first_node": True}, [1.25, 2.25]),  # inside a node, as between nodes
        (
            {"nodes": 1, "servers_on_first_node": True, "local_latency_s": 0.125, "local_bandwidth_bytes_per_s": 200.0},
            [0.625, 1.125],
        ),
        (
            {"nodes": 2, "servers_on_first_node": True, "local_latency_s": 0.125, "local_bandwidth_bytes_per_s": 200.0},
            [0.625, 1.25],  # the second learner comes over the link, which is not the server's own copying
        ),
    ],
)
def test_links_between_and_inside_nodes(costs: dict[str, Any], arrivals: list[float]) -> None:
    (server, *_), _, _ = simulate(collector(2, 2), *[once(tensor(0))] * 2, costs=costs)
    assert server.at(Received) == arrivals


@pytest.mark.parametrize(("nodes", "times"), [(None, [5.0, 5.0]), (2, [5.0, 5.0]), (1, [6.0, 6.0])])
def test_learners_on_one_node_slow_each_other(nodes: int | None, times: list[float]) -> None:
    (_, *learners), _, _ = simulate(once(), computing, computing, costs={"nodes": nodes, "node_slowdown": 0.2})
    assert [role.at(Computed)[0] for role in learners] == times


@pytest.mark.parametrize(
    ("costs", "ready"),
    [
        ({}, [5.0, 5.0]),  # cores enough: unset
        ({"cores_per_node": 3}, [5.0, 5.0]),
        ({"cores_per_node": 2}, [5.5, 5.5]),  # the server's 1 second is taken from both
        ({"cores_per_node": 1}, [5.5, 5.5]),
        ({"cores_per_node": 1, "nodes": 2}, [6.0, 5.0]),  # only the first is on the server's node
        ({"cores_per_node": 1, "servers_on_first_node": False}, [5.0, 5.0]),
    ],
)
def test_a_servers_work_delays_learners_that_fill_the_cores_of_its_node(
    costs: dict[str, Any], ready: list[float]
) -> None:
    """One update of 1 second, when both have begun to compute."""

    def server(event: Event) -> list[Action]:
        match event:
            case Received():
                return [Update("gradient", "weights", 0.1, 1), Halt()]
        return []

    def learner(event: Event) -> list[Action]:
        return [Send(0, SnapshotCredit(1))] * isinstance(event, Started) + computing(event)

    given = {"update_s": 1.0, "nodes": 1, "servers_on_first_node": True, **costs}
    (_, *learners), _, _ = simulate(server, learner, computing, costs=given)
    assert [role.at(Computed)[0] for role in learners] == ready


@pytest.mark.parametrize(
    ("costs", "ready"),
    [
        ({}, [5.0, 5.0]),
        ({"cores_per_node": 3}, [5.0, 5.0]),
        ({"cores_per_node": 2}, [5.5, 5.5]),  # the copy of 1 second is taken from both
        ({"cores_per_node": 2, "node_slowdown": 0.2}, [6.6, 6.6]),  # a second of a core counts as much as a gradient's
        ({"cores_per_node": 1, "nodes": 2, "cpu_s_per_byte": 0.02}, [7.0, 7.0]),  # 2 s at the sender and the receiver
        ({"cores_per_node": 1, "nodes": 2}, [5.0, 5.0]),
    ],
)
def test_a_transfer_delays_learners_that_fill_the_cores_of_its_nodes(costs: dict[str, Any], ready: list[float]) -> None:
    """The first learner sends a tensor of 100 bytes to the second one, while both compute."""

    def sender(event: Event) -> list[Action]:
        return [tensor(2)] * isinstance(event, Started) + computing(event) * isinstance(event, Started | Computed)

    def receiver(event: Event) -> list[Action]:
        post = [Receive("theirs", gradient=True)] * isinstance(event, Started)
        return post + computing(event) * isinstance(event, Started | Computed)

    (_, *learners), _, _ = simulate(once(), sender, receiver, costs={"nodes": 1, **costs})
    assert [role.at(Computed)[0] for role in learners] == pytest.approx(ready)


def test_the_servers_work_takes_its_time_and_its_end_is_told() -> None:
    """2 for the message, 0.5 for the gradient, 1 for the update; what it sends afterwards leaves afterwards."""

    def server(event: Event) -> list[Action]:
        match event:
            case Received():
                work = [Accumulate("a", "b", 0.5, 1.0), Update("a", "weights", 0.1, 7)]
                return [*work, Send(1, SnapshotCredit(0))]
            case Updated():
                return [Halt()]
        return []

    def learner(event: Event) -> list[Action]:
        return [Send(0, SnapshotCredit(1))] if isinstance(event, Started) else [Halt()]

    costs = {"message_s": 2.0, "gradient_s": 0.5, "update_s": 1.0}
    (role, other, _), _, _ = simulate(server, learner, once(), costs=costs)
    ended = 0.25 + 2.0 + 0.5 + 1.0
    assert role.seen[-1] == (ended, Updated(7, 0, 1.0))
    assert other.at(Received) == [ended + 0.25]


def test_a_hash_takes_no_time_and_is_told() -> None:
    def hashing(event: Event) -> list[Action]:
        return [Hash("weights")] if isinstance(event, Started) else [Halt()]

    (role, *_), _, _ = simulate(hashing, once(), once())
    assert role.seen[1:] == [(0.0, Hashed("0 weights"))]
