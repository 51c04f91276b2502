"""Nobody waits for ever where a rank has died: if all who are left wait, nothing will come any more.

A rank that waits may do so for one that computes, or tests, for as long as that takes; only if all of them wait, and
have done so for a while, something was lost with the dead. Each that has waited so long says so now and then to the
statistics server's rank; that one ends the run when all do, and it waits itself.
"""

from collections.abc import Callable, Collection

from mpi4py import MPI

LEFT_S = 30.0
"""How long all may wait for each other when a rank has died."""

AGAIN_S = 3.0
"""How often a rank says that it still waits."""


class Standstill:
    """One rank's view of who waits.

    Args:
        comm: of all ranks.
        root: the statistics server's rank.
        tag: of what is said.
        tell: sends a rank something small.
    """

    def __init__(self, comm: MPI.Comm, root: int, tag: int, tell: Callable[[bytes, int, int], None]) -> None:
        self._comm, self._root, self._tag, self._tell = comm, root, tag, tell
        self._said_at = float("-inf")
        self._waits: dict[int, tuple[float, str]] = {}  # rank -> when it said last that it waits, and for what

    def wait(self, text: str, others: Collection[int], now: float) -> list[str] | None:
        """This rank has waited for `LEFT_S`, and waits on.

        Args:
            text: who waits here, and for what.
            others: the ranks that are left, beside this one.
            now: on the clock of all ranks.

        Returns:
            On the statistics server's rank, what all wait for, if they all do.
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
