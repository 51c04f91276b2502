"""`rudra schema`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option

SUMMARY = "print a JSON schema of job files, for editors"

MORE = """\
With the schema, an editor completes keys and values of a job file, shows what they mean, and marks mistakes.
Editors that use taplo (Even Better TOML in VS Code, among others) find it by a line on top of the job file:

  #:schema ./rudra.schema.json"""

EXAMPLES = {
    "rudra schema -o rudra.schema.json": "write the schema next to your job files",
    "rudra schema": "print it",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="file to write. Default: print")
    force_option(parser, "FILE.json")


def execute(arguments: argparse.Namespace) -> int:
    from rudra import files
    from rudra.job import schema

    output: Path | None = arguments.output
    if output is None:
        print(schema.text(), end="")
        return 0
    files.check_output(output, arguments.force)
    with files.written(output) as file:
        file.write(schema.text().encode())
    print(f"wrote {output}")
    return 0
