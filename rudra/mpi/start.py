"""Starts MPI on a rank, and raises an error if launcher and MPI library are incompatible.

Ranks that do not find each other each form a separate job. MPI itself reports nothing, or ends the process with a text
for its developers. So the library is asked for its name before it starts.
"""

import ctypes
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from rudra.errors import LaunchError
from rudra.mpi.failures import watched_start
from rudra.mpi.launch import world_size
from rudra.mpi.loopback import choose_loopback, listen_on_loopback

START_S = 300
"""Seconds after which MPI's start is aborted, because it may wait for ever for a rank that has died."""


WITHOUT_OFI = ("OMPI_MCA_btl", "^ofi")
"""Setting of Open MPI that excludes the OFI transport for one-sided messages: unused, and slow to shut down (1 s)."""

WITHOUT_PUT = ("OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma")
"""Open MPI's default flags of TCP without `put`.

With `put`, a large message waits until the receiver answers, and the answer comes behind all data that the receiver
itself is sending. So if two ranks exchange large messages, one direction of the link is often idle. Open MPI also
deadlocks with `put` when a connection breaks.
"""


def start_mpi() -> None:
    """Starts MPI unless it runs already, and checks that the ranks found each other.

    Raises:
        LaunchError: mpi4py or the MPI library cannot be loaded, or belongs to another MPI than the launcher.
    """
    expected = world_size()
    try:
        from mpi4py import MPI, rc
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"MPI cannot be used: {reason}; `rudra doctor` says more") from None
    keep_hangup()
    library = MPI.Get_library_version()
    if not MPI.Is_initialized():
        mismatch = unsuited(os.environ, library, speaks_pmix=_speaks_pmix())
        if mismatch is not None:
            raise LaunchError(mismatch)
        for setting in (WITHOUT_OFI, WITHOUT_PUT):
            os.environ.setdefault(*setting)
        alone = choose_loopback(os.environ)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(START_S)
        with watched_start():
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))  # "multiple", unless users say less
        signal.alarm(0)
        if alone:
            listen_on_loopback(os.getpid())
    found = MPI.COMM_WORLD.size
    if expected is not None and expected != found:
        raise LaunchError(
            f"the launcher started {expected} ranks, but {library_name(library)} found {found}: they belong to "
            "different MPIs; use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), or the mpirun of this MPI"
        )


def keep_hangup() -> None:
    """Restores SIGHUP to its state before MPI was loaded, because UCX, a library of Open MPI's, takes it over."""
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP) or signal.SIG_DFL)


def unsuited(env: Mapping[str, str], library: str, *, speaks_pmix: bool) -> str | None:
    """Returns why ranks that were started this way cannot find each other, with the remedy, or None if they can.

    Args:
        env: environment of a rank.
        library: version text of the MPI library.
        speaks_pmix: whether the library has PMIx, which only some builds of MPICH have.
    """
    name = library_name(library)
    open_mpi = re.match(r"Open[ -]MPI v?(\d+)", name)
    understood = {"pmi"} | ({"pmix"} if speaks_pmix else set())
    if open_mpi is not None:
        understood = {"pmix"} | ({"pmi"} if int(open_mpi[1]) < 5 else set())
    mpirun = "OMPI_COMM_WORLD_SIZE" in env  # Open MPI's
    spoken = {"pmix"} if mpirun or "PMIX_RANK" in env else set()
    spoken |= {"pmi"} if "PMI_RANK" in env else set()
    if not spoken or spoken & understood:
        return None
    kind = env.get("SLURM_MPI_TYPE", "none")
    launcher = "Open MPI's mpirun" if mpirun else "MPICH's mpirun" if kind == "none" else f"srun --mpi={kind}"
    remedy = "srun --mpi=pmix" if open_mpi is not None else "srun --mpi=pmi2"
    return f"{launcher} cannot start ranks of {name}, which mpi4py loads: use {remedy}, or the mpirun of that MPI"


def library_name(version: str) -> str:
    """Returns name and version of an MPI library, from its version text."""
    return " ".join(re.split(r"[,\n\0]", version)[0].replace("Version:", "").split())


def gpu_aware() -> bool | None:
    """Returns whether the MPI library reports access to the memory of NVIDIA GPUs, or None if it has no such report."""
    for library in _libraries():
        if (open_mpi := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
            return bool(open_mpi())
        if (mpich := getattr(library, "MPIX_GPU_query_support", None)) is not None:
            yes = ctypes.c_int()
            return mpich(0, ctypes.byref(yes)) == 0 and bool(yes)  # 0: CUDA, and no error
    return None


def _speaks_pmix() -> bool:
    """Returns whether the MPI library of this process has PMIx, or True if that is unknown."""
    libraries = _libraries()
    return not libraries or any(hasattr(library, "PMIx_Init") for library in libraries)


def _libraries() -> list[ctypes.CDLL]:
    """Returns the MPI libraries that this process has loaded, if /proc can be read."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [ctypes.CDLL(path) for path in sorted({line.split()[-1] for line in lines if "/libmpi" in line})]
    except OSError:
        return []
