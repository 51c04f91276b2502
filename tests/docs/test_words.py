"""Prose: rates of places that are hard to read, lengths of sentences and of pages (`tests.docs.plain_words`)."""

from pathlib import Path

import pytest

from tests.docs.plain_words import READ, ROOT, Count, count, files, sentences

GENERATED = {"commands.md", "job-reference.md", "roles.md", "shipped.md"}
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED)
SHORT = ("averaging", "hogbatch", "placement", "topologies")
"""Guides with a reference page of their own."""


def test_prose_is_plain_over_all() -> None:
    words, places, semicolons = (sum(column) for column in zip(*map(count, files(READ)), strict=True))
    assert places <= 2.0 * words / 1000
    assert semicolons <= 5.0 * words / 1000


@pytest.mark.parametrize("top", READ)
def test_prose_is_plain_in_each_file(top: str) -> None:
    """A short file may have one place, whatever its rate."""

    def too_many(counts: Count) -> bool:
        return counts.places > max(1.0, 5.0 * counts.words / 1000)

    assert [str(file.relative_to(ROOT)) for file in files((top,)) if too_many(count(file))] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide_has_short_sentences(page: Path) -> None:
    found = sentences(page)
    assert sum(found) / len(found) <= 17
    assert sum(length > 30 for length in found) <= max(1, 0.05 * len(found))


@pytest.mark.parametrize("name", SHORT)
def test_guide_is_short(name: str) -> None:
    assert len((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").splitlines()) <= 150
