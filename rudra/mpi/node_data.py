"""The data of a run: loaded once on each node, shared by the node's ranks, and the same on all nodes."""

from rudra.data.fingerprint import REPEATABLE, Fingerprint, fingerprints, plain, unrepeatable
from rudra.data.load import Data, load
from rudra.errors import DataError
from rudra.job.job import Job
from rudra.log import log
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.node_memory import share
from rudra.mpi.quiet import QuietComm
from rudra.prepare.begin import SAME_DATA, check_data
from rudra.prepare.start import StartDecision


class NodeData:
    """The data that a rank needs. Each method is a step that all ranks take together.

    Args:
        ranks: the ranks of the job.
        node: communicator of the ranks of this node.
        job: resolved job.
        train: whether this rank needs the training set.
        test: whether this rank needs the test set.

    Attributes:
        data: data of this rank, or None if it needs none.
        prints: fingerprints of all splits that any rank has loaded.
        unrepeatable: reason why samples cannot be drawn again, or empty if they can.
    """

    def __init__(self, ranks: JobRanks, node: QuietComm, job: Job, *, train: bool, test: bool) -> None:
        self.data: Data | None = None
        self.prints: dict[str, Fingerprint] = {}
        self.unrepeatable = ""
        self._ranks, self._node, self._job, self._needs = ranks, node, job, (train, test)
        self._on_node = [self._needs]  # needs of each rank of the node
        self._loader = 0

    def load(self) -> None:
        """Loads the data that the ranks of the node need, on the first rank that needs any."""
        self._on_node = self._node.allgather(self._needs)
        self._loader = next((rank for rank, need in enumerate(self._on_node) if any(need)), 0)
        if self._node.rank == self._loader and any(self._needs):
            train, test = (any(need) for need in zip(*self._on_node, strict=True))
            self._load(train=train, test=test)

    def _load(self, *, train: bool, test: bool) -> None:
        job = self._job
        self.data = load(job.data, train=train, test=test, seed=job.training.seed, ignored=job.task.ignored)
        self.prints = fingerprints(self.data)

    def share(self) -> None:
        """Shares the loaded data among the ranks of the node without a copy."""
        if sum(map(any, self._on_node)) > 1:
            self.data = share(self._node, self._loader, self.data)
        train, test = self._needs
        if not train and not test:
            self.data = None
        elif self.data is None:
            self._load(train=train, test=test)
        else:
            self.data = self.data.part(train=train, test=test)

    def compare(self, start: StartDecision, *, warns: bool) -> None:
        """Checks that all ranks have the same data, and that a resumed run has the data of its earlier part.

        Args:
            start: start of the run.
            warns: whether this rank logs a warning if samples cannot be drawn again.

        Raises:
            DataError, CheckpointError: the data differs.
        """
        loaded: list[tuple[str, dict[str, Fingerprint]]] = self._ranks.comm.allgather((self._ranks.name, self.prints))
        first: dict[str, tuple[str, Fingerprint]] = {}
        for who, prints in loaded:
            for split, mine in prints.items():
                other, theirs = first.setdefault(split, (who, mine))
                if what := mine.difference(theirs):
                    text = f"[data] the {split} set of the {who} differs from the same set of the {other}: {what}"
                    raise DataError(f"{text}; {SAME_DATA}")
        self.prints = {split: found for split, (_, found) in first.items()}
        check_data(start, self.prints)
        self.unrepeatable = unrepeatable(self.prints)
        if self.unrepeatable and warns:
            log.warning(f"{self.unrepeatable}: {REPEATABLE}")

    @property
    def plain_prints(self) -> dict[str, object]:
        """Fingerprints in the format of files."""
        return plain(self.prints)
