"""The sum of several stage servers: what each of them is to do with a log that all read."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.core import records
from rudra.core.actions import Accumulate, Action, Copy, Receive, Send, Update
from rudra.core.buffer_names import WEIGHTS
from rudra.core.layout import Entry, Part, interleaved
from rudra.roles.multi_owner import LOGGED, entry
from rudra.roles.relay import SUM, SumRelay
from rudra.roles.stage_log import gradient_of
from topologies import load


def rows(actions: list[Action]) -> list[tuple]:
    return np.frombuffer(b"".join(map(entry, actions)), records.LOG).tolist()


@given(st.integers(1, 6), st.data())
def test_every_server_gets_the_sum_of_all_in_learner_order(learners: int, data: st.DataObject) -> None:
    """Whichever learners are left, sums travel at most once to a server on the way, and once from the last to all."""
    servers = data.draw(st.integers(1, learners))
    plan = load("base", staged=servers).plan(learners)
    relays = {stage: SumRelay(stage, plan) for stage in plan.stages}
    for _ in range(2):
        left = sorted(data.draw(st.sets(st.sampled_from(plan.learners), min_size=1)))
        first, *others = map(gradient_of, left)
        log: list[Action] = [Accumulate(first, other, 1 / (2 + i), 1.0) for i, other in enumerate(others)]
        mine = {
            stage: deque(each for row in rows([*log, Update(first, WEIGHTS, 0.1, 1)]) for each in relay.mine(row))
            for stage, relay in relays.items()
        }
        held = {stage: {gradient_of(i): [i] for i in left if plan.stage_of(i) == stage} for stage in plan.stages}
        under_way: dict[tuple[int, int], deque[list[int]]] = {}
        sent, stepped = 0, {}
        while any(mine.values()):
            ready = [stage for stage, todo in mine.items() if todo and may_go_on(stage, todo[0], under_way)]
            assert ready, "servers wait for each other"
            stage = data.draw(st.sampled_from(ready))
            what, role, buffer, other, *_ = mine[stage].popleft()
            kind, name, into = LOGGED[what], buffer.decode(), other.decode()
            if kind is Send:
                under_way.setdefault((stage, role), deque()).append([*held[stage][name]])
                sent += 1
            elif kind is Receive:
                held[stage][name] = under_way[role, stage].popleft()
            elif kind is Accumulate:
                held[stage][into] += held[stage][name]
            elif kind is Copy:
                held[stage][into] = [*held[stage][name]]
            elif kind is Update:
                stepped[stage] = held[stage][name]
        assert stepped == dict.fromkeys(plan.stages, left)
        assert not any(under_way.values())
        assert sent <= 2 * (servers - 1)
        assert servers == 1 or all(SUM in own for own in held.values())


def may_go_on(stage: int, row: tuple, under_way: dict[tuple[int, int], deque[list[int]]]) -> bool:
    return LOGGED[row[0]] is not Receive or bool(under_way.get((row[1], stage)))


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_learners_are_divided_in_order(servers: int) -> None:
    plan = load("base", staged=servers).plan(5)
    of = [plan.stage_of(learner) for learner in plan.learners]
    assert of == sorted(of)
    assert {*of} == {*plan.stages}
    assert plan.owners == (plan.server, plan.stages[0])
    assert plan.ranks == 7 + servers
    assert plan.unparted()[0].stages == (7,)


def test_owners_take_turns_in_the_vector() -> None:
    """Parameters, then buffers: a part of a part has its stretches, and all together are the vector."""
    first, last = Part((slice(0, 10), slice(30, 34))), Part((slice(10, 30), slice(34, 40)))
    assert (first.size, last.size) == (14, 26)
    assert first.within == (slice(0, 10), slice(10, 14))
    assert interleaved(each.stretches for each in (first, last)) == [*map(slice, (0, 10, 30, 34), (10, 30, 34, 40))]
    front, behind = first.part(slice(0, 6)), first.part(slice(6, 14))
    assert (front, behind) == (Part((slice(0, 6),)), Part((slice(6, 10), slice(30, 34))))
    assert Entry("mean", (2,), 31, 2, "buffer") in behind
    assert Entry("weight", (2,), 10, 2, "parameter") not in first
    assert interleaved([[1], [2, 3], [4, 5, 6]]) == [1, 2, 4, 3, 5, 6]
