"""`rudra simulate`."""

import argparse
from functools import partial

from rudra import interrupts
from rudra.cli.finish import report
from rudra.cli.options import from_options, job_options, origin_of

SUMMARY = "run a job in one process, in virtual time"

MORE = """\
The simulation runs the same roles as `rudra run` and computes real gradients, for any number of learners in one
process. Time is virtual: costs come from the job's table [simulation], or from `rudra calibrate`
on this machine, for this model. The same job always gives bitwise identical results."""

EXAMPLES = {
    "rudra simulate digits --learners 30 --output many.h5": "see what 30 learners would do",
    "rudra simulate digits --set training.epochs=1": "try a job quickly, without MPI",
    "rudra simulate digits --from soft-3.ckpt --carry state": "continue a run from the end of its epoch 3",
    "rudra simulate digits --set simulation.slowdown.0=4 --output slow.h5": "make learner 0 four times slower",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=True)
    from_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra

    with interrupts.terminations():  # until the simulation itself handles the signal
        return report(arguments, partial(rudra.simulate, **origin_of(arguments)))
