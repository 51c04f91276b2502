"""Reports of failures. A rank that fails sends one to the rank of the statistics server, which ends the run with it."""

from mpi4py import MPI

from rudra.errors import RunError
from rudra.mpi.tags import FAILURE_TAG


class Reported(RunError):
    """A failure reported by another rank: its exit code, whether a rank was lost, and the complete text."""

    def __init__(self, report: str) -> None:
        code, lost, self.text = report.split(" ", 2)
        super().__init__(self.text)
        self.exit_code, self.lost = int(code), lost == "1"


def report(comm: MPI.Comm, to: int, code: int, text: str, *, lost: bool) -> MPI.Request:
    """Begins to send a failure of this rank, and returns the request."""
    return comm.Isend(f"{code} {int(lost)} {text}".encode(), to, FAILURE_TAG)


def raise_reported(comm: MPI.Comm) -> None:
    """Raises `Reported` if another rank has reported a failure."""
    status = MPI.Status()
    try:
        reported = comm.Iprobe(MPI.ANY_SOURCE, FAILURE_TAG, status)
    except MPI.Exception:  # a loss that is not acknowledged yet
        return
    if reported:
        text = bytearray(status.Get_count(MPI.BYTE))
        comm.Recv(text, status.Get_source(), FAILURE_TAG)
        raise Reported(text.decode(errors="replace"))
