"""`rudra place`."""

import argparse
import json

from rudra.cli.options import at_least, job_argument, job_of, layer_options, start_plainly

SUMMARY = "find the best cut of a job's model between learners and a stage server"

MORE = """\
Measures the layers of the model as `rudra profile` does, or reads the costs that `rudra calibrate` wrote. Prints
the skewness of the parameters. For each possible cut it prints the bytes of tensors that a step of all learners
sends, and the predicted time of a step. A parameter server and an allreduce are listed for comparison. Two rules
choose a cut. `ralp` minimises bytes: it cuts after the last convolution if the skewness is at most --threshold.
`auto` minimises time. Link and latency between nodes come from the job's table [simulation]."""

EXAMPLES = {
    "rudra place digits --learners 8": "see whether placing layers of lenet pays for eight learners",
    "rudra place my-job.toml --set simulation.bandwidth_bytes_per_s=1.25e8 -o place.svg": "over 1 Gbit/s; draw it",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    parser.add_argument(
        "--learners", type=at_least(1), metavar="N", help="number of learners; short for --set cluster.learners=N"
    )
    parser.add_argument(
        "--threshold", type=float, default=-0.5, metavar="K", help="largest skewness for `ralp`. Default: -0.5"
    )
    about = "speed of the stage server relative to a learner. Default: 1"
    parser.add_argument("--back-speed", type=float, default=1.0, metavar="X", help=about)
    layer_options(parser, "draw it")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.errors import ConfigError
    from rudra.studies import place

    start_plainly("place")
    if not arguments.back_speed > 0:
        raise ConfigError(f"--back-speed {arguments.back_speed:g}; valid: > 0")
    job = job_of(arguments)
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
