"""`rudra doctor`."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rudra.doctor import Finding

SUMMARY = "check that this machine can run jobs"

MORE = """\
Checks Python, torch, GPUs, MPI and its launcher, shared memory, SLURM, cores and HDF5, and prints how to fix each
problem. Exit code 1: a problem would stop every run."""

EXAMPLES = {
    "rudra doctor": "check this machine",
    "rudra doctor --json": "print the findings as JSON, for a script",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.doctor import examine

    findings = []
    for finding in examine():  # printed line by line, as some findings take long
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    failed = [finding.subject for finding in findings if finding.state == "fail"]
    if arguments.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"\nnot ready: {', '.join(failed)}" if failed else "\nready: try `rudra run digits`")
    return 1 if failed else 0


def _line(finding: "Finding") -> str:
    mark = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[finding.state]
    advice = f"\n     {'':16}-> {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.subject:16}{finding.found}{advice}"
