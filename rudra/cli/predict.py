"""`rudra predict`."""

import argparse
import json
from collections.abc import Sequence

from rudra.cli.options import at_least, job_argument, numbers, overrides_of, protocol_text, set_option

SUMMARY = "say what a job would take, without training"

MORE = """\
Simulates the job's roles without tensors and data, for as long as a steady rate needs, with the costs in
its table [simulation]: `costs = "p775"` (the paper's cluster), a file of `rudra calibrate`, or your own keys."""


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    parser.add_argument(
        "--learners", dest="counts", metavar="N,N,…", help="one row for each number; default: the job's"
    )
    set_option(parser, "override any key of the job; may be given several times")
    parser.add_argument("--samples", type=at_least(1), metavar="N", help="of an epoch; default: the training set's")
    parser.add_argument("--updates", type=at_least(4), metavar="N", help="to simulate; default: what a rate needs")
    parser.add_argument("--json", action="store_true", help="as one JSON object for each row, for scripts")
    parser.set_defaults(learners=None)


def execute(arguments: argparse.Namespace) -> int:
    from rudra.job.job import Job
    from rudra.job.simulation import UNMEASURED
    from rudra.simulation import predict

    counts: Sequence[int | None] = numbers("--learners", arguments.counts) or [None]
    overrides = overrides_of(arguments)
    made = [[*overrides, *([] if n is None else [f"cluster.learners={n}"])] for n in counts]
    jobs = [Job.load(arguments.job, each) for each in made]
    found = [predict.predict(job, samples=arguments.samples, updates=arguments.updates) for job in jobs]
    if arguments.json:
        print("\n".join(json.dumps(p.as_dict()) for p in found))
        return 0
    job = found[0].job
    source = found[0].costs or f"defaults ({UNMEASURED} {arguments.job})"
    print(f"{job.name}: {protocol_text(job)}, μ = {job.training.minibatch_size}, costs: {source}")
    print(predict.as_text(found))
    return 0
