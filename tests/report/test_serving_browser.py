"""The page of a served model in a real browser: Chromium, headless, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from accelmark.report.run_page import write_page
from accelmark.run.record.directory import measure_run
from tests.report.conftest import IN_CHROMIUM
from tests.report.test_browser import see
from tests.report.test_serving_page import SETTINGS, STAGES
from tests.served_run import Served, make_served_run

pytestmark = [*IN_CHROMIUM, pytest.mark.heavy]


def test_charts_fit_a_desktop_and_a_phone_in_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    made = make_served_run(tmp_path / "run", Served(STAGES, settings=SETTINGS))
    measure_run(made)
    page = write_page(made)
    for width, scheme in ((1280, "light"), (390, "dark")):
        seen = see(browser, page, width=width, scheme=scheme)
        assert seen.complaints == []
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.locator(".plot .main-svg").count() >= 2
        charts = seen.page.locator(".halves .chart")
        boxes = [charts.nth(place).bounding_box() for place in range(charts.count())]
        assert len(boxes) == 6
        assert all(box is not None and 300 < box["width"] <= width for box in boxes)
        wide = seen.page.locator(".scroll").evaluate_all(
            "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert width == 390 or wide == 0
        timeline = seen.page.locator(".chart").last.bounding_box()
        assert timeline is not None
        assert timeline["x"] + timeline["width"] <= width
        seen.page.context.close()
