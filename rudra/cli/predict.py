"""`rudra predict`."""

import argparse
import json
from collections.abc import Sequence

from rudra.cli.options import at_least, job_argument, numbers, overrides_of, protocol_text, set_option, trust_option

SUMMARY = "predict time per epoch without training"

MORE = """\
Simulates the roles of the job without tensors and data, until the rate is steady. Costs come from the job's
table [simulation], where `costs` names a preset (p775, the cluster of the Rudra paper) or a file of
`rudra calibrate`. Otherwise they come from `rudra calibrate` on this machine, for this model. For a result file the
costs come from the rows of its run, and times are scaled so that the time of the run itself is right. For groups or
learners that update one at a time it also prints the time per iteration by Omnivore's model, HE(g)."""

EXAMPLES = {
    "rudra predict digits --learners 1,2,4,8": "predict how training time falls with the number of learners",
    "rudra predict rudra/table4 --set topology.name=adv": "predict a job of the paper in another topology",
    "rudra predict my-job.toml --set simulation.costs=measured.toml --json": "use measured costs, and print JSON",
    "rudra predict soft.h5 --learners 2,4,8,16 --set topology.name=groups": "predict changes of a run from its rows",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_argument(parser, or_results=True)
    parser.add_argument(
        "--learners", dest="counts", metavar="N,N,…", help="numbers of learners, one row for each. Default: the job's"
    )
    set_option(parser)
    parser.add_argument(
        "--samples", type=at_least(1), metavar="N", help="samples in an epoch. Default: all of the training set"
    )
    parser.add_argument(
        "--updates", type=at_least(4), metavar="N", help="updates to simulate. Default: as many as a steady rate needs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row")
    trust_option(parser)
    parser.set_defaults(learners=None)


def execute(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rudra.job.boundary import START
    from rudra.job.job import Job
    from rudra.job.simulation import UNMEASURED
    from rudra.prepare.run_costs import is_run
    from rudra.simulation import predict
    from rudra.simulation.whatif import FittedRun

    counts: Sequence[int | None] = numbers("--learners", arguments.counts) or [None]
    overrides = overrides_of(arguments)
    made = [[*overrides, *([] if n is None else [f"cluster.learners={n}"])] for n in counts]
    run = FittedRun.read(Path(arguments.job), trust=arguments.trust) if is_run(arguments.job) else None
    jobs = [Job.load(arguments.job, each) if run is None else run.written(each) for each in made]
    predicted = predict.predict if run is None else run.predict
    for number, start in enumerate((START, *(change.boundary for change in jobs[0].changes))):
        parts = [job.after(number) for job in jobs]
        found = [predicted(job, samples=arguments.samples, updates=arguments.updates) for job in parts]
        if arguments.json:
            print(
                "\n".join(json.dumps({**({start.key: start.number} if number else {}), **p.as_dict()}) for p in found)
            )
            continue
        job, after = found[0].job, f" after {start.text}" if number else ""
        source = found[0].costs or f"defaults ({UNMEASURED} {arguments.job})"
        size = "" if job.scheduled else f", μ = {job.training.minibatch_size}"
        print(f"{job.name}{after}: {protocol_text(job)}{size}, costs: {source}")
        print(predict.as_text(found))
    if run is not None and not arguments.json:
        print(run.as_text())
    return 0
