"""The training data lies in each node's memory once."""

import re
from pathlib import Path

import pytest
from processes import mpirun

pytestmark = pytest.mark.mpi

MEGABYTES = 96
PROGRAM = f"""
import os, sys, threading
import numpy as np, torch
from mpi4py import MPI
from torch.utils.data import TensorDataset
from rudra.mpi.node_memory import share

comm, what = MPI.COMM_WORLD, sys.argv[1]
made = None
if comm.rank == 1:
    big = np.arange({MEGABYTES} << 17, dtype=np.int64)
    made = {{
        "arrays": {{"big": big, "small": np.ones((2, 3), np.float32)}},
        "tensors": TensorDataset(torch.from_numpy(big).view(-1, 2)),
        "lock": threading.Lock(),
        "mapped": np.memmap(sys.executable, np.uint8, "r"),
    }}[what]
got = share(comm, 1, made)
del made
if got is None or what in ("lock", "mapped"):
    print(f"rank {{comm.rank}}: {{'the one made' if got is not None else 'nothing'}}", flush=True)
    sys.exit()
array = got["big"] if what == "arrays" else got.tensors[0].numpy().reshape(-1)
assert int(array[-1]) == len(array) - 1 and int(array.sum()) == len(array) * (len(array) - 1) // 2
comm.Barrier()
array[comm.rank] = -5  # a page of one's own
comm.Barrier()
assert [int(x) for x in array[: comm.size]] == [-5 if i == comm.rank else i for i in range(comm.size)]
private = pss = 0
with open("/proc/self/smaps") as maps:
    inside = False
    for line in maps:
        if "-" in line.split()[0]:
            inside = "rudra-data" in line
        elif inside and line.startswith("Private_Dirty"):
            private += int(line.split()[1])
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1])
comm.Barrier()
print(f"rank {{comm.rank}}: {{private}} kB of its own, share {{pss}} kB", flush=True)
"""


@pytest.mark.parametrize("what", ["arrays", "tensors"])
def test_arrays_are_one_memory_until_somebody_writes(what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    code, out, err = mpirun(4, "-m", "mpi4py", str(tmp_path / "program.py"), what)
    assert code == 0, err
    told = re.findall(r"rank (\d): (\d+) kB of its own, share (\d+) kB", out)
    assert sorted(rank for rank, _, _ in told) == list("0123")
    assert all(int(private) <= 64 for _, private, _ in told), "a page or two, not a copy"
    assert sum(int(share) for _, _, share in told) < 1.1 * MEGABYTES * 1024


@pytest.mark.parametrize("what", ["lock", "mapped"])
def test_what_cannot_be_shared_stays_with_whom_made_it(what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    code, out, err = mpirun(3, "-m", "mpi4py", str(tmp_path / "program.py"), what)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0: nothing", "rank 1: the one made", "rank 2: nothing"]
