"""`rudra completion`, and the completions that the generated shell code requests."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rudra.cli.jobs import about
from rudra.errors import ConfigError

SUMMARY = "print the code that makes a shell complete this command line"

MORE = """\
The Tab key then completes commands, options, shipped jobs, job and result files, and for --set and --grid the
keys of a job and their values. Needs argcomplete: pip install 'rudra[completion]'. Run one of these once:

  rudra completion bash >> ~/.bashrc
  rudra completion zsh >> ~/.zshrc            (below the line with compinit)
  rudra completion fish > ~/.config/fish/completions/rudra.fish"""

EXAMPLES = {
    "rudra completion bash": "print the code for bash",
    "rudra completion zsh": "print the code for zsh",
}

MISSING = "completion needs argcomplete: pip install 'rudra[completion]'"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that runs the code")


def execute(arguments: argparse.Namespace) -> int:
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise ConfigError(MISSING) from None
    print(shellcode(["rudra"], False, arguments.shell))
    return 0


def answer(known: list[str], parser_of: Callable[[list[str]], argparse.ArgumentParser]) -> int:
    """Prints the possible continuations of a shell's line, and ends the process.

    Args:
        known: names of all commands.
        parser_of: function that makes the parser of some commands.
    """
    try:
        import argcomplete
    except ImportError:
        return 1
    asked = [word for word in os.environ.get("COMP_LINE", "").split()[1:2] if word in known]
    argcomplete.autocomplete(
        parser_of(asked or known),
        always_complete_options=False,
        default_completer=_complete,  # type: ignore[arg-type]
    )
    return 1


def _complete(prefix: str, action: argparse.Action, **_: object) -> Mapping[str, str]:
    """Returns completions of an argument, with their meanings. They depend on the argument's name in the help."""
    found: dict[str, str] = {}
    for kind in str(action.metavar).split("|"):
        if kind in _KINDS:
            found |= _KINDS[kind](prefix)
        elif kind.islower():
            found[kind] = ""
        elif action.type is Path or Path(kind).suffix:
            found |= _files(prefix, Path(kind).suffix)
    return found


def _files(prefix: str, suffix: str) -> dict[str, str]:
    """Returns files with a suffix, and all directories."""
    place, begin = os.path.split(prefix)
    found = []
    with suppress(OSError), os.scandir(os.path.expanduser(place) or ".") as entries:
        for entry in entries:
            if entry.name.startswith(begin) and (begin or entry.name[0] != "."):
                found += [f"{entry.name}/"] if entry.is_dir() else [entry.name] if entry.name.endswith(suffix) else []
    return {os.path.join(place, name): "" for name in sorted(found)}


def _shipped(_: str) -> dict[str, str]:
    from rudra.job.jobfiles import shipped_jobs

    return {name: about(path) for name, path in shipped_jobs().items()}


def _assignments(prefix: str) -> dict[str, str]:
    """Returns keys of a job, then the values that a key names. After a comma another value follows."""
    from rudra.job import schema

    keys = schema.job_keys()
    key, equals, value = prefix.partition("=")
    if not equals:
        return {f"{key}=": about["description"] for key, about in keys.items()}
    before = value[: value.rfind(",") + 1]
    more = (each for each in schema.named(keys.get(key, {})) if each not in before.split(","))
    return {f"{key}={before}{each}": "" for each in more}


def _benchmarks(_: str) -> dict[str, str]:
    from rudra.bench import known

    return known()


_KINDS: dict[str, Callable[[str], dict[str, str]]] = {
    "JOB": lambda prefix: _shipped(prefix) | _files(prefix, ".toml"),
    "NAME": _shipped,
    "BENCHMARK": _benchmarks,
    "DIR": lambda prefix: _files(prefix, "/"),
    "TABLE.KEY=VALUE": _assignments,
    "TABLE.KEY=V1,V2": _assignments,
}
"""Name of an argument in the help -> function that completes the argument."""
