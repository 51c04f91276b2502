"""`rudra topology`."""

import argparse
from pathlib import Path

from rudra.cli.options import at_least, job_of, job_options, numbers
from rudra.errors import ConfigError

SUMMARY = "show who is who in a job or a run, and who talks to whom"

MORE = """\
Trees of who pushes to whom and how weights come down, the roles of each node, compute groups, and what
comes of it. A job is shown as it would be placed on its own ranks on one node (or on the nodes that its
table [simulation] gives), on the ranks that you say, or, for a result file, as it was.

  rudra topology my-job.toml
  rudra topology my-job.toml --set topology.name=adv --set topology.options.fan_out=2
  rudra topology my-job.toml -n 18                what `mpirun -n 18` on one node would make of it
  rudra topology my-job.toml --nodes 6,6,4        three nodes that have so many ranks each
  rudra topology my-job.h5                        of a run"""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=False)
    parser.add_argument("-n", dest="ranks", type=at_least(1), metavar="RANKS", help="fit the job to so many ranks")
    parser.add_argument("--nodes", metavar="R,R,…", help="ranks of each node; default: all on one")
    parser.add_argument("--all", action="store_true", help="print every role, also of thousands that are alike")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.report import topology

    sizes = numbers("--nodes", arguments.nodes)
    if arguments.job.endswith(".h5"):
        if arguments.ranks or sizes or arguments.overrides or arguments.learners:
            raise ConfigError(
                f"{arguments.job}: shows the run as it was; -n, --nodes, --learners and --set are for jobs"
            )
        cast = topology.of_file(Path(arguments.job))
    else:
        cast = topology.of_job(job_of(arguments), arguments.ranks, sizes)
    print(f"{arguments.job}: {topology.as_text(cast, everything=arguments.all)}")
    return 0
