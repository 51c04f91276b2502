"""The tree server: exact traces with two learners below, who are two of four."""

from typing import Any

import pytest
from role_traces import DIGEST, DONE, HASHED, START, STOP, brief, feed, job, machine, names_of, sent_gradient

from rudra.core.actions import Send
from rudra.core.events import Event, Lost, Received, Sent, Started
from rudra.core.messages import (
    ChildDone,
    Pull,
    PullAnswer,
    PushedGradient,
    Ready,
    Weights,
)
from rudra.roles.tree import TreeServer, TreeServerState

ROOT, STATISTICS, SERVER, FIRST = 0, 1, 2, 4
G0, G1, G2 = (f"gradient {i}" for i in range(3))
W0, W1 = "weights 0", "weights 1"


def weights(timestamp: int, buffer: str) -> Received:
    return Received(Weights(ROOT, timestamp), buffer)


def stamp(timestamp: int) -> Received:
    return Received(PullAnswer(ROOT, timestamp))


def gradient(learner: int, step: int, timestamp: int, buffer: str, *, asks: bool = True) -> Received:
    held = timestamp if asks else -1
    gradients = (sent_gradient(learner, step, timestamp),)
    return Received(PushedGradient(FIRST + learner, timestamp, held, gradients), buffer)


def pull(learner: int, asked: int, held: int) -> Received:
    return Received(Pull(FIRST + learner, asked, held))


def ready(learner: int, digest: int = DIGEST) -> Received:
    return Received(Ready(FIRST + learner, digest))


def bye(learner: int, pushed: int) -> Received:
    return Received(ChildDone(FIRST + learner, pushed))


def returned(buffer: str, *learners: int) -> list[Sent]:
    return [Sent(buffer, FIRST + i) for i in learners]


def new(rule: str, name: str = "adv", **tables: Any) -> TreeServer:
    role = machine(SERVER, job(rule, 4, topology={"name": name, "options": {"fan_out": 2}}, **tables))
    assert isinstance(role, TreeServer)
    return role


def training(rule: str, **tables: Any) -> TreeServer:
    role = new(rule, **tables)
    feed(role, Started(), weights(0, W0), HASHED, *returned(W0, 0, 1), ready(0), ready(1), START)
    assert role.state is TreeServerState.TRAINING
    return role


def sent(role: TreeServer, event: Event) -> list[tuple[str, int, int]]:
    """What is sent after an event: text, value, and how many gradients."""
    actions = [action for action in role.handle(event, 0.0) if isinstance(action, Send)]
    role.validate()
    numbers = ("held", "digest", "pushed")
    told = [next((getattr(a.message, name) for name in numbers if hasattr(a.message, name)), 0) for a in actions]
    counts = [len(getattr(a.message, "gradients", ())) for a in actions]
    return list(zip((brief(a, names_of(role.plan)) for a in actions), told, counts, strict=True))


# Start.


def test_weights_go_down_and_digests_up() -> None:
    role = new("softsync")
    assert feed(role, Started()) == ["receive weights 0 from S"]
    assert feed(role, weights(0, W0)) == ["hash weights 0"]
    assert feed(role, HASHED) == ["WEIGHTS@0 to L0 [weights 0]", "WEIGHTS@0 to L1 [weights 0]"]
    assert feed(role, ready(1), *returned(W0, 0), ready(0)) == [], "the weights are still on their way to learner 1"
    assert sent(role, *returned(W0, 1)) == [("READY@0 to S", DIGEST, 0)]
    assert feed(role, START) == ["START@0 to L0", "START@0 to L1", *(f"receive gradient {i}" for i in range(3))]


def test_other_initial_weights_end_the_run() -> None:
    role = new("softsync")
    feed(role, Started(), weights(0, W0), HASHED, ready(0))
    assert feed(role, ready(1, digest=8)) == [
        "fail learner 1 received other initial weights than its neighbours (digests differ)"
    ]


def test_where_weights_have_their_own_tree_the_children_are_compared() -> None:
    role = new("softsync", "adv*")
    assert feed(role, Started(), ready(0)) == []
    assert sent(role, ready(1)) == [("READY@0 to S", DIGEST, 0)]
    role = new("softsync", "adv*")
    assert feed(role, Started(), ready(1), ready(0, digest=8))[-1].startswith("fail learner 0 received other")


def test_in_order_gradients_are_let_in_by_turns() -> None:
    role = new("hardsync")
    feed(role, Started(), weights(0, W0), HASHED, *returned(W0, 0, 1), ready(0), ready(1))
    assert feed(role, START)[2:] == [
        "receive gradient 0 from L0",
        "receive gradient 1 from L1",
        "receive gradient 2 from L0",
    ]


# Gradients up.


def test_an_average_is_passed_on_when_it_stands_for_all_below() -> None:
    role = training("softsync")
    assert feed(role, gradient(0, 0, 0, G0)) == [], "learner 0 is answered when the root has its gradient"
    actions = role.handle(gradient(1, 0, 0, G1), 0.0)
    assert [brief(a, names_of(role.plan)) for a in actions] == [
        "gradient 0 takes 0.5 of 1 * gradient 1",
        "GRADIENT@0 to S [gradient 0]",
        "receive gradient 1",
    ]
    (push,) = (a.message for a in actions if isinstance(a, Send))
    assert push.gradients == (sent_gradient(0, 0, 0), sent_gradient(1, 0, 0))
    assert push.held == 0, "it asks for both"
    assert (role.received, role.relayed) == (2, 2)


def test_an_average_is_complete_with_as_many_as_make_an_update() -> None:
    """λ = 4 and n = 4: one gradient is enough."""
    role = training("softsync", protocol={"n": 4})
    assert sent(role, gradient(1, 0, 0, G0)) == [("GRADIENT@0 to S [gradient 0]", 0, 1)]


@pytest.mark.parametrize(("n", "c", "together"), [(1, 12, 4), (2, 6, 4), (3, 4, 4), (4, 3, 2), (6, 2, 2), (12, 1, 1)])
def test_an_average_is_of_all_below_or_of_an_even_part_that_is_no_more_than_an_update(
    n: int, c: int, together: int
) -> None:
    """Twelve learners, four of them below: with c = 3 two and two, for of three and one the one would wait."""
    run = job("softsync", 12, topology={"name": "adv", "options": {"fan_out": 4}}, protocol={"n": n})
    assert run.make_protocol().gradients_per_update == c
    role = machine(SERVER, run)
    below = role.plan.children[SERVER]
    assert isinstance(role, TreeServer)
    assert len(below) == 4
    feed(role, Started(), weights(0, W0), HASHED, *(Sent(W0, child) for child in below))
    feed(role, *(Received(Ready(child, DIGEST)) for child in below), START)
    buffers = [G0, G1, G1, G1]  # each but the first is averaged into that, and free again
    for place, (child, buffer) in enumerate(zip(below[:together], buffers, strict=False)):
        message = PushedGradient(child, 0, 0, (sent_gradient(place, 0, 0),))
        passed_on = sent(role, Received(message, buffer))
        assert passed_on == ([("GRADIENT@0 to S [gradient 0]", 0, together)] if place == together - 1 else [])


def test_averages_weigh_by_samples() -> None:
    role = training("softsync")
    few = sent_gradient(1, 0, 0, samples=2)
    feed(role, gradient(0, 0, 0, G0, asks=False))
    event = Received(PushedGradient(FIRST + 1, 0, -1, (few,)), G1)
    assert feed(role, event)[0] == f"gradient 0 takes {2 / 6:g} of 1 * gradient 1"


def test_no_gradient_is_passed_on_before_the_one_before_is_delivered() -> None:
    role = training("async")
    assert sent(role, gradient(0, 0, 0, G0)) == [("GRADIENT@0 to S [gradient 0]", 0, 1)]
    assert feed(role, gradient(1, 0, 0, G1)) == []
    assert feed(role, gradient(1, 1, 0, G2)) == [], "every buffer is taken: nobody can push any more"
    assert feed(role, Sent(G0, ROOT)) == ["GRADIENT@0 to S [gradient 1]", "receive gradient 0"]
    assert feed(role, Sent(G1, ROOT)) == ["GRADIENT@0 to S [gradient 2]", "receive gradient 1"]


def test_in_order_learners_are_added_in_order_whoever_comes_first() -> None:
    role = training("hardsync")
    assert feed(role, gradient(1, 0, 0, G1)) == []
    actions = feed(role, gradient(0, 0, 0, G0))
    assert actions[:2] == ["gradient 0 takes 0.5 of 1 * gradient 1", "GRADIENT@0 to S [gradient 0]"]


# Weights down.


def test_the_parent_is_asked_once_for_all_that_ask() -> None:
    role = training("softsync")
    feed(role, gradient(0, 0, 0, G0))
    assert sent(role, gradient(1, 0, 0, G1)) == [("GRADIENT@0 to S [gradient 0]", 0, 2)]
    assert feed(role, stamp(3)) == ["receive weights 1 from S"]
    assert feed(role, weights(3, W1)) == [
        "TIMESTAMP@3 to L0",
        "WEIGHTS@3 to L0 [weights 1]",
        "TIMESTAMP@3 to L1",
        "WEIGHTS@3 to L1 [weights 1]",
    ]


def test_who_has_a_gradient_in_an_average_that_is_not_complete_is_asked_for_with_that() -> None:
    """Else it would go on before the root knows that gradient, and could be twice in an update."""
    role = training("softsync")
    feed(role, pull(1, 0, 0), gradient(0, 0, 0, G0))
    assert feed(role, stamp(0)) == ["TIMESTAMP@0 to L1"]
    assert sent(role, gradient(1, 0, 0, G1)) == [("GRADIENT@0 to S [gradient 0]", 0, 2)]


def test_nothing_newer_is_an_answer_to_all() -> None:
    role = training("softsync")
    feed(role, gradient(0, 0, 0, G0), gradient(1, 0, 0, G1))
    assert feed(role, stamp(0)) == ["TIMESTAMP@0 to L0", "TIMESTAMP@0 to L1"]


def test_who_pushes_while_the_parent_is_asked_is_asked_for_afterwards() -> None:
    """Its own gradient is not in the weights that come first."""
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), Sent(G0, ROOT))
    assert sent(role, gradient(1, 0, 0, G1)) == [("GRADIENT@0 to S [gradient 1]", -1, 1)]
    feed(role, stamp(1))
    assert feed(role, weights(1, W1)) == ["TIMESTAMP@1 to L0", "WEIGHTS@1 to L0 [weights 1]", "PULL@0 to S"]
    assert feed(role, stamp(2)) == ["receive weights 0 from S"]


def test_who_holds_what_came_meanwhile_gets_a_timestamp_alone() -> None:
    role = training("softsync")
    feed(role, pull(0, 0, 0), stamp(3), weights(3, W1))
    assert sent(role, pull(1, 0, 0)) == [("PULL@0 to S", 3, 0)], "asked about 0; 3 is here"
    assert feed(role, stamp(3)) == ["TIMESTAMP@3 to L1", "WEIGHTS@3 to L1 [weights 1]"]
    assert sent(role, pull(0, 3, 3)) == [("PULL@3 to S", 3, 0)]
    assert feed(role, pull(1, 2, 3), stamp(3)) == ["TIMESTAMP@3 to L0", "PULL@2 to S"], "asked after that question"
    assert feed(role, stamp(3)) == ["TIMESTAMP@3 to L1"]


def test_who_must_wait_is_asked_for_again() -> None:
    """Hardsync: whoever has pushed with weights of 3 wants newer ones; another still asks about 0."""
    role = training("hardsync")
    assert sent(role, pull(0, 0, 0)) == [("PULL@0 to S", 0, 0)]
    assert feed(role, pull(1, 3, 0)) == []
    feed(role, stamp(3))
    assert feed(role, weights(3, W1)) == ["TIMESTAMP@3 to L0", "WEIGHTS@3 to L0 [weights 1]", "PULL@3 to S"]


def test_a_question_goes_with_a_gradient_that_is_complete() -> None:
    role = training("async")
    assert sent(role, gradient(0, 0, 0, G0)) == [("GRADIENT@0 to S [gradient 0]", 0, 1)]
    assert feed(role, stamp(0)) == ["TIMESTAMP@0 to L0"]
    assert feed(role, gradient(1, 0, 0, G1)) == [], "the gradient waits for its turn, and the question with it"
    assert sent(role, Sent(G0, ROOT)) == [("GRADIENT@0 to S [gradient 1]", 0, 1)]


def test_newer_weights_wait_for_a_buffer_that_is_back_from_all_children() -> None:
    role = training("softsync")
    feed(role, gradient(0, 0, 0, G0), gradient(1, 0, 0, G1), stamp(1), weights(1, W1))
    feed(role, *returned(W1, 0), pull(0, 1, 1))
    assert feed(role, stamp(2)) == ["receive weights 0 from S"], "weights 0 are back for long"
    assert feed(role, weights(2, W0)) == ["TIMESTAMP@2 to L0", "WEIGHTS@2 to L0 [weights 0]"]
    feed(role, *returned(W0, 0), pull(0, 2, 2))
    assert feed(role, stamp(3)) == [], "weights 1 are still on their way to learner 1"
    assert feed(role, *returned(W1, 1)) == ["receive weights 1 from S"]
    assert feed(role, weights(3, W1)) == ["TIMESTAMP@3 to L0", "WEIGHTS@3 to L0 [weights 1]"]


# The end.

STOPS = ["STOP@0 to L0", "STOP@0 to L1"]


def test_what_is_left_is_passed_on_before_the_account() -> None:
    role = training("softsync")
    feed(role, gradient(0, 0, 0, G0, asks=False))
    assert feed(role, STOP) == STOPS
    assert feed(role, bye(0, 1)) == []
    assert sent(role, bye(1, 0)) == [("GRADIENT@0 to S [gradient 0]", -1, 1)]
    assert sent(role, Sent(G0, ROOT)) == [("CHILD_DONE@0 to S", 1, 0)]
    assert feed(role, DONE) == ["halt"]
    assert role.state is TreeServerState.DONE


def test_a_gradient_on_its_way_at_the_end_is_waited_for() -> None:
    role = training("softsync")
    feed(role, STOP)
    assert feed(role, bye(1, 1), bye(0, 0)) == []
    assert sent(role, gradient(1, 0, 0, G0)) == [("GRADIENT@0 to S [gradient 0]", -1, 1)]
    assert sent(role, Sent(G0, ROOT)) == [("CHILD_DONE@0 to S", 1, 0)]


def test_gradients_under_way_upwards_are_delivered_first() -> None:
    role = training("async")
    feed(role, gradient(0, 0, 0, G0), gradient(1, 0, 0, G1), STOP)
    assert feed(role, bye(0, 1), bye(1, 1)) == []
    assert sent(role, Sent(G0, ROOT)) == [("GRADIENT@0 to S [gradient 1]", -1, 1)], "no question any more"
    assert sent(role, Sent(G1, ROOT)) == [("CHILD_DONE@0 to S", 2, 0)]


def test_pulls_are_not_answered_after_the_end() -> None:
    role = training("softsync")
    feed(role, pull(0, 0, 0))
    assert feed(role, STOP) == STOPS
    assert feed(role, pull(1, 0, 0)) == [], "a stop is the answer"


@pytest.mark.parametrize("late", ["weights", "returned"])
def test_weights_under_way_are_let_in_and_delivered_first(late: str) -> None:
    """Those from the parent, and those to a child."""
    role = training("softsync")
    feed(role, pull(0, 0, 0), stamp(1))
    if late == "returned":
        feed(role, weights(1, W1))
    feed(role, STOP)
    assert feed(role, bye(0, 0), bye(1, 0)) == []
    last = weights(1, W1) if late == "weights" else returned(W1, 0)[0]
    assert feed(role, last) == ["CHILD_DONE@0 to S"]


def test_whom_a_tree_server_waits_for() -> None:
    role = new("async")
    assert role.waiting_for == "the first weights from the parameter server"
    feed(role, Started(), weights(0, W0), HASHED, *returned(W0, 0, 1), ready(1))
    assert role.waiting_for == "learner 0"
    feed(role, ready(0))
    assert role.waiting_for == "the parameter server to start training"
    feed(role, START)
    assert role.waiting_for == "a gradient from learner 0, learner 1"
    feed(role, gradient(0, 0, 0, G0))
    assert role.waiting_for == "the parameter server to take a gradient"
    feed(role, Sent(G0, ROOT), STOP, bye(0, 1))
    assert role.waiting_for == "learner 1"
    feed(role, bye(1, 0))
    assert role.waiting_for == "the statistics server to finish"


# Losses.


def test_a_server_below_which_all_learners_died_is_waited_for_no_more() -> None:
    """Of two children with two learners each, the first has none left; what it has under way has no turn."""
    run = job("hardsync", 4, topology={"name": "adv", "options": {"fan_out": 2}})
    root = machine(ROOT, run)
    digest = [Received(Ready(child, DIGEST)) for child in (SERVER, SERVER + 1)]
    feed(root, Started(), HASHED, Sent("weights", SERVER), Sent("weights", SERVER + 1), *digest)
    assert feed(root, Lost(FIRST)) == ["warn learner 0 (rank 4) died; 3 learners are left, 3 gradients make an update"]
    wanted = feed(root, Lost(FIRST + 1))
    assert wanted[0] == "withdraw gradient 0"
    late = PushedGradient(SERVER, 0, -1, (sent_gradient(1, 0, 0),))
    assert feed(root, Received(late, G0)) == ["receive gradient 0 from R1"]
    both = (sent_gradient(2, 0, 0), sent_gradient(3, 0, 0))
    wanted = feed(root, Received(PushedGradient(SERVER + 1, 0, 0, both), G1))
    assert any(text.startswith("update by gradient 1") for text in wanted)
    assert (root.received, root.ledger.applied, root.lost) == (3, 2, 1)


def test_without_children_it_posts_nothing_and_leaves_at_once() -> None:
    role = training("hardsync")
    assert feed(role, gradient(0, 0, 0, G0, asks=False), Lost(FIRST)) == ["receive gradient 2 from L1"]
    assert feed(role, Lost(FIRST + 1)) == ["GRADIENT@0 to S [gradient 0]"]
    wanted = feed(role, Sent(G0, ROOT), STOP)
    assert sorted(wanted) == ["CHILD_DONE@0 to S", "receive gradient 0", "receive gradient 1", "receive gradient 2"]
    assert role.state is TreeServerState.STOPPED
