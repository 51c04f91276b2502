"""`rudra init`."""

import argparse
import os
from pathlib import Path

from rudra.cli.options import force_option, search_beside

SUMMARY = "write a commented job file to start from"

MORE = """\
The file has every table and key, with its meaning. Keys that few jobs need are commented out, with their
defaults. With --from, the values come from a shipped job or from a job file of yours."""

EXAMPLES = {
    "rudra init my-job.toml": "write a job that trains a small network on digits",
    "rudra init --from resnet32 my-resnet.toml": "write a job with the values of a shipped one",
    "rudra init --from old.toml -": "print a job file of yours with a comment on every key",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "file to write; - prints. Default: job.toml"
    parser.add_argument("file", type=Path, nargs="?", default=Path("job.toml"), metavar="FILE.toml", help=about)
    about = "shipped job or job file whose values to take. Default: digits, for any number of learners"
    parser.add_argument("--from", dest="job", metavar="JOB", help=about)
    force_option(parser, "FILE.toml")


def execute(arguments: argparse.Namespace) -> int:
    from rudra import files
    from rudra.cli.jobs import about
    from rudra.errors import ConfigError
    from rudra.job.job import Job
    from rudra.job.jobfiles import PAPER, read_job
    from rudra.job.template import commented

    source = arguments.job or "digits"
    search_beside(source)
    path, tables = read_job(source)
    Job.of(path, tables)
    if arguments.job is None:
        del tables["cluster"]["learners"]  # otherwise `mpirun -n N` would have to match it
    output: Path = arguments.file
    if not os.path.isfile(output.parent / PAPER):
        tables.get("study", {}).pop("paper", None)  # it needs the paper's numbers next to the job
    text = commented(tables, about(path) or f"A job for Rudra, from {source}.")
    if str(output) == "-":
        print(text, end="")
        return 0
    if output.suffix != ".toml":
        raise ConfigError(f"{output}: is not a name for a job file; valid: {output.name or 'job'}.toml")
    files.check_output(output, arguments.force)
    with files.written(output) as file:
        file.write(text.encode())
    print(f"wrote {output}; check it with: rudra validate {output}")
    return 0
