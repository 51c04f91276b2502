"""Takes report.png, the picture in README.md: the runs and the test errors in the report of a sweep.

rudra sweep docs/images/report.toml --output /tmp/report-study
rudra report /tmp/report-study --output /tmp/report.html
python docs/images/report.py /tmp/report.html docs/images/report.png
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright


def main(page_file: Path, picture: Path) -> None:
    """The part of the page from its table of runs to the data of its first figure."""
    with sync_playwright() as driver:
        # in a container, root may not start Chromium's sandbox; the page is our own
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        top = page.locator("h3", has_text="Runs").first.bounding_box()
        end = page.locator("details.data").first.bounding_box()
        assert top is not None
        assert end is not None
        height = end["y"] + end["height"] + 10 - top["y"]
        page.screenshot(
            path=picture, full_page=True, clip={"x": 20, "y": top["y"] - 6, "width": 1160, "height": height}
        )
        browser.close()
    Image.open(picture).quantize().save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
