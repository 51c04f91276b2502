"""Jobs beside a job: links that several tensors cross at once, and what one job takes from another."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.links import Port, SharedLinks
from rudra.simulation.predict import predict
from rudra.simulation.queue import EventQueue

FLOWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 1000), st.integers(0, 20)), min_size=1, max_size=12
)


def crossed(flows: list[tuple[int, int, int, int]], bytes_per_s: float = 10.0) -> list[float]:
    """When each of some tensors (from, to, bytes, time) has come."""
    queue, ends = EventQueue(), [0.0] * len(flows)
    links, out, into = SharedLinks(queue), [Port(bytes_per_s) for _ in range(4)], [Port(bytes_per_s) for _ in range(4)]

    def arrived(place: int, _: None) -> None:
        assert not ends[place], "once"
        ends[place] = queue.now

    for place, (source, to, size, time) in enumerate(flows):
        links.send(time, (out[source], into[to]), size, (arrived, place, None))
    queue.run()
    return ends


@pytest.mark.parametrize(
    ("flows", "ends"),
    [
        ([(0, 1, 100, 0)], [10]),
        ([(0, 1, 100, 0), (0, 2, 100, 0)], [20, 20]),  # one way out
        ([(0, 1, 100, 0), (1, 0, 100, 0)], [10, 10]),  # both directions
        ([(0, 1, 100, 0), (0, 2, 50, 0)], [15, 10]),  # the rest alone
        ([(0, 1, 100, 0), (0, 2, 100, 5)], [15, 20]),
        ([(0, 1, 100, 0), (0, 1, 100, 0), (2, 1, 100, 0), (2, 3, 200, 0)], [30, 30, 30, 30]),  # what is left of 2's
    ],
)
def test_a_link_is_divided_evenly(flows: list[tuple[int, int, int, int]], ends: list[float]) -> None:
    assert crossed(flows) == pytest.approx(ends)


@given(FLOWS)
def test_no_link_carries_more_than_it_can_and_none_idles(flows: list[tuple[int, int, int, int]]) -> None:
    ends = crossed(flows)
    for direction in (0, 1):
        for place in range(4):
            mine = [(f, end) for f, end in zip(flows, ends, strict=True) if f[direction] == place]
            if mine:
                least = min(f[3] for f, _ in mine) + sum(f[2] for f, _ in mine) / 10
                assert max(end for _, end in mine) >= least - 1e-6
    for (_, _, size, time), end in zip(flows, ends, strict=True):
        assert end >= time + size / 10 - 1e-6
    assert max(ends) <= max(f[3] for f in flows) + sum(f[2] for f in flows) / 10 + 1e-6


def rate(*, machines: list[int], background_jobs: list[dict[str, Any]], **tables: Any) -> float:
    costs = {"compute_s": 0.01, "jitter": 0.0, "bandwidth_bytes_per_s": 1e8, "sharing": "equal", "tensors": False}
    simulation = {**costs, "machines": machines, "background_jobs": background_jobs}
    job = Job(**{**BASE, **tables}, simulation=simulation)
    return predict(job, updates=40).samples_per_s


BASE: dict[str, Any] = {
    "model": {"name": "lenet"},
    "training": {"minibatch_size": 8},
    "protocol": {"name": "hardsync"},
    "cluster": {"learners": 3},
}
HERE = [0, 1, 2, 3]
SPREAD = {"shards": 2, "servers_on_own_nodes": True}


def test_jobs_take_from_each_other_what_they_share() -> None:
    alone = rate(machines=HERE, background_jobs=[])
    assert rate(machines=HERE, background_jobs=[{"simulation.machines": [4, 5, 6, 7]}]) == pytest.approx(alone)
    same = [{"simulation.machines": HERE}]
    assert 0.5 * alone <= rate(machines=HERE, background_jobs=same) * 1.1 <= 0.8 * alone
    assert rate(machines=HERE, background_jobs=same * 3) < 0.4 * alone
    less = [{"model.name": "mlp", "simulation": {"machines": HERE}}]
    assert rate(machines=HERE, background_jobs=same) < rate(machines=HERE, background_jobs=less) < alone


@pytest.mark.parametrize(
    "background_job",
    [
        {"placement": {"cut": 5, "rule": "synchronous"}, "simulation": {"machines": [*HERE, 3]}},
        {"topology.name": "groups", "simulation.machines": HERE},
        {"protocol.name": "async", "simulation.machines": HERE},
        {"protocol.name": "softsync", "protocol.n": 1, "cluster.learners": 2, "simulation.machines": [0, 1, 3]},
        {
            "topology": {"name": "sharded", "options": {"shards": 2, "servers_on_own_nodes": True}},
            "simulation.machines": [*HERE, 0],
        },
    ],
)
def test_jobs_of_every_kind_may_run_in_the_background(background_job: dict[str, Any]) -> None:
    assert 0 < rate(machines=HERE, background_jobs=[background_job]) < rate(machines=HERE, background_jobs=[])


def test_an_allreduce_alone_takes_as_long_as_in_turns() -> None:
    tables: dict[str, Any] = {"topology": {"name": "groups"}, "data": {"name": "digits"}}
    costs = {"compute_s": 0.01, "jitter": 0.0, "bandwidth_bytes_per_s": 1e8}
    rates = [
        predict(Job(**{**BASE, **tables}, simulation={**costs, "sharing": each}), updates=40).samples_per_s
        for each in ("turns", "equal")
    ]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize(
    ("simulation", "text"),
    [
        (
            {"sharing": "turns", "background_jobs": [{}]},
            "background_jobs, table 1: jobs share the links of machines; valid with",
        ),
        ({"background_jobs": [{"model.name": "lennet"}]}, "background_jobs, table 1: .*'lennet'"),
        (
            {"background_jobs": [{"simulation.machines": [1]}]},
            "background_jobs, table 1: .*machines has 1 numbers; valid: 3 for",
        ),
        (
            {"background_jobs": [{}], "machines": [1, 2]},
            "machines has 2 numbers; valid: 3 for the nodes with learners, and 1 for",
        ),
        ({"background_jobs": [{"modle.name": "mlp"}]}, "background_jobs, table 1: unknown table 'modle'"),
        (
            {"faults": [{"learner": 0, "dies_at_s": 1.0}]},
            "sharing = 'equal' is not supported with faults; use sharing = 'turns'",
        ),
        ({"machines": [-1]}, "machines has a machine -1; use 0 or more"),
    ],
)
def test_what_cannot_share_is_refused(simulation: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        predict(Job(**BASE, simulation={"sharing": "equal", "tensors": False, **simulation}), updates=4)
