"""What tests share that make up their cases: how many, what may come of bad input, and how to damage good input.

They make other cases each time; `--hypothesis-profile=fuzz` makes a hundred times as many.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rudra.cli.main import main
from rudra.errors import RudraError
from rudra.job.job import Job
from rudra.job.table import Table
from rudra.plugins import resolve
from tests import forks

A, B = TypeVar("A"), TypeVar("B")

ROOT = Path(__file__).resolve().parents[2]

DEADLINE = timedelta(seconds=60)  # of one case: a hang, not a slow machine


def cases(count: int) -> settings:
    """How many cases a test makes: a fifth of a count, and in a campaign twenty times that count."""
    return settings(
        max_examples=max(1, count * settings().max_examples // 200),
        deadline=DEADLINE,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def in_campaign() -> bool:
    """Whether `--hypothesis-profile=fuzz` is given: then tests leave nothing out."""
    return settings().max_examples >= 1000


def in_turn(names: Iterable[A], values: Sequence[B], each: int = 2) -> list[tuple[A, B]]:
    """Pairs every name with `each` of the values, and every value with about as many names; in a campaign with all."""
    if in_campaign():
        return list(product(names, values))
    count = len(values)
    return [
        (name, values[(place + ahead * count // each) % count])
        for place, name in enumerate(names)
        for ahead in range(each)
    ]


def refused(call: Callable[[], object], *names: str) -> str | None:
    """Makes a call that works or fails as a RudraError in one line with one of these names; returns that line."""
    try:
        call()
    except RudraError as error:
        text = str(error)
        assert text.isprintable(), text
        assert any(name in text for name in names), text
        return text
    return None


class Said(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments: object) -> Said:
    """Runs a command line in this process. Whatever it was given, it ends as it should."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(map(str, arguments)))
    said = Said(code, out.getvalue(), err.getvalue())
    assert code in {0, 1, 2}, said
    assert "Traceback" not in said.err
    assert all(line.startswith("rudra: ") for line in said.err.splitlines()), said.err
    if code == 2:
        told = [line for line in said.err.splitlines() if "may differ" not in line]  # which a replay says before
        assert len(told) == 1, said.err
        assert said.out == ""
    return said


@contextlib.contextmanager
def fresh(path: Path) -> Iterator[Path]:
    """An empty directory for one case."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path)


TEXTS = st.text(max_size=12) | st.sampled_from(["", "\n", "\0", "\x1b[2J", "../..", "x" * 300, "1", "true", "nan"])
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.integers(-400, 5000).map(lambda digits: 16**digits if digits > 0 else digits),
    st.floats(),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 1e308, 5e-324, float("inf"), float("nan")]),
)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.dates(), st.datetimes(), st.times())
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
"""Whatever can stand in a TOML file."""


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """What may become of a file: cut off, with flipped bits, with other numbers, longer, or something else."""
    place = st.integers(0, max(0, len(content) - 1)) | st.integers(0, min(64, max(0, len(content) - 1)))
    flips = st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=4)
    number = st.sampled_from(
        [b"\0\0\0\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x80\0\0\0", b"\x7f" + b"\xff" * 7]
    )
    return st.one_of(
        place.map(lambda end: content[:end]),
        flips.map(lambda found: _flipped(content, found)),
        st.tuples(place, number).map(lambda at: content[: at[0]] + at[1] + content[at[0] + len(at[1]) :]),
        st.tuples(place, st.binary(min_size=1, max_size=9)).map(lambda at: content[: at[0]] + at[1] + content[at[0] :]),
        st.tuples(place, place).map(lambda at: content[: min(at)] + content[max(at) :]),
        st.binary(max_size=64),
    )


def _flipped(content: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(content)
    for place, bits in flips:
        if changed:
            changed[place] ^= bits
    return bytes(changed)


def toml(value: Any) -> str:
    """A value as TOML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(key))} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return hex(value) if value > 2**63 else repr(value)  # beyond 4,300 digits no other way is quick
    return repr(value) if isinstance(value, float) else value.isoformat()


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'


IN_PROCESS = "import runpy; runpy.run_module('tests.unit.fuzzing', run_name='__main__'); sys.exit()"


def survived(read: str, file: Path, place: Path, count: int) -> str:
    """Reads copies of a file with damaged bytes, each in a process of its own, because HDF5 itself might crash.

    Args:
        read: `module:function` that gets the copy's path; it may raise a RudraError in one line that names the copy.
        file: the good one.
        place: directory for the copies.
        count: how many.

    Returns:
        `[]` and a line's end; else what went wrong: pairs of a case's seed and its exit code, and what was printed.
    """
    line = [*forks.rudra(IN_PROCESS), read, str(file), str(place), str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=60 + count, check=False
    )
    return done.stdout + done.stderr[-4000:]


def _in_child_processes(read: Callable[[Path], object], content: bytes, place: Path, count: int) -> None:
    failures = []
    for seed in range(count):
        path = place / "damaged.h5"
        path.write_bytes(_with_damage(content, random.Random(seed)))
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(_exit_code(read, path))
        _, status = os.waitpid(child, 0)
        if status:
            failures.append((seed, os.waitstatus_to_exitcode(status)))
    print(json.dumps(failures))


def _exit_code(read: Callable[[Path], object], path: Path) -> int:
    try:
        refused(lambda: read(path), str(path))
    except BaseException:
        traceback.print_exc()
        return 3
    return 0


def _with_damage(content: bytes, random: random.Random) -> bytes:
    changed = bytearray(content)
    how = random.randrange(8)
    if how == 0:
        return bytes(changed[: random.randrange(len(changed))])
    if how == 1:
        first, size = random.randrange(len(changed)), random.randrange(1, 5000)
        changed[first : first + size] = random.choice([b"\0", b"\xff"]) * size
    if how == 2:
        first, size = random.randrange(len(changed)), random.randrange(1, 5000)
        del changed[first : first + size]
    if how == 3:
        changed[11] |= 1  # as if it were being written
    used = [i for i in range(0, len(content), 64) if any(content[i : i + 64])]  # most of a small file is empty
    for _ in range(random.choice([1, 1, 2, 8, 64])):
        at = random.choice(used) + random.randrange(64)
        if at < len(changed):
            changed[at] = random.choice([0, 255, changed[at] ^ (1 << random.randrange(8)), random.randrange(256)])
    return bytes(changed)


TABLES = {
    name: list(field.annotation.model_fields)
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
}
KEYS = [(table, key) for table, keys in TABLES.items() for key in keys]
SHIPPED = "hardsync softsync async base adv adv* groups sgd adam rmsprop adagrad mlp lenet digits idx cifar10 p775"
NAMES = st.sampled_from([*SHIPPED.split(), "json:dumps", "math:pi", "no.such:thing", "a:b:c", ":", "x:", ":x", ""])
DEPTHS = st.sampled_from([30, 300, 3000, 30000])
DEEP = st.one_of(
    DEPTHS.map(lambda depth: b"a = " + b"[" * depth + b"]" * depth),
    DEPTHS.map(lambda depth: b"a = " + b"{a = " * depth + b"1" + b"}" * depth),
    DEPTHS.map(lambda depth: b"[model.options]\n" + b".".join([b"a"] * depth) + b" = 1"),
    DEPTHS.map(lambda depth: b"[study.grid]\n" + b".".join([b"a"] * depth) + b" = 1"),
    DEPTHS.map(lambda digits: b"[training]\nepochs = " + b"9" * digits),
    DEPTHS.map(lambda digits: b"[training]\nepochs = 0x" + b"9" * digits),
    DEPTHS.map(lambda digits: b"[optimizer]\nlearning_rate = 1e" + b"9" * digits),
    DEPTHS.map(lambda length: b"[model]\nname = '" + b"a" * length + b"'"),
    DEPTHS.map(lambda length: b"[data]\npath = '" + b"a" * length + b"'"),
)


if __name__ == "__main__":
    read_ = resolve(sys.argv[1])
    assert callable(read_)
    _in_child_processes(read_, Path(sys.argv[2]).read_bytes(), Path(sys.argv[3]), int(sys.argv[4]))
