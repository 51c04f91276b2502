"""The rules of every protocol, as tables of cases."""

import random
from typing import Any

import pytest

import protocols
from protocols import Clock, Protocol
from protocols.averaging import Elasticity
from protocols.easgd import EASGD
from rudra.errors import ConfigError
from rudra.job.job import Job


def make(name: Any, learners: int, **arguments: Any) -> Protocol:
    return protocols.make(name, learners=learners, **{"minibatch_size": 4, **arguments})


class Bounded(Protocol):
    """A user's protocol: who is more than `ahead` gradients before the slowest waits."""

    def __init__(self, learners: int, ahead: int = 1) -> None:
        super().__init__(learners)
        self.ahead = ahead

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return clock.pushed[learner] - min(clock.pushed) <= self.ahead


class Half(EASGD):
    """An averaging rule whose default elasticity has a formula of its own."""

    @classmethod
    def usual_elasticity(cls, momentum: float | None = None) -> Elasticity:
        return Elasticity("1/(2k)", lambda k: 1 / (2 * k))


def test_an_averaging_rule_may_have_a_formula_of_its_own() -> None:
    assert Half(4).elasticity == 1 / 8
    assert "α = 1/(2k) = 0.125, before the step" in Half(4).text
    assert {pair.elasticity for pair in protocols.pairs({"half": Half})} == {"1/(2k)"}


def test_every_shipped_protocol_is_known() -> None:
    assert list(protocols.shipped()) == [
        "async",
        "average",
        "diloco",
        "easgd",
        "hardsync",
        "hogbatch",
        "sma",
        "softsync",
    ]


@pytest.mark.parametrize(
    ("name", "learners", "n", "c", "expected_n"),
    [
        ("hardsync", 1, None, 1, 1),
        ("hardsync", 5, None, 5, 5),
        ("async", 1, None, 1, 1),
        ("async", 30, None, 1, 30),
        ("softsync", 1, None, 1, 1),
        ("softsync", 30, None, 30, 1),  # n = 1 is the default
        ("softsync", 30, 1, 30, 1),
        ("softsync", 30, 2, 15, 2),
        ("softsync", 30, 4, 7, 4),  # the floor stays, and the rate is divided by n, not by λ/c
        ("softsync", 30, 16, 1, 16),
        ("softsync", 30, 30, 1, 30),
        ("softsync", 5, 3, 1, 3),
    ],
)
def test_gradients_per_update(name: str, learners: int, n: int | None, c: int, expected_n: int) -> None:
    protocol = make(name, learners, n=n)
    assert (protocol.gradients_per_update, protocol.n) == (c, expected_n)
    assert [protocol.update_due(pending) for pending in range(c + 2)] == [False] * c + [True, True]


@pytest.mark.parametrize(
    ("name", "held", "timestamp", "granted"),
    [
        ("hardsync", 0, 0, False),
        ("hardsync", 3, 3, False),
        ("hardsync", 3, 4, True),
        ("softsync", 3, 3, True),
        ("softsync", 0, 9, True),
        ("async", 3, 3, True),
        ("async", 0, 9, True),
    ],
)
def test_only_hardsync_makes_a_pull_wait_for_an_update(name: str, held: int, timestamp: int, granted: bool) -> None:
    for learner in range(3):
        assert make(name, 3).pull_granted(learner, held, Clock(timestamp, (9, 0, 4))) is granted


@pytest.mark.parametrize(("name", "ordered"), [("hardsync", True), ("softsync", False), ("async", False)])
def test_only_hardsync_adds_in_learner_order(name: str, ordered: bool) -> None:
    assert make(name, 3).ordered is ordered


def test_a_class_of_the_user_with_options() -> None:
    protocol = make(Bounded, 2, options={"ahead": 3}, modulation="mean_staleness")
    assert protocol.pull_granted(0, 0, Clock(0, (3, 0)))
    assert not protocol.pull_granted(0, 0, Clock(0, (4, 0)))
    assert protocol.modulation.rate_factor(4.0) == 0.25


def late(learners: int, **options: Any) -> Protocol:
    """Takes anything, as a user's factory may."""
    return Bounded(learners, **options)


def test_a_factory_that_takes_any_option() -> None:
    assert make(late, 2, options={"ahead": 7}).ahead == 7  # type: ignore[attr-defined]


class Lonely(Protocol):
    def __init__(self, learners: int) -> None:
        pass


class Ordered(Protocol):
    ordered = True


class Empty(Protocol):
    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.gradients_per_update = 0


class Fussy(Protocol):
    def __init__(self, learners: int) -> None:
        raise ValueError("the moon is full")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("softsync", {"n": 0}, "n = 0 is not supported with 4 learners; use 1 to 4"),
        ("softsync", {"n": 5}, "n = 5 is not supported with 4 learners; use 1 to 4"),
        ("hardsync", {"n": 1}, "hardsync takes no n; leave it out, or reset it with --set protocol.n="),
        ("async", {"n": 4}, "async takes no n; leave it out, or reset it with --set protocol.n="),
        ("softsync", {"options": {"m": 2, "k": 1}}, "softsync takes no k, m; valid: n"),
        ("softsync", {"options": {"n": 2}}, "options.n is not supported; use [protocol] n"),
        ("hardsync", {"modulation": "n"}, "modulation = 'n' is not supported with protocol hardsync; use none, sqrt"),
        (
            "softsync",
            {"modulation": "gradient_staleness", "scale_invariant_optimizer": "adam"},
            "modulation = 'gradient_staleness' has no effect with [optimizer] name = 'adam'; use sgd, or modulation = "
            "'mean_staleness'",
        ),
        (Bounded, {"options": {"behind": 1}}, "Bounded takes no behind; valid: ahead"),
        (Bounded, {"n": 2}, "Bounded takes no n; valid: ahead"),
        (Bounded, {"options": {"learners": 1}}, "Bounded takes no learners; valid: ahead"),
        (lambda learners: 5, {}, "<lambda>: makes a int; use a class of protocols.Protocol"),
        (int, {}, "name: int makes no protocol; use a class of protocols.Protocol"),
        (5, {}, "name: 5 makes no protocol; use a class of protocols.Protocol"),
        (Lonely, {}, "Lonely: its __init__ must call super().__init__(learners)"),
        (Ordered, {}, "Ordered: gradients_per_update = 1 is not supported with ordered = True; use 4"),
        (Empty, {}, "Empty: gradients_per_update = 0 is not supported; use 1 or more"),
        (Fussy, {}, "Fussy: the moon is full"),
    ],
)
def test_what_does_not_fit_is_one_line(name: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        make(name, 4, **arguments)
    assert str(error.value) == f"[protocol] {text}"


def test_an_error_inside_the_users_class_stays_the_users() -> None:
    def broken(learners: int) -> Protocol:
        return len(learners)  # type: ignore[arg-type, return-value]

    with pytest.raises(TypeError, match="no len"):
        make(broken, 4)


class Counts(Protocol):
    """Changes itself, and has no state."""

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.done, self.names = 0, ["a"]

    def update_due(self, pending: int) -> bool:
        self.done += 1
        self.names.append(self.names[0])
        return pending >= self.learners


class Keeps(Counts):
    """Its state is complete."""

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "names": self.names}

    def restore(self, state: dict[str, Any]) -> None:
        self.done, self.names = state["done"], state["names"]


class Forgets(Keeps):
    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Misreads(Keeps):
    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["finished"]


class NotJson(Keeps):
    def state(self) -> dict[str, Any]:
        return {"done": self.done, "names": set(self.names)}


class Unread(Keeps):
    def state(self) -> Any:
        return self.names


class CountsPulls(Keeps):
    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        self.done += 1
        return True


class InItsClass(Protocol):
    done = 0

    def update_due(self, pending: int) -> bool:
        type(self).done += 1
        return True


class Draws(Protocol):
    def update_due(self, pending: int) -> bool:
        return pending >= 50 or random.random() < 0.5


class Fails(Protocol):
    def update_due(self, pending: int) -> bool:
        raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Counts, r"Counts: update_due changes done, names, which a resumed run would lose; define state"),
        (Forgets, r"restore\(\) does not restore names; restore everything"),
        (Misreads, r"restore\(\) does not accept \{.*KeyError: 'finished', test_protocols.py:\d+"),
        (NotJson, r"state\(\) returns a value that JSON cannot hold \(.*set"),
        (Unread, r"state\(\) returns a value that JSON cannot hold \(a list\); use a dict"),
        (CountsPulls, r"pull_granted changes done, but a replay calls it at other times; change it only in update_due"),
        (InItsClass, r"update_due changes done"),
        (Draws, r"update_due\(\d+\) is (True|False), then (True|False), after the same gradients; use only"),
        (Fails, r"update_due\(1\) fails \(ZeroDivisionError: by nothing, test_protocols.py:\d+\)"),
    ],
)
def test_a_protocol_that_a_resumed_run_would_not_repeat_is_refused(kind: type[Protocol], text: str) -> None:
    random.seed(1)  # else `Draws` might draw the same twice
    with pytest.raises(ValueError, match=text) as raised:
        make(kind, 3)
    assert "\n" not in str(raised.value)


def test_a_protocol_with_a_complete_state_is_made_as_it_is_at_first() -> None:
    made = make(Keeps, 3)
    assert protocols.saved(made) == '{"done": 0, "names": ["a"]}'
    protocols.restored(made, '{"done": 7, "names": []}')
    assert protocols.saved(made) == '{"done": 7, "names": []}'
    assert protocols.saved(make("async", 3)) == ""


@pytest.mark.parametrize(
    ("ordered", "topology", "text"),
    [
        (True, {"name": "base"}, "is not supported with ordered = True; use gradients_per_update"),
        (
            False,
            {"name": "groups", "options": {"groups": 1}},
            "is not supported if no server updates the weights; use gradients_per_update",
        ),
        (False, {"name": "adv", "options": {"fan_out": 2}}, "which waits and has a state; use topology base"),
    ],
)
def test_where_a_state_would_not_be_heeded_the_job_is_refused(
    ordered: bool, topology: dict[str, Any], text: str
) -> None:
    class Own(Keeps):
        grants_on_push = False

        def __init__(self, learners: int) -> None:
            super().__init__(learners)
            self.gradients_per_update = learners if ordered else 1

        def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
            return clock.timestamp > timestamp

    Own.ordered = ordered
    with pytest.raises(ConfigError, match=text):
        Job(protocol={"name": Own, "modulation": "none"}, topology=topology, cluster={"learners": 4}).plan()
