"""`rudra slurm`."""

import argparse
from pathlib import Path

from rudra.cli.options import job_options, overrides_of

SUMMARY = "write or submit a SLURM batch script for a job"

MORE = """\
Checks that the job is valid and that its topology fits the tasks. Then writes NAME.sh, a script to read and
edit; --submit also submits it. Shortly before the time limit the run saves a checkpoint and the batch job
queues itself again, to continue from there. It also does so when a node fails or the job is preempted."""

EXAMPLES = {
    "rudra slurm my-job.toml --ntasks 10 --time 4:00:00": "write a script for ten ranks, eight of them learners",
    "rudra slurm my-job.toml --nodes 4 --ntasks-per-node 8 --account physics --submit": "submit 32 ranks on four nodes",
    "rudra slurm my-job.toml --launcher srun": "start the ranks with srun instead of mpirun",
    "rudra slurm my-job.toml --grid protocol.name=hardsync,softsync": "write a job array, one element for each value",
    "rudra slurm my-job.toml --sbatch constraint=haswell --sbatch exclusive --print": "pass further options to sbatch",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    from rudra.studies.slurm import NAMED, WARNING_S

    job_options(parser, runs=False)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.h5",
        help="result file. Default: NAME.h5, with --grid the directory NAME-sweep",
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="TABLE.KEY=V1,V2",
        help="write a job array with an element for each value; as in `rudra sweep`",
    )
    tasks = parser.add_argument_group("tasks (default: as many as the job has ranks)")
    tasks.add_argument("--nodes", metavar="N", help="number of nodes")
    tasks.add_argument("--ntasks-per-node", metavar="K", help="ranks on each node")
    tasks.add_argument("--ntasks", metavar="N", help="ranks in all")
    tasks.add_argument("--cpus-per-task", metavar="C", help="cores for each rank")
    place = parser.add_argument_group("further options of sbatch")
    place.add_argument("--time", metavar="T", help="time limit, such as 4:00:00. Default: the cluster's")
    for option in NAMED:
        place.add_argument(f"--{option}", metavar=option.upper(), help=f"as --{option} of sbatch")
    place.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY[=VALUE]", help="any other option of sbatch; repeatable"
    )
    how = parser.add_argument_group("start and restart")
    how.add_argument(
        "--launcher", default="mpirun", metavar="mpirun|srun", help="program that starts the ranks. Default: mpirun"
    )
    how.add_argument(
        "--mpi",
        metavar="pmix|pmi2",
        help="--mpi of srun: pmix for Open MPI, pmi2 for MPICH. Default: by the installed MPI",
    )
    how.add_argument(
        "--environment", type=Path, metavar="DIR", help="virtual environment with Rudra. Default: the current one"
    )
    how.add_argument(
        "--warning", metavar="S", help=f"how many seconds before the time limit the run stops. Default: {WARNING_S}"
    )
    how.add_argument(
        "--restarts", metavar="N", default="10", help="how often the job may queue itself again. Default: 10"
    )
    what = parser.add_argument_group("the script")
    what.add_argument(
        "--script", type=Path, metavar="FILE.sh", help="script. Default: the name of the result file with .sh"
    )
    what.add_argument("--force", action="store_true", help="replace FILE.sh if it exists")
    what.add_argument("--print", action="store_true", help="print the script instead of writing it")
    what.add_argument("--submit", action="store_true", help="write the script and submit it")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.studies import submit

    return submit.main(arguments, overrides_of(arguments))
