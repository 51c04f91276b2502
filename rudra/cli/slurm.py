"""`rudra slurm`."""

import argparse
from pathlib import Path

from rudra.cli.options import job_options, overrides_of

SUMMARY = "write or submit the batch script of a job"

MORE = """\
Writes NAME.sh, a script to read and edit, and says how to submit it; --submit does so at once. The job,
and whether it fits so many tasks, is checked now. Shortly before its time limit the run saves a checkpoint,
the job queues itself again, and goes on where it was; likewise after a node failed or was taken away.

  rudra slurm my-job.toml --ntasks 10 --time 4:00:00               8 learners beside the two servers
  rudra slurm my-job.toml --nodes 4 --ntasks-per-node 8 --account physics --submit
  rudra slurm my-job.toml --launcher srun                          in place of mpirun
  rudra slurm my-job.toml --grid protocol.name=hardsync,softsync   a job array, with an element for each point
  rudra slurm my-job.toml --sbatch constraint=haswell --sbatch exclusive --print"""


def add_options(parser: argparse.ArgumentParser) -> None:
    from rudra.studies.slurm import NAMED, WARNING_S

    job_options(parser, runs=False)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.h5", help="default: NAME.h5; with --grid NAME-sweep")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="TABLE.KEY=V1,V2", help="a job array; as in `rudra sweep`"
    )
    tasks = parser.add_argument_group("tasks (default: as many as the job has ranks)")
    tasks.add_argument("--nodes", metavar="N", help="machines")
    tasks.add_argument("--ntasks-per-node", metavar="K", help="ranks on each of them")
    tasks.add_argument("--ntasks", metavar="N", help="ranks in all")
    tasks.add_argument("--cpus-per-task", metavar="C", help="cores for each rank")
    place = parser.add_argument_group("further options of sbatch")
    place.add_argument("--time", metavar="T", help="limit of one start, such as 4:00:00; default: the cluster's")
    for option in NAMED:
        place.add_argument(f"--{option}", metavar=option.upper())
    place.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY[=VALUE]", help="any other; may be given several times"
    )
    how = parser.add_argument_group("how it runs")
    how.add_argument("--launcher", default="mpirun", metavar="NAME", help="mpirun (the default) or srun")
    how.add_argument("--mpi", metavar="TYPE", help="of srun: pmix for Open MPI, pmi2 for MPICH; default: as mpirun is")
    how.add_argument("--environment", type=Path, metavar="DIR", help="where Rudra is installed; default: this one")
    how.add_argument("--warning", metavar="S", help=f"seconds before the limit to stop at; default: {WARNING_S}")
    how.add_argument("--restarts", metavar="N", default="10", help="how often it may queue itself again; default: 10")
    what = parser.add_argument_group("the script")
    what.add_argument("--script", type=Path, metavar="FILE.sh", help="default: the result file's name with .sh")
    what.add_argument("--force", action="store_true", help="replace FILE.sh if it exists")
    what.add_argument("--print", action="store_true", help="write it to standard output only")
    what.add_argument("--submit", action="store_true", help="write it, and submit it with sbatch")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.studies import submit

    return submit.main(arguments, overrides_of(arguments))
