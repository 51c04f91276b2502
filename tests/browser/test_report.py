"""A report in a real browser: on a desktop, on a phone, in the dark, and on paper."""

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from rudra.report import report
from tests.unit.report_files import write_study

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
pytest.importorskip("jinja2", reason="Jinja is not installed: pip install 'rudra[plot]'")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'rudra[test]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
]
PHONE, TABLET, DESKTOP = SCREENS = [(390,), (640,), (1280,)]
"""Widths. The page is loaded at the first one."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    return report([write_study(place / "grid", (4, 64), (1, 10, 30))], place / "page.html")[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # in a container, root may not start Chromium's sandbox; the page is our own
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def loaded(browser: Any, page_file: Path) -> Iterator[Any]:
    """The page, without network; nothing may have been said on the console in the end."""
    context = browser.new_context(viewport={"width": PHONE[0], "height": 844}, offline=True)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda asked: said.append(asked.url))
    page.goto(page_file.as_uri())
    yield page
    context.close()
    assert said == []


@pytest.fixture
def opened(loaded: Any, request: pytest.FixtureRequest) -> Any:
    """The page at a width. Its layout is a matter of CSS alone, so it is loaded once."""
    width, *dark = getattr(request, "param", DESKTOP)
    loaded.emulate_media(media="screen", color_scheme="dark" if dark else "light")
    loaded.set_viewport_size({"width": width, "height": 844})
    return loaded


@pytest.mark.parametrize("opened", [*SCREENS, (390, "dark")], indirect=True, ids=str)
def test_nothing_is_wider_than_the_screen(opened: Any) -> None:
    width = opened.viewport_size["width"]
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    # whatever sticks out stands in a box of its own that can be scrolled
    out = """() => [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, svg *") &&
        e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName)"""
    assert opened.evaluate(out) == []


@pytest.mark.parametrize("opened", [PHONE], indirect=True, ids=str)
def test_a_phone_shows_errors_without_scrolling(opened: Any) -> None:
    cells = "all => all.map(cell => [cell.textContent.trim(), cell.getBoundingClientRect().right])"
    heads = dict(opened.eval_on_selector_all("table.sortable thead th", cells))
    (error,) = [right for head, right in heads.items() if head.startswith("test error")]
    assert error < 390


@pytest.mark.parametrize("opened", SCREENS, indirect=True, ids=str)
def test_every_figure_is_seen_once_and_readable(opened: Any) -> None:
    kind = "narrow" if opened.viewport_size["width"] <= 640 else "wide"
    for figure in opened.query_selector_all("figure"):
        seen = [svg for svg in figure.query_selector_all("svg") if svg.is_visible()]
        assert [svg.get_attribute("class") for svg in seen] == [kind]
        box = seen[0].bounding_box()
        assert box["width"] > 300
        assert box["height"] > 100
        heights = seen[0].evaluate("s => [...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().height)")
        assert min(heights) > 9


@pytest.mark.parametrize("opened", SCREENS, indirect=True, ids=str)
def test_no_text_in_a_figure_leaves_it(opened: Any) -> None:
    out = """svgs => svgs.filter(s => s.getBoundingClientRect().width).flatMap(s => {
        const f = s.getBoundingClientRect();
        const outside = b => b.left < f.left - 1 || b.right > f.right + 1;
        return [...s.querySelectorAll("text")].filter(t => outside(t.getBoundingClientRect())).map(t => t.textContent);
    })"""
    assert opened.eval_on_selector_all("figure svg", out) == []


@pytest.mark.parametrize("opened", [DESKTOP, (1280, "dark")], indirect=True, ids=str)
def test_text_stands_out_from_the_page(opened: Any) -> None:
    """WCAG's contrast of at least 4.5, of text in the page and in figures."""
    contrast = """() => {
        const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const light = c => {
            const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const paper = light(getComputedStyle(document.body).backgroundColor);
        const words = document.querySelectorAll("p, dt, dd, a, td, figcaption, .status");
        const texts = [...words].map(e => getComputedStyle(e).color);
        const drawn = [...document.querySelectorAll("svg.wide text")].map(e => getComputedStyle(e).fill);
        return Math.min(...[...new Set([...texts, ...drawn])].map(c => ratio(light(c), paper))); }"""
    assert opened.evaluate(contrast) >= 4.5


def test_headings_tables_and_figures_can_be_read_out(opened: Any) -> None:
    levels = opened.eval_on_selector_all("h1, h2, h3", "all => all.map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert opened.eval_on_selector_all("figure svg", "all => all.every(s => s.getAttribute('aria-label').length > 20)")
    assert opened.eval_on_selector_all("th", "all => all.every(th => th.scope)")


def test_tables_download(opened: Any, tmp_path: Path) -> None:
    opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    links = opened.query_selector_all("a.csv")
    assert len(links) == 13
    for link in links:
        assert link.get_attribute("download").endswith(".csv")
        with urlopen(link.get_attribute("href")) as content:
            head, *rows = csv.reader(content.read().decode("utf-8-sig").splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(head)}
    with opened.expect_download() as download:  # one: Chromium loses a click now and then while it saves another
        links[0].click()
    assert download.value.suggested_filename == links[0].get_attribute("download")
    download.value.save_as(file := tmp_path / "table.csv")
    with urlopen(links[0].get_attribute("href")) as content:
        assert file.read_bytes() == content.read()


def test_runs_can_be_sorted(opened: Any) -> None:
    error = "rows => rows.map(row => row.cells[1].dataset.value)"
    for reverse in (False, True):
        opened.get_by_role("button", name="test error").click()
        values = opened.eval_on_selector_all("table.sortable tbody tr", error)
        known = [float(value) for value in values if value]
        assert known == sorted(known, reverse=reverse)
        assert values[-2:] == ["", ""]  # runs without a value stay at the end


def test_prints(opened: Any, tmp_path: Path) -> None:
    opened.emulate_media(media="print")
    assert [svg.get_attribute("class") for svg in opened.query_selector_all("svg") if svg.is_visible()] == ["wide"] * 11
    assert opened.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
