"""Checkpoints that are kept are of the very update, however slow the disk is."""

import random
from typing import Any

import pytest
from clusters import SAMPLES, TrialRows, job, validate
from resumable import ALONE, TREE

from rudra.core.actions import Commit, Save
from rudra.core.events import Saved
from rudra.prepare.nodes import nodes_of
from rudra.simulation.actor import Actor
from rudra.simulation.assembly import assemble
from rudra.simulation.timing_only import TimingOnly


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep", ["1 epochs", "2 epochs", "3 updates"])
@pytest.mark.parametrize(
    ("topology", "protocol"),
    [({"name": "base"}, "hardsync"), ({"name": "base"}, "async"), (TREE, "softsync"), (ALONE, "hardsync")],
    ids=str,
)
def test_each_that_is_to_be_kept_is(topology: dict[str, Any], protocol: str, keep: str, seed: int) -> None:
    """The disk takes up to ten times as long as an epoch, for the ordinary checkpoints in between, too."""
    run = job(
        protocol,
        4,
        epochs=5,
        seed=seed,
        topology=topology,
        simulation={"compute_s": 0.05, "jitter": 0.9},
        results={"checkpoint_every": "2 updates", "keep_checkpoints": keep},
        training={"evaluate": False},
        changes=[{"at_epoch": 2, "training": {"minibatch_size": 2 * SAMPLES}}],
    )
    rows, chance = TrialRows(), random.Random(seed)
    simulation = assemble(
        run,
        run.plan(nodes_of(run)),
        TimingOnly(),
        rows,
        training_samples=6 * 4 * SAMPLES,
        size_bytes=100,
        check=validate,
    )
    saved: list[int] = []
    kept: dict[str, int] = {}
    commit = simulation.do[Commit]

    def save_slowly(actor: Actor, action: Save, time: float) -> None:
        saved.append(action.position.timestamp)
        when = time + chance.choice([0.0, 0.1, 3.0])
        simulation.queue.later(when, actor.take, actor, Saved(action.position.timestamp))

    def commit_named(actor: Actor, action: Commit, time: float) -> None:
        if action.keep:
            kept[action.keep] = action.timestamp
        commit(actor, action, time)

    simulation.do |= {Save: save_slowly, Commit: commit_named}
    simulation.run()
    count, unit = int(keep.split()[0]), keep.split()[1]
    last = int(rows.totals["timestamp"])
    if unit == "updates":
        assert kept == {f"update{at}": at for at in range(count, last, count)}
    else:
        ends = {int(row["epoch"]): int(row["timestamp"]) for row in rows["epochs"]}
        assert kept == {str(epoch): ends[epoch] for epoch in range(count, 5, count)}
    assert len(set(saved)) == len(saved), "none is written twice"
