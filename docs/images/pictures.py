"""Draws the pictures of README.md and of the gallery from the reports of the jobs in jobs/gallery.

python docs/images/pictures.py DIRECTORY

The studies and their reports go to DIRECTORY. Chromium takes the pictures.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent
FIGURES = {"slow-network": 0, "cpu-and-gpu": 3, "cut-network": 0, "how-many-learners": 0}
"""Number of the figure in the report of each job."""


def main(directory: Path) -> None:
    """Runs the studies, writes their reports, and takes a picture of each."""
    directory.mkdir(parents=True, exist_ok=True)
    for job in ("slow-learner", *FIGURES):
        _rudra("sweep", f"gallery/{job}", "--output", directory / job)
        _rudra("report", directory / job, "--output", directory / f"{job}.html", "--force")
    with sync_playwright() as driver:
        # in a container, root may not start Chromium's sandbox; the pages are our own
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.goto((directory / "slow-learner.html").resolve().as_uri())
        _take(page, IMAGES / "report.png", full_page=True, clip=_runs_and_errors(page))
        page.set_viewport_size({"width": 1000, "height": 900})
        for job, number in FIGURES.items():
            page.goto((directory / f"{job}.html").resolve().as_uri())
            _take(page.locator("figure").nth(number), IMAGES / f"gallery-{job}.png")
        browser.close()


def _rudra(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "rudra", *map(str, words)], check=True)


def _runs_and_errors(page: Page) -> dict[str, float]:
    """Returns the part of the page from its table of runs to the data of its first figure."""
    top = page.locator("h3", has_text="Runs").first.bounding_box()
    end = page.locator("details.data").first.bounding_box()
    assert top is not None
    assert end is not None
    return {"x": 20, "y": top["y"] - 6, "width": 1160, "height": end["y"] + end["height"] + 10 - top["y"]}


def _take(place: Any, picture: Path, **how: Any) -> None:
    place.screenshot(path=picture, **how)
    Image.open(picture).quantize().save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
