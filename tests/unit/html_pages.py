"""What a page of HTML holds, for tests. A page that is not well formed fails."""

from base64 import b64decode
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Part(NamedTuple):
    """A part of a page: an element with its text, its parents' tags, and its attributes."""

    tag: str
    attributes: dict[str, str | None]
    parents: tuple[str, ...]
    text: str


class HtmlPage(HTMLParser):
    """A page, with all its elements in the order of their ends."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {[tag for tag, *_ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self._open.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"closed too often: {tag}"
        assert self._open[-1][0] == tag, f"{tag} closes {self._open[-1][0]}, {self.getpos()}"
        name, attributes, texts = self._open.pop()
        self.parts.append(Part(name, attributes, tuple(each for each, *_ in self._open), "".join(texts)))

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def of(self, tag: str) -> Iterator[Part]:
        """All elements of a tag."""
        return (part for part in self.parts if part.tag == tag)

    def section(self, name: str) -> str:
        """The text of a section, by its id."""
        (found,) = (part.text for part in self.of("section") if part.attributes.get("id") == name)
        return found

    def ids(self) -> list[str]:
        return [str(part.attributes["id"]) for part in self.parts if "id" in part.attributes]

    def download(self, name: str) -> str:
        """The text of a table that the page offers as a file."""
        (link,) = (part for part in self.of("a") if part.attributes.get("download") == f"{name}.csv")
        return b64decode(str(link.attributes["href"]).partition("base64,")[2]).decode("utf-8-sig")
