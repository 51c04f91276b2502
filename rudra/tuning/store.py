"""Store of measurements of probes: a directory that several searches of a job may share.

Each probe has one small file, named by a digest of everything that decides its weights. So another search, with another
cluster, target or budget, finds it again. A search decides the same with an empty and with a full store: the store
saves time, but no budget.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rudra.errors import ResultsError
from rudra.files import written
from rudra.tuning.probes import ProbeNoise


class Evaluation(NamedTuple):
    """Evaluation of a probe on the held-out samples, at the end of an epoch.

    Attributes:
        samples: Samples that the probe has applied since its beginning.
        scores: Name of a metric -> value: "loss", "error", and the metrics of the task.
        time_s: Training time since its beginning: of the clock on real ranks, else virtual.
    """

    samples: int
    scores: dict[str, float]
    time_s: float = 0.0


class Measured(NamedTuple):
    """Everything that is known of a probe.

    Attributes:
        evaluations: Its evaluations, one for each epoch.
        failed: Why it ended early, such as a loss that is not finite. Empty: it did not.
        noise: Gradient noise scale, if the probe measures it. None: it is not known.
        wall_s: Wall time of its training, with the start of ranks.
    """

    evaluations: tuple[Evaluation, ...] = ()
    failed: str = ""
    noise: ProbeNoise | None = None
    wall_s: float = 0.0


class ProbeStore:
    """Store in a directory, which is made if it is missing.

    Raises:
        ResultsError: The directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(f"{directory}: cannot create: {error.strerror}") from None

    def read(self, digest: str) -> Measured:
        """Returns what is known of a probe. A damaged file counts as none."""
        try:
            found = json.loads(self._file(digest).read_text())
            noise = ProbeNoise(*found["noise"]) if found["noise"] else None
            evaluations = tuple(Evaluation(*each) for each in found["evaluations"])
            return Measured(evaluations, found["failed"], noise, found["wall_s"])
        except (OSError, ValueError, TypeError, KeyError):
            return Measured()

    def keep(self, digest: str, measured: Measured) -> None:
        """Writes what is known of a probe.

        Raises:
            ResultsError: It cannot be written.
        """
        with written(self._file(digest)) as file:
            file.write(json.dumps(measured._asdict()).encode())

    def checkpoint(self, digest: str, epochs: int) -> Path:
        """Returns the path of a probe's checkpoint after a number of epochs."""
        return self._directory / f"{digest}-{epochs}.ckpt"

    def latest(self, digest: str, most: int) -> int:
        """Returns after how many epochs a probe has its latest checkpoint, at most `most`. 0: it has none."""
        return next((n for n in range(most, 0, -1) if self.checkpoint(digest, n).is_file()), 0)

    def scratch(self, name: str) -> Path:
        """Returns the path of a file that nothing else uses."""
        return self._directory / name

    def forget(self, digest: str, but: Iterable[int] = ()) -> None:
        """Removes the checkpoints of a probe, except those after some numbers of epochs."""
        kept = {self.checkpoint(digest, epochs) for epochs in but}
        for path in self._directory.glob(f"{digest}-*.ckpt"):
            if path not in kept:
                path.unlink()

    def clear(self) -> None:
        """Removes all checkpoints. The measurements stay."""
        for path in self._directory.glob("*.ckpt"):
            path.unlink()

    def _file(self, digest: str) -> Path:
        return self._directory / f"{digest}.json"
