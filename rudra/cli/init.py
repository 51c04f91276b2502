"""`rudra init`."""

import argparse
import os
from pathlib import Path

from rudra.cli.options import force_option, search_beside

SUMMARY = "write a commented job file to start from"

MORE = """\
The file has every table and key, with its meaning. Keys that few jobs need are commented out, with their
defaults. With --from, the values come from a shipped job or from a job file of yours. With --own, the job is a
short one, and a module next to it has a model, data, a loss and a metric to replace by yours."""

EXAMPLES = {
    "rudra init my-job.toml": "write a job that trains a small network on digits",
    "rudra init --own waves.toml": "write waves.toml and waves.py, for your own model and data",
    "rudra init --from resnet32 my-resnet.toml": "write a job with the values of a shipped one",
    "rudra init --from old.toml -": "print a job file of yours with a comment on every key",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "file to write; - prints. Default: job.toml"
    parser.add_argument("file", type=Path, nargs="?", default=Path("job.toml"), metavar="FILE.toml", help=about)
    about = "shipped job or job file whose values to take. Default: digits, for any number of learners"
    parser.add_argument("--from", dest="job", metavar="JOB", help=about)
    about = "write a short job, and a module FILE.py with a model, data, a loss and a metric to replace by yours"
    parser.add_argument("--own", action="store_true", help=about)
    force_option(parser, "FILE.toml")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.errors import ConfigError

    output: Path = arguments.file
    if output.suffix != ".toml" and str(output) != "-":
        raise ConfigError(f"{output}: is not a name for a job file; valid: {output.name or 'job'}.toml")
    if arguments.own and arguments.job is not None:
        raise ConfigError("init: --own and --from are two kinds of jobs; give one of them")
    return _own(output, arguments.force) if arguments.own else _commented(output, arguments)


def _own(output: Path, force: bool) -> int:
    """Writes the example of a user's own module under another name."""
    from rudra import files
    from rudra.errors import ConfigError
    from rudra.plugins import taken

    if not output.stem.isidentifier() or taken(output.stem):
        raise ConfigError(f"{output}: {output.stem} cannot be the name of a module of yours; valid: mine.toml")
    example = Path(__file__).with_name("own")
    texts = {
        output: (example / "job.toml.txt").read_text("utf-8").replace("MODULE", output.stem),
        output.with_suffix(".py"): (example / "module.py.txt").read_text("utf-8"),
    }
    for path in texts:
        files.check_output(path, force)
    for path, text in texts.items():
        with files.written(path) as file:
            file.write(text.encode())
    print(f"wrote {' and '.join(map(str, texts))}; change them, and check them with: rudra validate {output}")
    return 0


def _commented(output: Path, arguments: argparse.Namespace) -> int:
    """Writes a job with a comment on every key."""
    from rudra import files
    from rudra.cli.jobs import about
    from rudra.job.job import Job
    from rudra.job.jobfiles import PAPER, read_job
    from rudra.job.template import commented

    source = arguments.job or "digits"
    search_beside(source)
    path, tables = read_job(source)
    Job.of(path, tables)
    if arguments.job is None:
        del tables["cluster"]["learners"]  # otherwise `mpirun -n N` would have to match it
    if not os.path.isfile(output.parent / PAPER):
        tables.get("study", {}).pop("paper", None)  # it needs the paper's numbers next to the job
    text = commented(tables, about(path) or f"A job for Rudra, from {source}.")
    if str(output) == "-":
        print(text, end="")
        return 0
    files.check_output(output, arguments.force)
    with files.written(output) as file:
        file.write(text.encode())
    print(f"wrote {output}; check it with: rudra validate {output}")
    return 0
