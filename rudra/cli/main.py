"""The command line: a thin layer over the Python API. Parses, calls, prints, and turns errors into one line.

Each command is a module in this package. `SUMMARY` and `MORE` describe the command, and `EXAMPLES` has command lines
with explanations. `add_options` declares its arguments, and `execute` runs it.
"""

import argparse
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from traceback import walk_tb
from types import ModuleType
from typing import Any, NoReturn

from rudra import cli, interrupts
from rudra.errors import RudraError, RunError, meant, printable

PROGRAM = "rudra"

COMMON = {"main", "options", "finish"}
"""Modules of this package that are not commands."""

SYNONYMS = {
    "run": ("train", "start", "launch", "fit", "execute"),
    "resume": ("continue", "restart"),
    "simulate": ("simulation", "emulate"),
    "sweep": ("study", "grid"),
    "tune": ("search", "optimize", "optimise"),
    "slurm": ("submit", "sbatch", "batch", "queue"),
    "predict": ("estimate", "forecast"),
    "show": ("results", "summary", "info", "inspect", "print"),
    "plot": ("draw", "figure", "graph", "picture"),
    "replay": ("reproduce", "repeat", "rerun"),
    "export": ("convert", "save"),
    "timeline": ("trace",),
    "report": ("compare",),
    "explain": ("why", "analyse", "analyze", "advise"),
    "watch": ("monitor", "follow", "progress", "status"),
    "jobs": ("list", "ls", "examples"),
    "init": ("new", "create", "template"),
    "validate": ("verify", "lint", "dry-run"),
    "doctor": ("diagnose", "selftest"),
    "bench": ("benchmark",),
    "--help": ("help",),
    "--version": ("version",),
}
"""Command -> synonyms, for suggestions about an unknown command."""

FIRST = (
    *("run", "resume", "simulate", "sweep", "tune", "slurm", "predict", "calibrate", "profile"),
    *("place", "show", "plot", "explain", "replay", "export", "timeline", "report", "watch"),
    *("jobs", "init", "validate", "topology", "check", "schema", "completion", "doctor", "bench"),
)
"""The order of commands in the help. Other commands follow."""

DESCRIPTION = """\
Rudra trains a PyTorch model on MPI ranks. You choose when gradients become an update of the
weights: hardsync waits for all learners, n-softsync for some of them, async for none. Rudra
measures what the choice costs: time per epoch, staleness, test error.

A job file says what to train and how; `rudra jobs` lists the shipped ones. A run writes its
results into one HDF5 file."""

EPILOG = """\
first steps:
  rudra doctor                        check that this machine can run jobs
  rudra run digits                    train a shipped job on MPI ranks, in under a minute
  rudra show digits-*.h5              print the results
  rudra plot digits-*.h5              draw error, loss, learning rate and staleness
  rudra resume digits-*.h5            continue a run that was stopped

your own job:
  rudra init my-job.toml              write a commented job file to edit
  rudra validate my-job.toml          check it, and see what it would run
  rudra run my-job.toml

comparing protocols (each scales the learning rate in its own way; modulation=none keeps it the same for all):
  rudra run digits --set protocol.name=hardsync --set protocol.modulation=none --output hard.h5
  rudra run digits --set protocol.n=2 --set protocol.modulation=none --output soft.h5
  rudra simulate digits --learners 30 --output many.h5     simulate 30 learners in one process
  rudra plot hard.h5 soft.h5 many.h5 --output compare.png

on a cluster (every rank that no server needs becomes a learner):
  mpirun -n 10 rudra run my-job.toml
  srun --mpi=pmix rudra run my-job.toml
  rudra slurm my-job.toml --ntasks 10 --time 4:00:00 --submit     as a batch job that continues after its time limit

`rudra COMMAND --help` explains a command and shows examples.

exit codes: 0 success; 1 the run failed; 2 usage or configuration error; 3 the run was stopped, and
`rudra resume` continues it"""


def main(argv: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        argv: arguments after the program's name.

    Returns:
        Exit code: 0, 1 (it ran and failed), 2 (usage or configuration error), 3 (it was stopped, and can be resumed).
    """
    known = names()
    try:
        if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
            return int(_module("completion").answer(known, parser_of))
        if not argv:
            parser_of(known).print_help()
            return 0
        asked = argv[0] in known
        arguments = parser_of(argv[:1] if asked else known).parse_args(argv, argparse.Namespace(argv=argv))
        import rudra.job.job  # noqa: F401  nearly every command needs it, and it takes longest before torch

        interrupts.raise_again()
        sys.argv[:] = ["rudra"]  # a module of the user's that parses arguments must not see Rudra's arguments
        code = _executed(arguments)
        sys.stdout.flush()
        return code
    except RudraError as error:
        if not error.said:
            from rudra.mpi.launch import let_rank0_report, world_rank

            if world_rank() == 0:
                print(error.report, file=sys.stderr)
            let_rank0_report(error.exit_code)
        return error.exit_code
    except MemoryError as error:
        print(f"rudra: too little memory: {printable(str(error)) or 'none is left'}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "torch" not in sys.modules:
            raise
        from rudra.compute.device.faults import fault_text

        if (text := fault_text(error)) is None:
            raise
        print(f"rudra: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        from rudra.mpi.launch import world_rank

        if world_rank() == 0:
            print("rudra: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `rudra show … | head`: the reader has closed the pipe
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _executed(arguments: argparse.Namespace) -> int:
    """Returns the exit code of a command. Raises RunError if the user's code ends the program."""
    try:
        return int(arguments.execute(arguments))
    except SystemExit as error:
        frames = [(frame.f_globals.get("__name__", ""), frame, line) for frame, line in walk_tb(error.__traceback__)]
        theirs = [each for each in frames if each[0].partition(".")[0] not in sys.stdlib_module_names]
        module, frame, line = theirs[-1]
        text = f"{module}: {frame.f_code.co_name} (line {line}) ended the program, with code {error.code}"
        raise RunError(f"{text}; raise another exception") from None


class _Version(argparse.Action):
    """Option that prints the version, which takes a while to find."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            version = metadata.version("rudra")
        except metadata.PackageNotFoundError:
            version = "(a checkout that is not installed)"
        print(f"rudra {version}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Parser that suggests a command for an unknown one: the closest spelling among commands and synonyms.

    The parser of a command refuses options that it does not know. `argparse` would leave them to the parser of all
    commands, which can neither show the command's usage nor suggest one of its options.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest and self.prog != PROGRAM:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant(rest[0].partition('=')[0], options)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            choices = re.findall(r"[\w-]+", found[2])
            command = self.prog == PROGRAM
            message = _unknown_command(found[1], choices) if command else message + meant(found[1], choices)
        super().error(message)


def _unknown_command(word: str, commands: Sequence[str]) -> str:
    """Returns the error line about an unknown command."""
    words = {synonym: command for command, synonyms in SYNONYMS.items() for synonym in synonyms}
    words |= {command: command for command in commands}
    near = get_close_matches(word.casefold(), words, n=1)
    suggestion = f"did you mean rudra {words[near[0]]}?" if near else "rudra --help lists the commands"
    return f"there is no command '{word}'; {suggestion}"


def names() -> list[str]:
    """Returns the names of all commands."""
    found = {module.name for module in pkgutil.iter_modules(cli.__path__)} - COMMON
    return sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def parser_of(commands: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser that knows the given commands."""
    raw = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
    parser = _Parser(PROGRAM, description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in commands:
        module = _module(name)
        text = f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.\n\n{module.MORE}"
        epilog = "examples:" + "\n".join(f"\n  # {what}\n  {line}" for line, what in module.EXAMPLES.items())
        sub = subparsers.add_parser(name, help=module.SUMMARY, description=text, epilog=epilog, formatter_class=raw)
        module.add_options(sub)
        sub.set_defaults(execute=module.execute)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"rudra.cli.{name}")
