"""`rudra resume`."""

import argparse
from pathlib import Path

from rudra.cli.finish import finished, mode_of
from rudra.cli.options import search_beside, set_option, verbose_option

SUMMARY = "go on with a run that was stopped or failed, or is to be longer"

MORE = """\
The job is that of the run, with as many learners and threads; it goes on under the same name, and the file keeps what
was recorded up to the checkpoint. With hardsync the weights become what they would have become, to the last bit.
Under mpirun or srun give as many ranks as the run had. To resume in a batch script, whether there is a checkpoint yet
or not: rudra run JOB --output FILE.h5 --resume"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="its result file (.h5) or a checkpoint of it (.ckpt)")
    about = "how long it trains: training.epochs; where data is: data.path; or tables fault_tolerance and results"
    set_option(parser, about)
    parser.add_argument("--quiet", action="store_true", help="no progress; print only the result file's name")
    verbose_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.resume import resumable

    search_beside(arguments.file)
    job, path, output = resumable(arguments.file, arguments.overrides)
    results = rudra.run(job, output=output, resume=path, progress=mode_of(arguments), verbose=arguments.verbose)
    return finished(arguments, results)
