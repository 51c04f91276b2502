"""Launchers and MPI libraries that do not suit each other, told from a rank's environment before MPI starts."""

import pytest

from rudra.mpi.loopback import choose_loopback, is_one_machine
from rudra.mpi.start import library_name, unsuited

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11, repo rev: v5.0.11"
OLD = "Open MPI v4.1.6, package: Debian OpenMPI"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: unreleased\n"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS\n\0"
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}
PMI2 = {**HYDRA, "SLURM_MPI_TYPE": "pmi2", "SLURM_STEP_NUM_TASKS": "2"}
PMIX = {"PMIX_RANK": "0", "SLURM_MPI_TYPE": "pmix", "SLURM_STEP_NUM_TASKS": "2"}
INSIDE = {"SLURM_MPI_TYPE": "none", "SLURM_STEP_NUM_TASKS": "2"}  # what mpirun's own daemons are started with


@pytest.mark.parametrize(
    ("env", "library", "start", "remedy"),
    [
        ({}, OPEN_MPI, None, None),
        ({}, MPICH, None, None),
        (MPIRUN, OPEN_MPI, None, None),
        ({**INSIDE, **MPIRUN}, OPEN_MPI, None, None),
        (PMIX, OPEN_MPI, None, None),
        (HYDRA, MPICH, None, None),
        ({**INSIDE, **HYDRA}, MPICH, None, None),
        (PMI2, MPICH, None, None),
        (PMI2, INTEL, None, None),
        (PMI2, OLD, None, None),
        (PMI2, OPEN_MPI, "srun --mpi=pmi2 cannot start ranks of Open MPI v5.0.11", "use srun --mpi=pmix"),
        (PMIX, MPICH, "srun --mpi=pmix cannot start ranks of MPICH 5.0.2", "use srun --mpi=pmi2"),
        (MPIRUN, MPICH, "Open MPI's mpirun cannot start ranks of MPICH 5.0.2", "use srun --mpi=pmi2"),
        (HYDRA, OPEN_MPI, "MPICH's mpirun cannot start ranks of Open MPI v5.0.11", "use srun --mpi=pmix"),
        ({**INSIDE, **HYDRA}, OPEN_MPI, "MPICH's mpirun cannot start", "use srun --mpi=pmix"),
    ],
)
def test_pairs(env: dict[str, str], library: str, start: str | None, remedy: str | None) -> None:
    said = unsuited(env, library, speaks_pmix=False)
    if start is None or remedy is None:
        assert said is None
        return
    assert said.startswith(start)
    assert said.endswith(f", which mpi4py loads: {remedy}, or the mpirun of that MPI")
    assert "\n" not in said


@pytest.mark.parametrize("env", [PMIX, MPIRUN, HYDRA, PMI2])
def test_an_mpich_with_pmix_may_be_started_by_anything(env: dict[str, str]) -> None:
    assert unsuited(env, MPICH, speaks_pmix=True) is None


@pytest.mark.parametrize(
    ("library", "name"),
    [(OPEN_MPI, "Open MPI v5.0.11"), (MPICH, "MPICH 5.0.2"), (INTEL, "Intel(R) MPI Library 2021.13 for Linux* OS")],
)
def test_names(library: str, name: str) -> None:
    assert library_name(library) == name


@pytest.mark.parametrize(
    ("here", "ranks", "found"), [("4", "4", True), ("2", "4", False), (None, "4", False), (None, None, False)]
)
def test_a_run_is_on_one_machine_if_all_its_ranks_are(here: str | None, ranks: str | None, found: bool) -> None:
    about = {"OMPI_COMM_WORLD_LOCAL_SIZE": here, "OMPI_COMM_WORLD_SIZE": ranks}
    env = {name: value for name, value in about.items() if value is not None}
    assert is_one_machine(env) == found
    user = {"OMPI_MCA_btl_tcp_if_include": "eth1"}
    assert not choose_loopback(user | env), "what the user has chosen stays"
    assert choose_loopback(env) == found
    assert env.get("OMPI_MCA_btl_tcp_if_include") == ("lo" if found else None)
