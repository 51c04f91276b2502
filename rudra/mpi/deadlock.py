"""Detection of deadlock after the death of a rank: if all surviving ranks wait, no message will arrive any more.

A rank may wait for another one that computes or evaluates, for as long as this takes. If all ranks wait, and have done
so for some time, a message was lost with the dead rank. Each rank that has waited that long reports it repeatedly to
the statistics server's rank. That rank ends the run if all ranks wait, including itself.
"""

from collections.abc import Callable, Collection

from mpi4py import MPI

LEFT_S = 30.0
"""Time that all ranks may wait for each other after a rank has died."""

AGAIN_S = 3.0
"""Interval of a rank's reports that it still waits."""


class Standstill:
    """The waiting ranks, as one rank sees them.

    Args:
        comm: communicator of all ranks.
        root: the statistics server's rank.
        tag: tag of the reports.
        tell: sends a small message to a rank.
    """

    def __init__(self, comm: MPI.Comm, root: int, tag: int, tell: Callable[[bytes, int, int], None]) -> None:
        self._comm, self._root, self._tag, self._tell = comm, root, tag, tell
        self._said_at = float("-inf")
        self._waits: dict[int, tuple[float, str]] = {}  # rank -> time and text of its last report

    def wait(self, text: str, others: Collection[int], now: float) -> list[str] | None:
        """Reports that this rank has waited for `LEFT_S`, and still waits.

        Args:
            text: waiting roles of this rank, and the objects of their waits.
            others: other surviving ranks.
            now: time on the clock of all ranks.

        Returns:
            On the statistics server's rank, texts about the waits of all ranks if all of them wait, else None.
        """
        if now - self._said_at < AGAIN_S:
            return None
        self._said_at = now
        if self._comm.rank != self._root:
            self._tell(f"{now} {text}".encode(), self._root, self._tag)
            return None
        self._listen()
        said = [self._waits.get(rank, (float("-inf"), "")) for rank in sorted(others)]
        return None if any(now - at > 2 * AGAIN_S for at, _ in said) else [text, *(text for _, text in said)]

    def _listen(self) -> None:
        status = MPI.Status()
        try:
            while self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv(data, status.Get_source(), self._tag)
                at, text = data.decode(errors="replace").split(" ", 1)
                self._waits[status.Get_source()] = float(at), text
        except MPI.Exception:  # a loss that is not acknowledged yet
            return
