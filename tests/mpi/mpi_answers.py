"""What MPI answers to calls of all kinds while ranks send messages and die."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def told_by_mpi(mpi: Any, comm: Any, ask: Callable[[str], None]) -> list[Any]:
    """What rank 0 of three is told by MPI, where rank 1 sends what it is asked for, and rank 2 dies.

    Args:
        mpi: `mpi4py.MPI`, or what stands in for it.
        comm: of rank 0.
        ask: has rank 1 send a text, or with "die" rank 2 die.
    """
    told: list[Any] = []

    def note(what: str, call: Callable[[], Any], until: Callable[[Any], bool] = lambda answer: True) -> Any:
        end = time.monotonic() + 60
        while True:
            try:
                answer = call()
            except mpi.Exception as error:
                classes = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")
                answer = next(name for name in classes if getattr(mpi, name) == error.Get_error_class())
            if until(answer) or time.monotonic() > end:
                told.append([what, answer if isinstance(answer, bool | str | int | list | None) else "request"])
                return answer

    memory, status = [bytearray(4) for _ in range(6)], mpi.Status()
    open_, second = (comm.Irecv(memory[place], mpi.ANY_SOURCE, 7) for place in range(2))
    note("an open receive", lambda: open_.Test(status))
    note("its status", lambda: open_.Get_status(status))
    ask("one")
    note("when a message has come", lambda: open_.Test(status), bool)
    told.append([bytes(memory[0][:3]).decode(), status.Get_source(), status.Is_cancelled()])
    second.Cancel()
    note("a receive that is taken back", lambda: second.Get_status(status), bool)
    told.append(status.Is_cancelled())
    note("no message is there", lambda: comm.Improbe(mpi.ANY_SOURCE, 7))
    ask("two")
    found = note("a message is there", lambda: comm.Improbe(mpi.ANY_SOURCE, 7), bool)
    matched = found.Irecv(memory[2])
    note("its receive", lambda: matched.Test(status), bool)
    told.append([bytes(memory[2][:3]).decode(), status.Get_source()])
    several = [comm.Irecv(memory[3], 2, 7), comm.Irecv(memory[4], 1, 7)]
    ask("six")
    note("which of two", lambda: mpi.Request.Testsome(several), bool)
    told.append([request == mpi.REQUEST_NULL for request in several])
    anybody = comm.Irecv(memory[5], mpi.ANY_SOURCE, 7)
    ask("die")
    note("a receive from anybody", lambda: anybody.Test(status), bool)
    note("a probe", lambda: comm.Improbe(mpi.ANY_SOURCE, 7), bool)
    note("how many failed", lambda: comm.Get_failed().Get_size())
    note("a receive from the dead", lambda: several[0].Test(status), bool)
    comm.Ack_failed(1)
    note("from anybody, when that is known", lambda: anybody.Test(status))
    ask("end")
    note("from the living", lambda: anybody.Test(status), bool)
    told.append([bytes(memory[5][:3]).decode(), status.Get_source()])
    return told


class TalkToMpi:
    """The ranks of `told_by_mpi`, on MPI; rank 0 writes what it is told into a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> int:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        comm.Set_errhandler(MPI.ERRORS_RETURN)

        def ask(what: str) -> None:
            comm.Send(what.encode(), 2 if what == "die" else 1, 8)

        if comm.rank == 0:
            self._file.write_text(json.dumps(told_by_mpi(MPI, comm, ask)))
            os._exit(0)
        while True:
            asked, status = bytearray(3), MPI.Status()
            comm.Recv(asked, 0, 8, status)
            if comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Send(bytes(asked), 0, 7)
            if asked == b"end":
                os._exit(0)
        return 0
