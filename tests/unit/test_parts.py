"""Weights in parts: where they are cut, and that the arithmetic on parts is that on the whole."""

from typing import Any

import pytest
import torch
from flat_layout import NO_DECAY, SIZE, SLOW, layout

from rudra.compute.optim import UpdateRule
from rudra.compute.parts import cut, joined
from rudra.compute.runs import CACHE_LINE, runs_of
from rudra.core.layout import Entry
from rudra.errors import ConfigError
from rudra.job.tables import OptimizerTable

WHOLE = layout()[-1].offset + layout()[-1].size

TABLES: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4},
    "nesterov": {"name": "sgd", "momentum": 0.9, "options": {"nesterov": True}},
    "dampening": {"name": "sgd", "momentum": 0.9, "options": {"dampening": 0.1}},
    "caffe": {"name": "sgd", "momentum": 0.9, "momentum_form": "caffe", "weight_decay": 5e-4},
    "adagrad": {"name": "adagrad", "options": {"initial_accumulator_value": 0.1}},
    "adam": {"name": "adam", "weight_decay": 0.01},
    "amsgrad": {"name": "adam", "options": {"amsgrad": True}},
    "adamw": {"name": "adamw", "weight_decay": 0.01},
    "rmsprop": {"name": "rmsprop", "momentum": 0.9, "options": {"centered": True}},
}
GROUPS = {"one": [], "no decay": [NO_DECAY], "slow, no decay": [SLOW, NO_DECAY]}


def table(name: str, groups: list[dict[str, Any]]) -> OptimizerTable:
    return OptimizerTable.model_validate({"learning_rate": 0.02, "groups": groups, **TABLES[name]})


def clipped(part: slice) -> slice:
    """Its parameters, without the buffer at the end."""
    return slice(part.start, min(part.stop, SIZE))


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", TABLES)
def test_what_owners_of_parts_do_is_what_one_owner_does(name: str, groups: str, count: int, threads: int) -> None:
    """Steps, and the state that a checkpoint keeps; also where they go on from the state of one owner."""
    about = table(name, GROUPS[groups])
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(SIZE, generator=generator)
    gradients = [torch.randn(SIZE, generator=generator) for _ in range(4)]
    whole = start.clone()
    parts = [clipped(part) for part in cut(about, layout(), count)]
    pieces = [start[part].clone() for part in parts]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rule = UpdateRule(about, whole, layout())
        rules = [UpdateRule(about, piece, layout(), part) for piece, part in zip(pieces, parts, strict=True)]
        for step, gradient in enumerate(gradients):
            if step == 2:  # they go on from a checkpoint of one owner
                state = {key: value.clone() for key, value in rule.state().items()}
                rules = [UpdateRule(about, piece, layout(), part) for piece, part in zip(pieces, parts, strict=True)]
                for each in rules:
                    each.restore(state)
            rule.step(gradient, 0.01)
            for each, part in zip(rules, parts, strict=True):
                each.step(gradient[part], 0.01)
            assert torch.equal(torch.cat(pieces).view(torch.int32), whole.view(torch.int32))
    finally:
        torch.set_num_threads(before)
    kept = joined([{key: value.reshape(-1).numpy() for key, value in each.state().items()} for each in rules])
    state = rule.state()
    assert kept.keys() == state.keys()
    for key, value in state.items():
        assert kept[key].tobytes() == value.reshape(-1).numpy().tobytes(), key


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", GROUPS)
def test_cuts_are_even_and_lie_where_bits_are_the_same(groups: str, count: int) -> None:
    about = table("momentum", GROUPS[groups])
    parts = cut(about, layout(), count)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == WHOLE
    runs = [run for _, run in runs_of(about.groups, layout())]
    for part in parts[1:]:
        assert any((part.start - run.start) % CACHE_LINE == 0 for run in runs if run.start <= part.start <= run.stop)
        assert any(run.start < part.start < run.stop for run in runs), "the large layer is cut"
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 4 * CACHE_LINE


@pytest.mark.parametrize(("size", "count"), [(15, 2), (31, 3), (160, 50)])
def test_a_model_that_is_too_small_is_refused(size: int, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"options.shards = {count}: the model's {size} numbers cannot be divided"):
        cut(table("sgd", []), [Entry("weight", (size,), 0, size, "parameter")], count)


def test_buffers_are_in_the_last_part_however_many_there_are() -> None:
    entries = [Entry("weight", (64,), 0, 64, "parameter"), Entry("mean", (512,), 64, 512, "buffer")]
    assert cut(table("sgd", []), entries, 2) == (slice(0, 32), slice(32, 576))
