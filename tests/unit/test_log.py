"""What Rudra tells while something runs: lines by default, records for an application that wants them."""

import io
import logging
import sys

import pytest

from rudra import log as module
from rudra.log import log, speak_as


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Of an application that has a handler of its own."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", found.append)
    monkeypatch.setattr(log, "handlers", [handler])
    return found


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("role", "rank"):
        monkeypatch.setattr(module._speaker, name, getattr(module._speaker, name))


def test_by_default_lines_are_written_to_what_standard_error_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", now := io.StringIO())
    log.info("100 % begins")
    log.error(ValueError("bad"))
    assert now.getvalue() == "rudra: 100 % begins\nrudra: bad\n"


def test_nobody_needs_to_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.error("too late")


@pytest.mark.usefixtures("speaker")
def test_an_application_gets_records_in_place_of_lines(
    records: list[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    log.info("first")
    speak_as(3, "tree server 0, learner 1")
    log.warning("tree server 0 (rank 3): late", extra={"role": "tree server 0"})
    log.error("last")
    told = [(record.getMessage(), *(record.__dict__[name] for name in ("role", "rank"))) for record in records]
    assert told == [
        ("first", "", None),
        ("tree server 0 (rank 3): late", "tree server 0", 3),
        ("last", "tree server 0, learner 1", 3),
    ]
    assert capsys.readouterr().err == ""
