"""Examination of a machine: everything that a run needs, with advice about each problem."""

import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rudra.errors import LaunchError
from rudra.machine import cores, free_memory
from rudra.mpi.launch import environment, find_mpirun, is_open_mpi, mpirun_command, world_size

PROBE_TIMEOUT_S = 300.0
"""Maximum time for an answer of two ranks, which is the time that a run allows MPI to start."""

LATE = f"two ranks gave no answer within {PROBE_TIMEOUT_S:.0f} s"

BUSY = "try again when the machine is less busy"

DEFAULT_LEARNERS = 4

RESERVED = 1 << 30
"""Size of the memory that the two ranks try to share. They do not use it."""

PROBE = """
import json, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
          MPI.THREAD_MULTIPLE: "multiple"}
names = comm.gather(MPI.Get_processor_name())
from rudra.mpi.arena import Arena
arena, node = Arena(), comm.Split_type(MPI.COMM_TYPE_SHARED)
arena.allocate(1 << 20)
memory = [node.size, arena.meet(node, comm.rank, %d)]
from rudra.compute.window import WindowLayout
from rudra.mpi.shared_window import share_window
near = node.size == comm.size
from rudra.mpi.device_arena import tried
gpus = tried(node, comm.rank)
window = [near, share_window(comm, 0, WindowLayout(1000, 2, "locked"), member=True)[1] if near else ""]
if comm.rank == 0:
    from rudra.mpi.start import gpu_aware
    print(json.dumps({"library": MPI.Get_library_version().strip("\\0\\n "), "threads": levels[MPI.Query_thread()],
                      "size": comm.size, "hosts": sorted(set(names)), "gpu": gpu_aware(),
                      "memory": memory, "window": window, "ipc": gpus}), flush=True)
""".replace("%d", str(RESERVED))

ULFM_PROBE = """
import sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.Is_revoked():
    sys.exit(1)
shrunk = comm.Shrink()
if comm.rank == 0:
    print("ulfm", shrunk.size, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: examined thing.
        state: state of the thing. "fail" prevents every run, "warn" only some kinds of run.
        found: observation.
        advice: how to fix the problem. Empty: no problem.
    """

    subject: str
    state: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Examines one thing after the other."""
    yield Finding("python", "ok", f"{platform.python_version()} in {sys.prefix}")
    yield _torch()
    yield _gpus()
    yield _package("numpy")
    yield _package("mpi4py", advice="pip install mpi4py")
    yield from _mpi()
    yield _slurm()
    yield _cores()
    yield _swmr()
    for extra, module in (("digits", "sklearn"), ("plot", "matplotlib")):
        if importlib.util.find_spec(module) is None:
            yield Finding(module, "warn", "not installed", f"pip install 'rudra[{extra}]'")
        else:
            yield Finding(module, "ok", "installed")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "fail", _first_line(error), "pip install torch")
    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _gpus() -> Finding:
    """Examines the GPUs that learners of this node would use."""
    with suppress(ImportError, OSError):
        from rudra.compute.device.devices import seen  # and torch, which may be broken

        if found := seen():
            return Finding("gpus", "ok", "; ".join(found))
    return Finding("gpus", "ok", "torch sees none; learners compute on the CPU")


def _package(name: str, advice: str = "") -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", advice or f"pip install {name}")


def _mpi() -> Iterator[Finding]:
    """Examines the launcher, and the MPI library as seen by two ranks."""
    if world_size() is not None:
        advice = "run `rudra doctor` without mpirun or srun"
        yield Finding("launcher", "warn", "this process is an MPI rank itself", advice)
        return
    try:
        mpirun = find_mpirun()
        open_mpi = is_open_mpi(mpirun)
    except LaunchError as error:
        yield Finding("launcher", "fail", "cannot be used", str(error))
        return
    yield Finding("launcher", "ok", f"{mpirun}{'' if open_mpi else ' (not Open MPI)'}")
    said, reason = _probe(mpirun, open_mpi, PROBE)
    if said is None and reason == LATE and _busy():
        yield Finding("mpi", "warn", f"{reason}: {_busy()}", BUSY)
        return
    if said is None:
        yield Finding("mpi", "fail", reason, "see the message; is mpirun's MPI the one that mpi4py loads?")
        return
    yield from _mpi_findings(json.loads(said))
    if open_mpi:
        said, reason = _probe(mpirun, open_mpi, ULFM_PROBE, "--with-ft", "ulfm")
        if reason == LATE and _busy():
            yield Finding("fault tolerance", "warn", f"{reason}: {_busy()}", BUSY)
            return
        works = said == "ulfm 2"
        advice = "" if works else "runs survive a lost learner only if the MPI library has ULFM (Open MPI >= 5)"
        yield Finding("fault tolerance", "ok" if works else "warn", "ULFM works" if works else "no ULFM", advice)


def _mpi_findings(seen: dict[str, Any]) -> Iterator[Finding]:
    library = str(seen["library"]).split(",")[0].split("\n")[0]
    if seen["size"] != 2:
        advice = "install one MPI only, or put the mpirun that belongs to this library first on PATH"
        yield Finding("mpi", "fail", f"mpirun started 2 ranks, {library} found {seen['size']}", advice)
        return
    yield Finding("mpi", "ok", f"{library}, 2 ranks met on {', '.join(seen['hosts'])}")
    threads = seen["threads"]
    if threads == "multiple":
        yield Finding("mpi threads", "ok", "MPI_THREAD_MULTIPLE is granted")
    else:
        advice = "base works; push and pull threads need an MPI library built with MPI_THREAD_MULTIPLE"
        yield Finding("mpi threads", "warn", f"only MPI_THREAD_{threads.upper()} is granted", advice)
    told = {
        True: "yes: ranks on two nodes send GPU tensors directly",
        False: "no; GPU tensors travel through main memory",
        None: "unknown, the library does not report it; GPU tensors travel through main memory",
    }
    yield Finding("mpi gpu-aware", "ok", told[seen["gpu"]])
    yield _node_memory(*seen["memory"])
    yield _gpu_memory(seen["ipc"])
    yield _transports(seen["ipc"], gpu_aware=bool(seen["gpu"]))
    yield _window(*seen["window"])


def _node_memory(ranks: int, failure: str) -> Finding:
    """Examines whether ranks of this node can read each other's memory, and how much memory they can share."""
    if failure:
        advice = f"{_remedy(failure)}until then ranks of a node exchange messages, which is slower"
        return Finding("node memory", "warn", f"ranks cannot read each other's: {_first_line(failure)}", advice)
    if ranks < 2:
        return Finding("node memory", "ok", "not tried: the two ranks met on two nodes")
    limit, free = resource.getrlimit(resource.RLIMIT_FSIZE)[0], free_memory()
    found = f"ranks read each other's; {free / 2**30:.1f} GiB are free"
    if limit in {resource.RLIM_INFINITY, -1} or limit > free:
        return Finding("node memory", "ok", found)
    advice = "ulimit -f unlimited, which also limits shared memory; otherwise larger models use messages"
    return Finding("node memory", "warn", f"{found}, but a rank may share at most {limit / 2**30:.1f} GiB", advice)


def _gpu_memory(failure: str | None) -> Finding:
    """Examines whether ranks of this node can read each other's GPU memory. None: it was not tried."""
    if failure:
        advice = "cluster.transport = 'staged' works; it copies tensors to main memory, which is slower"
        return Finding("gpu memory", "warn", f"ranks cannot read each other's: {_first_line(failure)}", advice)
    found = "not tried: two ranks on one node with GPUs are needed" if failure is None else "ranks read each other's"
    return Finding("gpu memory", "ok", f"{found} (cluster.transport = 'ipc')")


def _transports(failure: str | None, *, gpu_aware: bool) -> Finding:
    """Says which transports `cluster.transport = "auto"` chooses here, and whether NCCL can be set.

    Args:
        failure: as for `_gpu_memory`.
        gpu_aware: whether the MPI library reads GPU memory.
    """
    with suppress(ImportError, OSError):
        from rudra.compute.device.devices import AUTO, DEVICES  # and torch, which may be broken

        if DEVICES[AUTO].count():
            within = "staged" if failure else "ipc"
            trial = " (a run tries it)" if failure is None else ""
            library = DEVICES[AUTO].library()
            groups = f"{library} for groups with cluster.transport = 'nccl' (not tried)" if library else "no NCCL"
            pairs = f"{within} within a node{trial}, {'mpi' if gpu_aware else 'staged'} between nodes"
            return Finding("transports", "ok", f"{pairs}; {groups}")
    return Finding("transports", "ok", "only ranks that compute on GPUs have some")


def _window(tried: bool, failure: str) -> Finding:
    """Examines whether workers of this node can share weights, and a lock that survives the death of its owner."""
    if failure:
        advice = 'hogbatch.weights = "server" works; a window needs Linux\'s memfd_create and robust mutexes'
        return Finding("window", "warn", f"ranks cannot share weights: {_first_line(failure)}", advice)
    found = "ranks can share weights, racing or locked" if tried else "not tried: the two ranks met on two nodes"
    return Finding("window", "ok", found)


def _remedy(failure: str) -> str:
    """Returns advice on how to let ranks read each other's memory, as far as it is known."""
    visible = "let ranks see each other in /proc: one user, one process namespace, one user namespace; "
    remedies = {
        errno.EFBIG: "ulimit -f unlimited, which also limits shared memory; ",
        **dict.fromkeys((errno.ENOSPC, errno.ENOMEM), "free memory, or ask for more; "),
        **dict.fromkeys((errno.EACCES, errno.ENOENT), visible),
        errno.EPERM: "allow memfd_create and /proc/PID/fd, which a security policy forbids; ",
        errno.ENOSYS: "allow memfd_create, which a sandbox or an old kernel lacks; ",
    }
    return next((text for number, text in remedies.items() if os.strerror(number) in failure), "")


def _probe(mpirun: Path, open_mpi: bool, script: str, *options: str) -> tuple[str | None, str]:
    """Runs a script on two ranks. Returns the last line of its output or None, and the reason if it failed."""
    command = mpirun_command(mpirun, 2, [sys.executable, "-c", script], open_mpi=open_mpi, root=os.geteuid() == 0)
    command[1:1] = options
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        output, errors = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None, LATE
    lines = output.strip().splitlines()
    if process.returncode == 0 and lines:
        return lines[-1], ""
    words = [line for line in errors.splitlines() if line.strip("- ")]
    reason = next((line for line in words if "Error:" in line), words[0] if words else "it printed nothing")
    return None, f"mpirun ended with code {process.returncode}: {reason}"


def _busy() -> str:
    """Returns a text about the load if it far exceeds the number of cores, and otherwise an empty text."""
    load = os.getloadavg()[0]
    return f"the machine is busy, with a load of {load:.1f} on {cores()} cores" if load > 1.5 * cores() else ""


def _slurm() -> Finding:
    """Examines whether batch jobs can be submitted here, and which ranks srun can start."""
    if shutil.which("sbatch") is None:
        return Finding("slurm", "ok", "not installed; only batch jobs need it")
    said, reason = _asked("sinfo", "--noheader", "--format=%R")
    if said is None:
        return Finding("slurm", "warn", f"sbatch is here, but no controller answers: {reason}", "is this a login node?")
    partitions = ", ".join(dict.fromkeys(said.split()))
    types, reason = _asked("srun", "--mpi=list")
    offered = mpi_types(types or "")
    found = f"partitions {partitions}; srun --mpi offers {', '.join(offered) or reason or 'nothing'}"
    try:
        wanted = "pmix" if is_open_mpi(find_mpirun()) else "pmi2"
    except LaunchError:
        return Finding("slurm", "ok", found)
    if wanted not in offered:
        advice = "start the ranks of this MPI with mpirun in batch jobs"
        return Finding("slurm", "warn", f"{found}, not {wanted}", advice)
    return Finding("slurm", "ok", f"{found}; this MPI needs {wanted}")


def mpi_types(said: str) -> list[str]:
    """Returns the types of `srun --mpi=list` that start MPI ranks."""
    words = (line.strip() for line in said.splitlines())
    return sorted(word for word in words if re.fullmatch(r"[a-z]\w*", word) and word != "none")


def _asked(*command: str) -> tuple[str | None, str]:
    """Returns the output of a SLURM command, or None and the reason for its failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, _first_line(error)
    said = (done.stdout + done.stderr).strip()
    return (said, "") if done.returncode == 0 else (None, said.partition("\n")[0] or f"{command[0]} failed")


def _cores() -> Finding:
    usable = cores()
    threads = max(1, usable // DEFAULT_LEARNERS)
    found = f"{usable} usable; {threads} per learner with {DEFAULT_LEARNERS} learners"
    if usable < DEFAULT_LEARNERS:
        return Finding("cores", "warn", found, "learners share cores, which is slower; they can also share ranks")
    return Finding("cores", "ok", found)


def _swmr() -> Finding:
    """Examines whether a result file in the temporary directory's file system can be read while it is written."""
    try:
        import h5py
    except (ImportError, OSError) as error:
        return Finding("h5py", "fail", _first_line(error), "pip install h5py")
    found = f"{h5py.__version__}, HDF5 {h5py.version.hdf5_version}"
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "probe.h5"
            with h5py.File(path, "w", libver="latest") as file:
                file.create_dataset("rows", (1,), maxshape=(None,), dtype="i8")
                file.swmr_mode = True
                file.flush()
                h5py.File(path, "r", libver="latest", swmr=True).close()
    except OSError as error:
        advice = "result files open only after their run has ended"
        return Finding("h5py", "warn", f"{found}: {_first_line(error)}", advice)
    return Finding("h5py", "ok", f"{found}, readable while written")


def _first_line(error: BaseException | str) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
