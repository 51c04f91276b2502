"""What the golden runs came to, in `bits.json`, and the command that writes it: `python tests/golden/bits.py`."""

import hashlib
import json
import re
import tempfile
from pathlib import Path

import torch
from runs import RUNS, warm_start
from tqdm import tqdm

import rudra

FILE = Path(__file__).with_name("bits.json")
PROCESSOR = Path("/proc/cpuinfo")
ABOUT = PROCESSOR.read_text() if PROCESSOR.exists() else ""
KIND = [*re.findall(r"^vendor_id\s*: (.+)", ABOUT, re.MULTILINE)[:1], *(["AMX"] if " amx_tile " in ABOUT else [])]
KEY = ", ".join([f"torch {torch.__version__.partition('+')[0]}", torch.backends.cpu.get_cpu_capability(), *KIND])
"""On what the bits of arithmetic depend: libraries have kernels for each maker's processors, and for generations."""


def bits(results: rudra.Results) -> list[str]:
    """SHA-256 of the final weights, and of the digests of the weights after each update."""
    with results:
        weights = results.weights_of()
        return [hashlib.sha256(part.tobytes()).hexdigest() for part in (weights, results.updates["digest"])]


def write() -> None:
    """Sets what this machine's arithmetic comes to, beside what others' does."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        jobs = {**RUNS, "adv async, a warm start": warm_start(directory)}
        found = {}
        for job in tqdm(jobs, disable=None):
            results = rudra.simulate(jobs[job], output=directory / "run.h5", force=True, progress="quiet")
            found[job] = bits(results)
    changed = [job for job, value in known.get(KEY, {}).items() if found.get(job) != value]
    FILE.write_text(json.dumps({**known, KEY: found}, indent=1) + "\n")
    print(f"{KEY}: {len(found)} runs; changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    write()
