"""Write the picture of README.md from a run: ``python docs/picture.py RUN`` (Chromium must be installed)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

from accelmark.report.run_page import write_page

PICTURE: Final = Path(__file__).with_name("page.png")
_WIDTH: Final = 1180
_HEIGHT: Final = 1165


def write_picture(run_dir: Path, output: Path = PICTURE) -> None:
    """Write the upper part of the page of a run, in light colours, as PNG.

    Raises:
        RunError: the run cannot be read.
    """
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page_file = write_page(run_dir, Path(directory) / "page.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector(".plot svg")
        page.screenshot(path=output)
        browser.close()


if __name__ == "__main__":
    write_picture(Path(sys.argv[1]))
