"""What stands in for MPI in tests of transfers against Open MPI: the same calls, and the same answers."""

import json
import random
from pathlib import Path
from typing import Any

import mpi_answers
import pytest
from fake_mpi import fake_mpi
from simulated_mpi import Group, RankOfMpi, World, which_are_over

from rudra.job.job import Job
from rudra.mpi.launch import launch

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What rank 0 of three is told by what stands in for MPI."""
    fake_mpi(monkeypatch, which_are_over, Group=Group)
    from mpi4py import MPI

    world = World(random.Random(0), near=False, size=3)
    rank0, rank1 = RankOfMpi(world, 0), RankOfMpi(world, 1)

    def ask(what: str) -> None:
        if what == "die":
            world.dead.add(2)
        else:
            rank1.Isend(what.encode(), 0, 7)

    return mpi_answers.told_by_mpi(MPI, rank0, ask)


def test_simulated_mpi_answers_as_open_mpi_when_ranks_send_and_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "told.json"
    payload = mpi_answers.TalkToMpi(file)
    launch(Job(name="talk"), tmp_path / "out.h5", roles=["asks", "sends", "dies"], payload=payload, survivable=True)
    assert json.loads(file.read_text()) == simulated(monkeypatch)
