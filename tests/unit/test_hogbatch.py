"""Hogbatch's rules as tables of cases, the dealer of samples, and what a job may say of workers."""

import heapq
import math
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocols.hogbatch import BatchBounds, Hogbatch, WorkerProgress, parts
from rudra.compute.hogwild import manner
from rudra.compute.schedule import schedule_of
from rudra.core.records import Gradient
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.core.work import Work
from rudra.errors import ConfigError, ProtocolError
from rudra.job.job import Job
from rudra.roles.sample_allocator import SampleAllocator

SMALL, LARGE = BatchBounds("small", 4, 1, 64), BatchBounds("large", 1, 100, 800)


def team(sizes: Sequence[int], counts: Sequence[float], left: Collection[int], **more: Any) -> WorkerProgress:
    usual = {"samples": [1] * len(sizes), "remaining": 10**6, "epoch": 10**6}
    return WorkerProgress(sizes, counts, left=left, **usual | more)


@pytest.mark.parametrize(
    ("worker", "size", "counts", "next_size"),
    [
        (0, 8, (5, 5, 5), 8),
        (0, 8, (4, 5, 6), 4),  # behind all others
        (0, 8, (7, 5, 6), 16),  # ahead of all others
        (0, 8, (5, 5, 6), 8),  # as far as the last of them
        (0, 8, (6, 5, 6), 8),  # as far as the first of them
        (0, 9, (4, 5, 6), 4),  # a whole number for each thread
        (0, 1, (4, 5, 6), 1),  # at its bounds
        (0, 64, (7, 5, 6), 64),
        (0, 48, (7, 5, 6), 64),
        (1, 800, (5, 4, 6), 400),
        (1, 150, (5, 4, 6), 100),
        (1, 100, (5, 4, 6), 100),
        (1, 400, (5, 9, 6), 800),
        (1, 800, (5, 9, 6), 800),
        (0, 8, (0.5, 1, 1), 4),  # β < 1 leaves fractions
    ],
)
def test_algorithm_2(worker: int, size: int, counts: tuple[float, ...], next_size: int) -> None:
    sizes = [size if i == worker else 100 for i in range(3)]
    rule = Hogbatch(3, [SMALL, LARGE, LARGE], "adaptive")
    assert rule.next_size(worker, team(sizes, counts, {0, 1, 2})) == next_size
    assert Hogbatch(3, [SMALL, LARGE, LARGE], "fixed").next_size(worker, team(sizes, counts, {0, 1, 2})) == size


def test_the_dead_do_not_count_and_who_is_alone_changes_nothing() -> None:
    rule = Hogbatch(3, [SMALL, LARGE, LARGE], "adaptive")
    assert rule.next_size(0, team([8, 100, 100], (5, 4, 9), {0, 1})) == 16
    assert rule.next_size(0, team([8, 100, 100], (5, 4, 9), {0, 2})) == 4
    assert rule.next_size(0, team([8, 100, 100], (5, 4, 9), {0})) == 8


@pytest.mark.parametrize(("alpha", "up", "down"), [(2.0, 6, 1), (1.5, 4, 2), (1.01, 4, 2), (10.0, 30, 1)])
def test_every_change_by_alpha_is_one(alpha: float, up: int, down: int) -> None:
    rule = Hogbatch(2, [SMALL, LARGE], "adaptive", alpha=alpha)
    assert (rule.next_size(0, team([3, 100], (5, 4), {0, 1})), rule.next_size(0, team([3, 100], (3, 4), {0, 1}))) == (
        up,
        down,
    )


@pytest.mark.parametrize(
    ("samples", "remaining", "next_sizes"),
    [
        ((0, 8000), 10_000, (1, 800)),  # nobody knows yet
        ((100, 8000), 10_000, (10, 800)),  # 10 : 800 = 100 : 8000
        ((800, 8000), 10_000, (64, 640)),  # the small one can take no more
        ((100, 8000), 1000, (3, 800)),  # 12 samples of the small one are as long as 987 of the large one
        ((100, 8000), 500, (1, 493)),
        ((100, 8000), 300, (0, 296)),  # 4 of the small one take longer than 300 of the other
        ((100, 8000), 1, (0, 100)),
        ((1, 80_000), 2500, (0, 800)),
        ((1, 80_000), 2501, (1, 800)),  # so that it does not look ever slower
        ((0, 0), 1, (1, 800)),
    ],
)
def test_balanced_batches_go_with_speed(samples: tuple[int, int], remaining: int, next_sizes: tuple[int, int]) -> None:
    rule = Hogbatch(2, [SMALL, LARGE], "balanced")
    about = team((1, 800), (5, 5), {0, 1}, samples=samples, remaining=remaining, epoch=10_000)
    assert (rule.next_size(0, about), rule.next_size(1, about)) == next_sizes


def test_the_fastest_always_gets_work() -> None:
    """Else three alike would leave the end of an epoch to each other; who is left takes a dead one's place."""
    rule = Hogbatch(3, [LARGE] * 3, "balanced")
    about = team((800,) * 3, (5,) * 3, {0, 1, 2}, samples=(4000,) * 3, remaining=5, epoch=10_000)
    assert [rule.next_size(worker, about) > 0 for worker in range(3)] == [True, False, False]
    assert rule.next_size(1, about._replace(left={1, 2})) > 0


def test_balanced_updates_come_from_smaller_batches_where_an_epoch_is_short() -> None:
    """The small worker's share of 2,000 samples is 24, 6 for each thread, and so the large one's batch is 480.

    It is half of that where it has made fewer updates by so much.
    """
    rule = Hogbatch(2, [SMALL, LARGE], "balanced")
    about = team((1, 800), (5, 5), {0, 1}, samples=(100, 8000), remaining=2000, epoch=2000)
    assert (rule.next_size(0, about), rule.next_size(1, about)) == (6, 479)
    ahead = about._replace(counts=(11, 3))
    assert (rule.next_size(0, ahead), rule.next_size(1, ahead)) == (6, 239)


@pytest.mark.parametrize("threads", [1, 4, 48])
@pytest.mark.parametrize("ratio", [1.0, 3.0, 50.0, 1 / 50, 1000.0])
@pytest.mark.parametrize(("alpha", "workers"), [(2.0, 2), (4.0, 2), (2.0, 3)])
def test_counts_stay_close_while_nobody_is_at_a_bound(threads: int, ratio: float, alpha: float, workers: int) -> None:
    """However much faster some are: by a few batches, and as many as it takes to make up for the difference."""
    about = [BatchBounds("small", threads, 1, 2**400), *[BatchBounds("large", 1, 1, 2**400)] * (workers - 1)]
    rule, chance = Hogbatch(workers, about, "adaptive", alpha=alpha), random.Random(0)
    sizes, counts = [2**200] * workers, [0.0] * workers
    seconds = [ratio ** (i / (workers - 1)) for i in range(workers)]  # for a sample of each thread
    due = [(seconds[i] * sizes[i], i) for i in range(workers)]
    for _ in range(2000):
        now, worker = heapq.heappop(due)
        counts[worker] += rule.counted(worker) * about[worker].threads
        assert max(counts) - min(counts) <= threads * (6 + math.log(max(ratio, 1 / ratio), alpha))
        sizes[worker] = rule.next_size(worker, team(sizes, counts, range(workers)))
        if min(sizes) == 1 or max(sizes) == 2**400:
            break
        heapq.heappush(due, (now + seconds[worker] * sizes[worker] * chance.uniform(0.7, 1.3), worker))
    assert sum(counts) > 200


def test_where_workers_begin_and_what_counts() -> None:
    rule = Hogbatch(2, [SMALL, LARGE], "adaptive", beta=0.25)
    assert rule.first_sizes == (1, 800)
    assert (rule.counted(0), rule.counted(1)) == (0.25, 1.0)


def test_parts_of_a_batch() -> None:
    assert parts(12, 4) == [3, 3, 3, 3]
    assert parts(7, 4) == [2, 2, 2, 1]
    assert parts(3, 48) == [1, 1, 1]
    assert parts(9, 1) == [9]


# The dealer.


def dealer(samples: int, position: TrainingState = BEGINNING, **options: Any) -> SampleAllocator:
    workers = [{"learners": [0], "kind": "small", "threads": 4, "max": 64}]
    workers += [{"kind": "large", "min": 10, "max": 100}]
    job = Job(protocol={"name": "hogbatch"}, hogbatch={"workers": workers, **options}, cluster={"learners": 2})
    plan = job.plan()
    return SampleAllocator(Hogbatch.of(job.make_protocol(plan)), plan, samples, position)


def applied(dealer_: SampleAllocator, learner: int, first: int, samples: int) -> None:
    dealer_.count(Gradient(-1, learner, samples, 0, first, 0, -1, 1.0, 0.0, 0.0, 0))
    dealer_.applied()


def test_samples_are_dealt_once_and_what_is_left_is_a_short_batch() -> None:
    cards = dealer(109)
    assert cards.deal(0) == Work(0, 0, 4, 0)
    assert cards.deal(1) == Work(0, 4, 100, 0)
    for first in range(4):
        applied(cards, 0, first, 1)
        cards.validate(first + 1)
    assert cards.deal(0) == Work(0, 104, 4, 0)
    applied(cards, 1, 4, 100)
    assert cards.counts == [4.0, 1.0]
    assert cards.deal(1) == Work(0, 108, 1, 0)
    applied(cards, 1, 108, 1)
    assert cards.deal(1) is None


def test_what_is_recalled_is_dealt_first() -> None:
    cards = dealer(300)
    cards.deal(0)
    cards.deal(1)
    applied(cards, 0, 0, 1)
    cards.recall(0, dead=True)
    applied(cards, 1, 4, 100)
    assert cards.deal(1) == Work(0, 1, 3, 0)
    applied(cards, 1, 1, 3)
    cards.validate(104)


def test_a_position_tells_all_of_it_as_of_the_last_update() -> None:
    cards = dealer(300)
    assert cards.about() == ((), (1, 100), (0.0, 0.0))
    cards.deal(0)
    cards.deal(1)
    applied(cards, 0, 0, 1)
    again, sizes, counts = cards.about()
    assert again == ((1, 103),)
    same = dealer(300, TrainingState(samples=1, again=again, sizes=sizes, counts=counts))
    same.validate(1)
    assert same.about() == (again, sizes, counts)
    assert [same.deal(0), same.deal(1)] == [Work(0, 1, 4, 0), Work(0, 5, 99, 0)]
    assert same.about() == (again, sizes, counts)
    applied(same, 1, 5, 99)
    assert same.about()[0] == ((1, 4),)


def test_a_gradient_of_other_samples_than_were_given_is_refused() -> None:
    cards = dealer(300)
    cards.deal(1)
    with pytest.raises(
        ProtocolError, match="learner 1 pushed a gradient of 9 from 3 on, but had samples 0 and 99 more"
    ):
        applied(cards, 1, 3, 9)
    with pytest.raises(ProtocolError, match="learner 0 pushed a gradient of 1 from 0 on, but had nothing"):
        applied(cards, 0, 0, 1)


@pytest.mark.parametrize(("shuffle", "first"), [("once", 0), ("epoch", 100)])
def test_an_epoch_has_the_samples_in_the_same_order_or_in_another(shuffle: str, first: int) -> None:
    cards = dealer(100, shuffle=shuffle, counts="epoch")
    cards.deal(1)
    applied(cards, 1, 0, 100)
    cards.end_epoch()
    assert cards.counts == [0.0, 0.0]
    assert cards.deal(1) == Work(0, first, 100, 0)
    applied(cards, 1, first, 100)


# Jobs.

TWO: list[dict[str, Any]] = [{"learners": [0], "kind": "small"}, {"learners": [1], "kind": "large"}]
ALL: list[dict[str, Any]] = [{"kind": "small"}]


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([{"kind": "medium"}], "[hogbatch] workers.0.kind must be 'small' or 'large', not 'medium'"),
        ([{}], "[hogbatch] workers.0.kind is missing"),
        ([{"kind": "small", "treads": 2}], "[hogbatch.workers.0] unknown key 'treads'"),
        ([{"kind": "small", "threads": 0}], "[hogbatch] workers.0.threads must be >= 1, not 0"),
        ([{"kind": "large", "threads": 2}], "threads = 2 is not supported with kind = 'large'; use threads = 1"),
        ([{"kind": "small", "min": 9, "max": 8}], "min = 9 is more than max = 8; use min <= max"),
        ([{"kind": "large", "max": 8}], "min = 128 is more than max = 8"),
        ([{"kind": "small", "compute_s": {}}], "[hogbatch] workers.0.compute_s must be seconds > 0"),
        (TWO[:1], "[hogbatch] workers: no table names learner 1; name all 2 learners"),
        (
            [*TWO, {"learners": [2], "kind": "large"}],
            "[hogbatch] workers.2.learners names learner 2, which does not exist; use 0 to 1",
        ),
        (
            [*TWO, {"learners": [1], "kind": "large"}],
            "workers.2.learners names learner 1 again; name each learner once",
        ),
        ([*ALL, *ALL], "[hogbatch] workers.1.learners is missing; only one table may omit it"),
        ([*TWO, *ALL], "[hogbatch] workers.2: other tables name all 2 learners; remove this table"),
    ],
)
def test_a_mistake_in_the_workers_is_one_line(workers: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        Job(protocol={"name": "hogbatch"}, hogbatch={"workers": workers}, cluster={"learners": 2})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"protocol": {"name": "async"}},
            "[hogbatch] workers is not supported with protocol async; remove [hogbatch], or",
        ),
        (
            {"protocol": {"name": "async"}, "hogbatch": {"rule": "balanced"}},
            "[hogbatch] rule is not supported with protocol async; remove [hogbatch], or use protocol hogbatch",
        ),
        ({"protocol": {"name": "hogbatch", "n": 2}}, "hogbatch takes no n; leave it out"),
        ({"hogbatch": {"rule": "fast"}}, "[hogbatch] rule must be 'fixed', 'adaptive' or"),
        (
            {"protocol": {"name": "hogbatch", "options": {"rule": "fixed"}}},
            "options.rule is not supported; use the keys of [hogbatch]",
        ),
        (
            {"protocol": {"name": "hogbatch", "options": {"workers": 2}}},
            "options.workers is not supported; use the keys of [hogbatch]",
        ),
        (
            {"protocol": {"name": "hogbatch", "options": {"window": "locked"}}},
            "options.window is not supported; use the keys of [hogbatch]",
        ),
        ({"hogbatch": {"alpha": 1}}, "[hogbatch] alpha must be > 1, not 1"),
        ({"hogbatch": {"alpha": "a"}}, "[hogbatch] alpha must be a number, not 'a'"),
        ({"hogbatch": {"beta": 2.0}}, "[hogbatch] beta must be <= 1.0, not 2.0"),
        ({"hogbatch": {"shuffle": "no"}}, "[hogbatch] shuffle must be 'once' or 'epoch', not 'no'"),
        (
            {"protocol": {"name": "hogbatch", "modulation": "n"}},
            "modulation = 'n' is not supported with protocol hogbatch; use none",
        ),
        (
            {"topology": {"name": "adv*"}},
            "[protocol] name = 'hogbatch' is not supported with topology adv*; use topology base",
        ),
        ({"topology": {"name": "groups"}}, "is not supported with topology groups; use topology base"),
        ({"topology": {"name": "sharded"}}, "is not supported with topology sharded; use topology base"),
        ({"placement": {"cut": 1}}, "cut is not supported with protocol hogbatch; use hardsync, softsync or async"),
        (
            {"cluster": {"learners": 2, "shares": [1.0, 2.0]}},
            "hogbatch' is not supported with [cluster] shares; remove shares",
        ),
        ({"simulation": {"batching": "vmap"}}, "with [simulation] batching = 'vmap'; use batching = 'none'"),
        (
            {
                "hogbatch": {"workers": TWO, "weights": "shared"},
                "changes": [{"at_update": 1, "optimizer": {"learning_rate": 0.1}}],
            },
            "with [[changes]] at_update = 1, as no server updates; use at_epoch",
        ),
        (
            {"changes": [{"at_epoch": 1, "protocol": {"reference_batch_size": 64}}]},
            "[[changes]] at_epoch = 1: [protocol] name = 'hogbatch' is not supported with a change of [protocol]; ",
        ),
    ],
)
def test_a_mistake_is_one_line(tables: dict[str, Any], text: str) -> None:
    given = {"protocol": {"name": "hogbatch"}, "hogbatch": {"workers": TWO}, "cluster": {"learners": 2}} | tables
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        Job(**given).resolved()
    assert "\n" not in str(error.value)


def test_nobody_knows_how_many_updates_there_will_be() -> None:
    job = Job(protocol={"name": "hogbatch"}, hogbatch={"workers": TWO}, cluster={"learners": 2})
    job = job.with_(optimizer={"schedule": "cosine", "schedule_every": "update"})
    with pytest.raises(ConfigError, match="the protocol decides how many updates an epoch has"):
        schedule_of(job, job.plan(), 1000)


def test_one_table_is_of_all_learners_that_no_other_names() -> None:
    job = Job(
        protocol={"name": "hogbatch"},
        hogbatch={"workers": [{"learners": [1], "kind": "large", "max": 200}, {"kind": "small", "threads": 3}]},
        cluster={"learners": 3},
    )
    rule = Hogbatch.of(job.make_protocol())
    small = BatchBounds("small", 3, 1, 64)
    assert rule.workers == (small, BatchBounds("large", 1, 128, 200), small)
    assert job.with_(training={"epochs": 2}).hogbatch == job.hogbatch


def test_set_changes_one_table_or_all(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    tables = "".join(
        f'[[hogbatch.workers]]\nlearners = [{i}]\nkind = "{kind}"\n' for i, kind in enumerate(["small", "large"])
    )
    path.write_text(f'[protocol]\nname = "hogbatch"\n[cluster]\nlearners = 2\n{tables}')
    job = Job.load(path, ["hogbatch.workers.0.threads=8", "hogbatch.workers.1.max=200", "hogbatch.rule=adaptive"])
    assert [table.bounds for table in job.hogbatch.workers] == [
        BatchBounds("small", 8, 1, 64),
        BatchBounds("large", 1, 128, 200),
    ]
    whole = Job.load(path, ['hogbatch.workers=[{kind = "large"}]'])
    assert [table.bounds for table in whole.hogbatch.workers] == [BatchBounds("large", 1, 128, 8192)]
    assert not Job.load(path, ["hogbatch.workers=", "protocol.name=async"]).hogbatch.workers
    for override, text in {
        "hogbatch.workers.2.max=9": "hogbatch.workers has no table 2; valid: 0 to 1",
        "hogbatch.workers.max=9": "must name one of the tables, such as hogbatch.workers.0.max",
        "hogbatch.workers.0.max.x=9": "[hogbatch] workers.0.max must be a whole number, not {'x': 9}",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"--set {override}: {text}")):
            Job.load(path, [override])


def test_only_large_workers_overwrite() -> None:
    workers = [{"learners": [0], "kind": "small", "threads": 2}, {"kind": "large"}]
    table = {"workers": workers, "weights": "shared", "gpu_write": "overwrite"}
    run = Job(protocol={"name": "hogbatch"}, hogbatch=table, cluster={"learners": 3})
    plan = run.plan()
    assert [manner(run, plan, role) for role in plan.learners] == [(False, False), (True, True), (True, True)]
