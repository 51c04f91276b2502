"""`rudra place`."""

import argparse
import json

from rudra.cli.options import (
    at_least,
    job_argument,
    layer_options,
    overrides_of,
    search_beside,
    start_plainly,
)

SUMMARY = "say where a job's model would best be cut between learners and a stage server"

MORE = """\
Measures the layers of the model as `rudra profile` does, or takes them from the costs that `rudra calibrate` left.
Prints the skewness of the parameters and, for each place where the model can be cut, the bytes of tensors that
a step of all learners sends, and the predicted time of a step, beside those of a parameter server and of an
allreduce. Two rules choose: `ralp`, by bytes, where skewness is at most --threshold, behind the last convolution;
`auto`, by time. Link and latency are those of the job's table [simulation], between nodes."""

EXAMPLES = {
    "rudra place digits --learners 8": "see whether placing layers of lenet pays for eight learners",
    "rudra place my-job.toml --set simulation.bandwidth_bytes_per_s=1.25e8 -o place.svg": "over 1 Gbit/s; draw it",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    parser.add_argument(
        "--learners", type=at_least(1), metavar="N", help="number of learners; short for --set cluster.learners=N"
    )
    parser.add_argument("--threshold", type=float, default=-0.5, metavar="K", help="for `ralp`; default: -0.5")
    about = "how many times as fast as a learner the stage server computes; default: 1"
    parser.add_argument("--back-speed", type=float, default=1.0, metavar="X", help=about)
    layer_options(parser, "draw it")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.errors import ConfigError
    from rudra.job.job import Job
    from rudra.studies import place

    start_plainly("place")
    search_beside(arguments.job)
    if not arguments.back_speed > 0:
        raise ConfigError(f"--back-speed {arguments.back_speed:g}; valid: > 0")
    job = Job.load(arguments.job, overrides_of(arguments))
    if arguments.output is not None:
        from rudra.report import layers, svg

        svg.check_picture(arguments.output, force=arguments.force)
    found = place.place(job, threshold=arguments.threshold, back_speed=arguments.back_speed, seconds=arguments.seconds)
    print(json.dumps(found.as_dict()) if arguments.json else place.as_text(found))
    if arguments.output is not None:
        drawn = found.decisions["auto"] if found.decisions["ralp"].cut is None else found.decisions["ralp"]
        layers.draw(found.layers, arguments.output, found.name, decision=drawn, force=arguments.force)
        print(f"wrote {arguments.output}")
    return 0
