"""`rudra check`."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rudra.cli.options import search_beside, set_option

if TYPE_CHECKING:
    from rudra.job.job import Job

SUMMARY = "check your own protocol, averaging rule, correction or topology in many small cases"

MORE = """\
Runs small jobs in virtual time, most without data and models: few and many learners of different speeds, on every
topology or with every protocol. In each case the run must end, no gradient may be lost or counted twice, and an update
must have as many gradients as the protocol requires. A run that is resumed in the middle must continue as if it had not
been stopped: `state()` and `restore()` carry its state. A few cases train a small network. Their replay must be
identical, and if all learners wait for each other, the results of a resumed run must also be bitwise identical. An
unsupported combination must be refused in one line. Prints a line for each case. Exit code 0: no case failed; 1: a case
failed, or none passed."""

EXAMPLES = {
    "rudra check bounded:Bounded": "check a protocol on every topology",
    "rudra check bounded:Bounded --set protocol.options.ahead=0": "check it with other options",
    "rudra check clipped:Clipped": "check a correction of gradients where it may run",
    "rudra check racks:Racks": "check a topology with every protocol",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:CLASS", help="your protocol, averaging rule, correction or topology")
    set_option(parser, "set a key of protocol or topology; repeatable")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.errors import ConfigError
    from rudra.job.jobfiles import parsed
    from rudra.simulation.conformance import cases, outcome

    search_beside(Path.cwd() / "job.toml")
    tables: dict[str, dict[str, object]] = {"protocol": {}, "topology": {}}
    for text in arguments.overrides:
        table, *keys = parsed(text).key.split(".")
        if table not in tables or not keys or keys[0] == "name":
            raise ConfigError(f"--set {text}: valid: keys of protocol and topology, except name")
        inner: dict[str, object] = tables[table]
        for key in keys[:-1]:
            found = inner.setdefault(key, {})
            assert isinstance(found, dict)
            inner = found
        inner[keys[-1]] = parsed(text).value
    counts = dict.fromkeys(("ok", "refused", "FAILED"), 0)
    for case in cases(arguments.target, tables):
        name, status, why = outcome(case)
        if status == "ok" and case.real and (why := replayed(case.real_job())):
            status = "FAILED"
        counts[status] += 1
        print(f"{status:8} {name}{f': {why}' if why else ''}", flush=True)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{arguments.target}: {sum(counts.values())} cases: {told}")
    return 1 if counts["FAILED"] or not counts["ok"] else 0


def replayed(job: "Job") -> str:
    """Runs a job and replays it. Returns the differences of the replay, which are empty if there are none."""
    import rudra
    from rudra.errors import RudraError

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.h5"
        try:
            rudra.simulate(job, output=path, progress="quiet").close()
            found = rudra.replay(path, job=job, quiet=True)
        except RudraError as error:
            return f"replay: {error}"
    return f"replay: {found.difference.text}" if found.difference else ""
