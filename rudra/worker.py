"""Script of one rank of a run that `rudra.mpi.launch` started. It finds Rudra where the launching process found it."""

import ctypes
import gc
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


class PromptOutput(io.TextIOWrapper):
    """Standard error that mpirun forwards at once, although a progress bar ends no line.

    Everything below is C: a signal that arrives during a write does not cause a second write of the same data.
    """

    def __init__(self, descriptor: int, more: str) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        self._more, self._goes_on = more, False

    def write(self, text: str) -> int:
        self._goes_on = not text.endswith("\n") if text else self._goes_on
        return super().write(text)

    def flush(self) -> None:
        if self._goes_on:
            self._goes_on = False
            super().write(self._more)
        super().flush()


def main(file: str) -> int:
    """Takes part in the run that `file` describes.

    Args:
        file: two pickles. The first is `sys.path` of the launching process with the role of each world rank. The second
            is either a dict of the arguments of `rudra.mpi.session.run_ranks`, or a callable without arguments that
            returns the exit code.

    Returns:
        Exit code of this rank.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads, which spin on cores that other ranks need
    gc.disable()  # no collections during imports, which create hundreds of thousands of permanent objects
    if sys.platform == "linux":  # if mpirun or the fork server is killed, it cannot end its ranks
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    stops = (signal.SIGUSR1, signal.SIGINT)  # the first one is the launcher's Ctrl-C
    for number in stops:
        signal.signal(number, signal.SIG_DFL)  # nothing has begun that needs an orderly end
    with _open_own(file) as stream:  # not the fork server's stream, whose position ranks would share
        sys.path[:], roles = pickle.load(stream)
        from rudra import process_exit  # noqa: F401  must come before modules with exit handlers
        from rudra.errors import LaunchError
        from rudra.log import log
        from rudra.mpi import failures
        from rudra.mpi.launch import let_rank0_report, world_rank
        from rudra.mpi.relay import START_LINE, UNENDED
        from rudra.mpi.start import start_mpi

        failures.roles = roles
        sys.stderr = PromptOutput(2, UNENDED.decode())
        try:
            start_mpi()
        except LaunchError as error:  # the error is the same on every rank
            if world_rank() == 0:
                log.error(error)
            let_rank0_report(error.exit_code)
            return error.exit_code
        os.write(2, START_LINE)
        run = _load(stream, file)
    gc.freeze()
    gc.enable()
    for number in stops:
        signal.signal(number, signal.default_int_handler)
    return 1 if run is None else run()


def _open_own(file: str) -> io.BufferedReader:
    """Opens the launcher's file. Ends this rank if another user could have written it."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))  # until the file's `sys.path` is read
    from rudra.files import is_own

    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if is_own(stream.fileno()):
        return stream
    from rudra.log import log
    from rudra.mpi.launch import let_rank0_report, world_rank
    from rudra.mpi.relay import exit_line

    if world_rank() == 0:
        log.error(f"{file}: another user can write this file, so no rank reads it; write results elsewhere")
        os.write(2, exit_line(2))
    let_rank0_report(2)
    sys.exit(2)


def serve(listener: int, launcher: int) -> list[str]:
    """Imports modules for ranks, and forks ranks: see `rudra.mpi.forkserver.serve`, which returns in each rank."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    from rudra import process_exit  # noqa: F401  must come before modules with exit handlers
    from rudra.mpi import forkserver

    import_modules()
    gc.freeze()
    return forkserver.serve(socket.socket(fileno=listener), socket.socket(fileno=launcher))


def import_modules() -> None:
    """Imports what ranks need, also what they would import while they get ready."""
    with suppress(ImportError, RuntimeError):  # without MPI each rank reports it when it starts MPI
        import numpy.random
        import numpy.strings  # noqa: F401
        import torch.utils.serialization  # noqa: F401

        import rudra.mpi.session  # noqa: F401
        import topologies
        from rudra.mpi.start import keep_hangup
        from rudra.results.recorder import arithmetic

        keep_hangup()
        arithmetic()  # reads the versions of packages
        topologies.shipped()


def _load(stream: io.BufferedReader, file: str) -> Callable[[], int] | None:
    """Returns the task of this rank. None: a rank could not load it, and the first such rank prints the reason."""
    from mpi4py import MPI

    from rudra.data.thread import in_data_thread
    from rudra.log import log
    from rudra.mpi.failures import abort_on_dead_rank, named_ranks
    from rudra.mpi.quiet import QuietComm

    run: Callable[[], int] | None = None
    report = ""
    try:
        payload = in_data_thread(pickle.load, stream)  # it may contain datasets
        if callable(payload):
            run = payload
        else:
            from rudra.mpi.session import run_ranks

            def run() -> int:
                return run_ranks(**payload)[0]
    except BaseException as error:  # a module of the user's is missing or raises an exception
        report = f"{named_ranks([MPI.COMM_WORLD.rank])} cannot load the job: {type(error).__name__}: {error}\n"
        report += traceback.format_exc().rstrip("\n")
    with abort_on_dead_rank():
        reports = QuietComm(MPI.COMM_WORLD).allgather(report)
    if MPI.COMM_WORLD.rank == 0:  # all ranks have read the file, and the launcher may be killed
        with suppress(OSError):
            os.unlink(file)
    first = next((rank for rank, text in enumerate(reports) if text), None)
    if first == MPI.COMM_WORLD.rank:
        log.error(report)
    return run if first is None else None


def run(arguments: list[str]) -> NoReturn:
    """Takes part in a run as one rank, or as a fork server of ranks, and ends the process.

    Args:
        arguments: file of the run, or `--serve` and two descriptors: see `main` and `serve`.
    """
    try:
        sys.argv[:] = ["rudra"]  # modules of the user's may parse it
        if arguments[0] == "--serve":
            arguments = serve(*map(int, arguments[1:]))
        code = main(*arguments)
        from rudra import process_exit
        from rudra.mpi.failures import leave
        from rudra.mpi.relay import end_line

        os.write(2, end_line(code))
        sys.exit(process_exit.soon(leave(code)))
    except KeyboardInterrupt:  # before the run: ends by a signal, not through MPI, so that other ranks notice
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(1)


if __name__ == "__main__":
    run(sys.argv[1:])
