"""Runs of one job, one after the other on the same ranks; ranks import this, and so it imports little."""

import json
from pathlib import Path

import rudra
from rudra.prepare.start import StartRequest
from tests.campaigns.strikes import DURING, Armed, Strike

SHORT = {"epochs": 2}
"""For runs that are hit when all is applied; the others must not end before they are stopped."""


class Series:
    """Runs of one job, one after the other on the same ranks, each of them hit otherwise."""

    def __init__(self, job: rudra.Job, hits: list[tuple[str, str, int]], directory: Path) -> None:
        self.job, self.hits, self.directory = job, hits, directory

    def __call__(self) -> int:
        from mpi4py import MPI

        ranks = {role.name: role.world_rank for role in self.job.plan().roles}
        for place, (victim, phase, number) in enumerate(self.hits):
            strike = Strike(victim, phase, number, self.directory / f"{place}.mark")
            start = StartRequest(self.directory / f"{place}.h5")
            job = self.job if phase in DURING else self.job.with_(training=SHORT)
            payload = {"job": job, "start": start, "progress": {"mode": "quiet"}}
            code = Armed(strike, ranks[victim], payload)()
            codes = MPI.COMM_WORLD.gather(code)
            if codes is not None:
                (self.directory / f"{place}.json").write_text(json.dumps(codes))
        return 0
