"""`rudra resume`."""

import argparse
from functools import partial
from pathlib import Path

from rudra.cli.finish import finished, mode_of
from rudra.cli.options import set_option, trust_option, verbose_option

SUMMARY = "continue a run that was stopped or failed"

MORE = """\
The run continues from its last checkpoint: the same job, as many learners and threads, the same result file,
which keeps what was recorded up to the checkpoint. Under hardsync the final weights are bitwise identical to
the weights of an uninterrupted run. Under mpirun or srun, start as many ranks as the run had. No code that the file
names is imported unless you have signed it, which your runs do, or give --trust.

In a batch script, use `rudra run JOB --output FILE.h5 --resume`: it also works before the first checkpoint."""

EXAMPLES = {
    "rudra resume soft.h5": "continue from the last checkpoint of this run",
    "rudra resume soft.h5 --set training.epochs=40": "train a finished run for more epochs, 40 in all",
    "mpirun -n 10 rudra resume my-job.h5": "continue on ten ranks that mpirun starts",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5|FILE.ckpt", help="result file or checkpoint of the run")
    set_option(
        parser, "change training.epochs, data.path or another key that may change (an error lists them); repeatable"
    )
    trust_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress; print only the name of the result file")
    verbose_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.mpi.launch import world_size
    from rudra.prepare.resume import resumable

    found = partial(resumable, arguments.file, arguments.overrides, trust=arguments.trust)
    if world_size() is None:
        job, path, output = found()
    else:
        from rudra.mpi.agreement import found_by_rank0

        job, path, output = found_by_rank0(found)
    results = rudra.run(job, output=output, resume=path, progress=mode_of(arguments), verbose=arguments.verbose)
    return finished(arguments, results)
