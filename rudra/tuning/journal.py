"""The journal of a search: what was decided and measured, one line of JSON each, and never rewritten.

A search that was stopped reads its journal and continues as if it had not been stopped. The first line describes the
search. A journal of another search is refused.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rudra.errors import ConfigError, ResultsError
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.ruler import Mark

NAME = "journal.jsonl"
FORMAT = 2


class Journal:
    """Journal in a directory.

    Args:
        path: File of the journal. It is made if it is missing.
        head: Description of the search: key -> value, as JSON has it.

    Raises:
        ConfigError: The journal describes another search. The text names the first difference.
        ResultsError: The file cannot be read or written.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        head = json.loads(json.dumps({"format": FORMAT, **head}, default=str))
        try:
            self.entries, complete = read(path)
            with path.open("r+b" if path.exists() else "wb") as file:
                file.truncate(complete)  # a line that was being written when the search was killed
        except OSError as error:
            raise ResultsError(f"{path}: cannot be used: {error.strerror}") from None
        if not self.entries:
            self.add(head)
            return
        if other := _difference(self.entries[0], head):
            key, then, now = other
            raise ConfigError(
                f"{path} is of another search: its {key} is {_short(then)}, not {_short(now)}; give another --output"
            )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Writes an entry to the disk.

        Raises:
            ResultsError: It cannot be written.
        """
        text = json.dumps(entry, default=str, ensure_ascii=False)
        try:
            with self.path.open("ab") as file:
                file.write(text.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot write: {error.strerror}") from None
        self.entries.append(json.loads(text))

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yields the entries of a kind, in order."""
        return (entry for entry in self.entries if entry.get("kind") == kind)


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Reads all complete lines of a journal, if it exists. Also returns their length in bytes.

    Raises:
        ConfigError: A line before the last one is damaged.
        OSError: The file cannot be read.
    """
    entries: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for place, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not line.endswith(b"\n"):
            if place + 1 < len(lines):
                raise ConfigError(f"{path}: line {place + 1} is damaged; give another --output")
            break
        entries.append(entry)
    return entries, sum(map(len, lines[: len(entries)]))


def outcomes(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[Probe, Outcome]]:
    """Yields the probes of a journal with their outcomes, in the order of training."""
    for entry in entries:
        if entry.get("kind") == "probe":
            probe = Probe.of(entry["settings"], entry["origin"], entry["epochs"], entry["seed"])
            noise = ProbeNoise(*entry["noise"]) if entry["noise"] else None
            yield probe, Outcome(tuple(Mark(*mark) for mark in entry["marks"]), entry["failed"], noise)


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first key that differs, such as job.training.seed, and its values. None: all are equal."""
    for key in {**then, **now}:
        one, other = then.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            if inner := _difference(one, other):
                return f"{key}.{inner[0]}", *inner[1:]
        elif one != other:
            return key, one, other
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
