"""`rudra topology`."""

import argparse
from pathlib import Path

from rudra.cli.options import at_least, job_of, job_options, numbers
from rudra.errors import ConfigError

SUMMARY = "show which rank has which role, and which roles exchange messages"

MORE = """\
Prints the trees along which gradients are pushed and weights are pulled, the roles of each node, and the compute
groups. A job is placed on one node with as many ranks as it needs, on the nodes of its table [simulation], or on
the ranks that you give. A result file shows where the roles of the run were."""

EXAMPLES = {
    "rudra topology digits": "show the roles of a job",
    "rudra topology digits --set topology.name=adv --set topology.options.fan_out=2": "show them in another topology",
    "rudra topology my-job.toml -n 18": "show what `mpirun -n 18` on one node would do with the job",
    "rudra topology my-job.toml --nodes 6,6,4": "show it on three nodes with six, six and four ranks",
    "rudra topology soft.h5": "show the roles of a run",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=False, or_results=True)
    parser.add_argument(
        "-n", dest="ranks", type=at_least(1), metavar="RANKS", help="fit the job to this number of ranks"
    )
    parser.add_argument("--nodes", metavar="R,R,…", help="ranks on each node. Default: all on one")
    parser.add_argument("--all", action="store_true", help="print every role; otherwise similar learners share a line")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report import topology

    sizes = numbers("--nodes", arguments.nodes)
    if arguments.job.endswith(".h5"):
        if arguments.ranks or sizes or arguments.overrides or arguments.learners:
            text = "a result file shows its run; -n, --nodes, --learners and --set are for jobs"
            raise ConfigError(f"{arguments.job}: {text}")
        cast = topology.of_file(Path(arguments.job))
    else:
        cast = topology.of_job(job_of(arguments), arguments.ranks, sizes)
    print(f"{arguments.job}: {topology.as_text(cast, everything=arguments.all)}")
    return 0
