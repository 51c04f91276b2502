"""The command line, as its parsers declare it."""

import argparse
import importlib
import re
import textwrap
from collections.abc import Mapping

from rudra.cli.main import DESCRIPTION, EPILOG, names, parser_of
from tests.docs import markdown
from tests.docs.markdown import code, plain, sentence


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command's own parser."""
    whole = parser_of(names())
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def sections() -> list[str]:
    """A section for the program as a whole, and one for each command."""
    lines = ["## rudra", "", *_text(DESCRIPTION), *_text(EPILOG)]
    for name, parser in parsers().items():
        lines += [f"## rudra {name}", "", *_text(parser.description or ""), "```text", usage(parser), "```", ""]
        arguments, options, *others = parser._action_groups
        for title, groups in [("", [arguments, options]), *((group.title or "", [group]) for group in others)]:
            actions = [action for group in groups for action in group._group_actions if _shown(action)]
            lines += [f"{sentence(title)}:", ""] if title else []
            rows = [_row(parser, action) for action in actions]
            lines += [*markdown.table(["option", "meaning"], rows), ""] if rows else []
        examples = getattr(importlib.import_module(f"rudra.cli.{name}"), "EXAMPLES", {})
        lines += _listed(examples)
        if not examples or not (parser.epilog or "").lower().startswith("example"):
            lines += _text(parser.epilog or "")
    return lines[:-1]


def usage(parser: argparse.ArgumentParser) -> str:
    """The command and what it must have; `argparse` writes the rest differently in each version of Python."""
    must = [action for action in parser._actions if not action.option_strings or action.required]
    return " ".join([parser.prog, "[OPTION…]", *map(_asked, must)])


def _shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    about = parser._get_formatter()._expand_help(action) if action.help else ""
    return code(_asked(action)), plain(about)


def _asked(action: argparse.Action) -> str:
    """An option or argument as it is written on the command line."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    forms = {"?": f"[{metavar}]", "*": f"[{metavar}…]", "+": f"{metavar}…", 0: "", None: metavar}
    value = forms[action.nargs]  # type: ignore[index]
    return " ".join(filter(None, [", ".join(action.option_strings), value]))


def _listed(examples: Mapping[str, str]) -> list[str]:
    """A command's examples, each below what it does."""
    shown = "\n\n".join(f"# {about}\n{command}" for command, about in examples.items())
    return ["```sh", *shown.split("\n"), "```", ""] if examples else []


def _text(text: str) -> list[str]:
    """A help text as Markdown: what is indented is an example or a list, and stays as it is."""
    lines: list[str] = []
    for block in _blocks(text):
        if block.startswith("  "):
            shown = [line[2:] for line in block.split("\n")]
            sh = all(re.match(r"(rudra|mpirun|srun) ", line) for line in shown)
            lines += ["```sh" if sh else "```text", *(_commented(shown) if sh else shown), "```", ""]
        elif block.strip():
            lines += [*textwrap.wrap(plain(sentence(block)), 120, break_on_hyphens=False), ""]
    return lines


def _blocks(text: str) -> list[str]:
    """The paragraphs of a text, and between them what is indented."""
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        if not line.strip():
            blocks.append([])
            continue
        if blocks[-1] and blocks[-1][-1].startswith("  ") != line.startswith("  "):
            blocks.append([])
        blocks[-1].append(line.rstrip())
    return ["\n".join(block) for block in blocks if block]


def _commented(examples: list[str]) -> list[str]:
    """Examples whose explanations a shell ignores."""
    parts = [re.split(r" {2,}(?:# *)?", example, maxsplit=1) for example in examples]
    width = max((len(part[0]) for part in parts if len(part) > 1), default=0)
    return [f"{part[0]:{width}}  # {part[1]}" if len(part) > 1 else part[0] for part in parts]
