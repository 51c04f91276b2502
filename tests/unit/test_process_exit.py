"""Processes that end without putting their modules away: nothing that is to happen before is lost."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from rudra import process_exit
import atexit, threading, time

class Kept:
    def __del__(self):
        print("put away", flush=True)

kept = Kept()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
{}
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(process_exit.soon(3))", 3, "thread\nhandler\n"),
        ("sys.exit(4)", 4, "thread\nhandler\nput away\n"),
        ("process_exit.soon(3); sys.stdout.flush(); sys.stdout.close(); sys.exit(3)", 3, ""),
    ],
)
def test_what_happens_at_the_end_happens_before_it(end: str, code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(end)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, said)


def test_output_that_nobody_reads_is_as_python_has_it() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom rudra import process_exit\nprint('x')\nsys.exit(process_exit.soon(0))",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    process.stdout.close()
    assert b"BrokenPipeError" in process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 120
