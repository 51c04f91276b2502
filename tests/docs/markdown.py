"""Tables and texts of generated pages."""

import html
import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines; columns that are empty in all rows are left out."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    first, *others = ("| " + " | ".join(row[place] for place in kept) + " |" for row in (head, *rows))
    return [first, "|" + "---|" * len(kept), *others]


def plain(text: str) -> str:
    """A text on one line that means nothing to Markdown outside its `code`; options of commands are code, too."""
    parts = re.split(r"`([^`]*)`", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*\\|]|<(?=[A-Za-z/!])|\b_|_\b)", r"\\\1", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][\w-]*(?: [\w.]+=\w+)?", r"`\g<0>`", part) for part in parts[::2]]
    parts[1::2] = map(code, parts[1::2])
    return "".join(parts)


def code(text: str) -> str:
    """Code that also stands in a table: readers of Markdown do not agree on a bar in backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def sentence(text: str) -> str:
    """A text that begins with a capital letter, unless it begins with a name or a symbol."""
    return text[:1].upper() + text[1:] if text[1:2].isalpha() else text
