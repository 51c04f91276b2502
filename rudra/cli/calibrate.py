"""`rudra calibrate`."""

import argparse
import sys
from pathlib import Path

from rudra.cli.options import at_least, force_option, job_argument, numbers, search_beside, set_option, start_plainly

SUMMARY = "measure what a job's model costs here"

MORE = """\
Short runs on real ranks, with one learner and with several, at several μ: about a minute, in which the
machine should have nothing else to do. `predict` and `simulate` then find what was measured, for this model
on this machine; a job uses a file that was written elsewhere with [simulation] costs = "FILE.toml"."""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    about = "default: where `predict` and `simulate` find it for this model on this machine; replaced if it is there"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.toml", help=about)
    parser.add_argument("--learners", type=at_least(1), default=2, metavar="N", help="how many compute at once; 2")
    parser.add_argument("--sizes", metavar="N,N,…", help="μ to measure at; default: the job's, a quarter, 4 times")
    parser.add_argument("--seconds", type=float, metavar="S", help="that each run computes; 2")
    set_option(parser, "override any key of the job; may be given several times")
    force_option(parser, "FILE.toml")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def execute(arguments: argparse.Namespace) -> int:
    from rudra import files
    from rudra.job.job import Job
    from rudra.simulation import costs
    from rudra.studies import calibrate

    start_plainly("calibrate")
    search_beside(arguments.job)
    job = Job.load(arguments.job, arguments.overrides)
    output: Path = arguments.output or costs.measured_path(job)
    if arguments.output is None:
        output.parent.mkdir(parents=True, exist_ok=True)
    else:
        files.check_output(output, arguments.force)
    text = calibrate.calibrate(
        job,
        learners=arguments.learners,
        sizes=numbers("--sizes", arguments.sizes),
        seconds=arguments.seconds,
        show=not arguments.quiet and sys.stderr.isatty(),
    )
    with files.written(output) as file:
        file.write(text.encode())
    print(f"wrote {output}" + ("" if arguments.output else "; predict and simulate find it there"))
    return 0
