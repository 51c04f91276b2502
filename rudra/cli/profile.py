"""`rudra profile`."""

import argparse
import json

from rudra.cli.options import job_argument, layer_options, search_beside, start_plainly

SUMMARY = "measure time, parameter size and output size of each layer of a job's model"

MORE = """\
Computes gradients of the job's mini-batches for some seconds, and prints the time of each layer forward and
backward, the share of the time after which its gradient is final, the bytes of its parameters, and the bytes of
its output for one sample. It compares the sum of the times with the time of a whole step without timers. The model
must be a chain of layers: an nn.Sequential, one with a method `stages()`, or one whose `forward` torch.fx can
trace."""

EXAMPLES = {
    "rudra profile digits": "print the layers of lenet, with their times",
    "rudra profile my-job.toml -o layers.svg": "also draw them",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    layer_options(parser, "draw times, sizes and the share of the parameters")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.job.job import Job
    from rudra.machine import cores
    from rudra.prepare import profile

    start_plainly("profile")
    search_beside(arguments.job)
    job = Job.load(arguments.job, arguments.overrides).resolved(cores=cores())
    if arguments.output is not None:
        from rudra.report import layers, svg

        svg.check_picture(arguments.output, force=arguments.force)
    found = profile.profile(job, seconds=arguments.seconds)
    if arguments.json:
        print(json.dumps(found.as_dict()))
    else:
        threads = "thread" if found.threads == 1 else "threads"
        print(f"{found.name}: μ = {found.minibatch_size}, {found.threads} {threads}")
        print(profile.as_text(found))
    if arguments.output is not None:
        layers.draw(found.layers, arguments.output, found.name, force=arguments.force)
        print(f"wrote {arguments.output}")
    return 0
