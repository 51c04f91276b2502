"""`rudra calibrate`."""

import argparse
import sys
from pathlib import Path

from rudra.cli.options import (
    at_least,
    force_option,
    job_argument,
    numbers,
    positive,
    search_beside,
    set_option,
    start_plainly,
)

SUMMARY = "measure what a job's model costs on this machine"

MORE = """\
Runs the job on real ranks for one or two minutes, with one learner and with several, at several mini-batch sizes
(μ). It also times the gradients of a bank of 2, 4 … learners on one device, in its fastest form. The machine
should be otherwise idle. Without -o, `rudra predict` and `rudra simulate` find the measured
costs for this model on this machine; with -o, a job names the file: [simulation] costs = \"FILE.toml\"."""

EXAMPLES = {
    "rudra calibrate digits": "measure the costs of lenet, for predictions on this machine",
    "rudra calibrate my-job.toml --learners 4 --sizes 4,16 -o measured.toml": "write a file to use elsewhere",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    about = "file for the measured costs. Default: the file that `predict` and `simulate` read"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help=about)
    parser.add_argument(
        "--learners",
        type=at_least(1),
        default=2,
        metavar="N",
        help="learners that compute at the same time. Default: 2",
    )
    parser.add_argument(
        "--sizes", metavar="N,N,…", help="values of μ. Default: the job's, a quarter of it, four times it"
    )
    parser.add_argument(
        "--bank",
        type=at_least(1),
        default=8,
        metavar="N",
        help="largest number of learners of a bank (learners_per_device). 1: no banks. Default: 8",
    )
    parser.add_argument(
        "--seconds", type=positive, metavar="S", help="seconds of computation for each measurement. Default: 2"
    )
    set_option(parser)
    force_option(parser, "FILE.toml")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def execute(arguments: argparse.Namespace) -> int:
    from rudra import files
    from rudra.job.job import Job
    from rudra.prepare import cost_files
    from rudra.studies import calibrate

    start_plainly("calibrate")
    search_beside(arguments.job)
    job = Job.load(arguments.job, arguments.overrides)
    output: Path = arguments.output or cost_files.measured_path(job)
    if arguments.output is None:
        files.make_directory(output.parent, "; give -o FILE.toml, and name the file in [simulation] costs")
    files.check_output(output, arguments.force or arguments.output is None)
    text = calibrate.calibrate(
        job,
        learners=arguments.learners,
        sizes=numbers("--sizes", arguments.sizes),
        bank=arguments.bank,
        seconds=arguments.seconds,
        show=not arguments.quiet and sys.stderr.isatty(),
    )
    with files.written(output) as file:
        file.write(text.encode())
    print(f"wrote {output}" + ("" if arguments.output else "; predict and simulate find it there"))
    return 0
