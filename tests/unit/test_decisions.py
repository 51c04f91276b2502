"""Decided changes as text: in messages, in events, and in the output of commands."""

import json
from pathlib import Path

import numpy as np
import pytest

from rudra.cli.main import main
from rudra.core.decisions import LONGEST, from_events, in_events, in_texts, recorded, taken_effect, text_of
from rudra.core.messages import ChangeDecided
from rudra.core.training_state import DecidedChange
from rudra.core.wire import CONTROL_BYTES, decode, encode
from rudra.job.changes import JobChange, with_decided

LONG = json.dumps({"cluster": {"shares": [1.5] * 240}})


def test_a_long_change_travels_in_one_message_and_is_recorded_in_several_events() -> None:
    assert 2 * 512 < len(LONG) < LONGEST
    message = decode(encode(ChangeDecided(4, 2, in_texts(LONG))))
    assert isinstance(message, ChangeDecided)
    assert (message.sender, message.number, text_of(message.rows)) == (4, 2, LONG)
    assert len(encode(ChangeDecided(4, 2, in_texts("x" * LONGEST)))) <= CONTROL_BYTES
    events = np.concatenate([in_events(b"decision", text, 7, 0, 0.5) for text in (LONG, '{"topology": {}}', LONG)])
    assert (events["timestamp"] == 7).all()
    assert from_events(events, b"decision") == [json.loads(LONG), {"topology": {}}, json.loads(LONG)]
    assert from_events(events[:-1], b"decision") == [json.loads(LONG), {"topology": {}}], "a killed run lost the rest"
    assert from_events(events, b"decided") == []


def test_the_record_has_what_took_effect_where() -> None:
    decided = [DecidedChange('{"at_epoch": 2, "training": {"minibatch_size": 4}}', 1), DecidedChange(LONG, 0)]
    events = np.concatenate([in_events(b"decided", taken_effect(each), 7, 0, 0.5) for each in decided])
    assert recorded(events) == tuple(decided)


def test_decided_changes_have_their_places_among_planned_ones() -> None:
    planned = [
        JobChange(at_epoch=2, protocol={"name": "softsync", "n": 2}),
        JobChange(at_update=90, training={"minibatch_size": 4}),
    ]
    decided = [
        ('{"at_update": 7, "optimizer": {"learning_rate": 0.1}}', 0),
        ('{"at_epoch": 2, "protocol": {"name": "async"}, "optimizer": {"learning_rate": 0.2}}', 2),
        ('{"at_epoch": 2, "optimizer": {"momentum": 0.5}}', 2),
        ('{"at_epoch": 3, "optimizer": {"momentum": 0.0}}', 2),
    ]
    found = with_decided(planned, decided)
    assert [change.boundary.text for change in found] == ["update 7", "epoch 2", "epoch 3", "update 90"]
    assert found[1].tables == {
        "protocol": {"name": "async", "n": None, "options": {}},
        "optimizer": {"learning_rate": 0.2, "momentum": 0.5},
    }


def test_validate_tells_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "mlp"\n[decisions]\ncall = "mine:decide"\nat = "update"\n')
    assert main(["validate", str(path), "--syntax"]) == 0
    said = capsys.readouterr().out
    assert "mine:decide after each epoch; changes take effect with the next update" in said
