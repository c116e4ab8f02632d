"""The page of a ledger in a browser: filters, charts, two chips; in light, dark and on a phone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from accelmark.ledger.ledger import read_ledger, write_record
from accelmark.report.ledger_page import render_ledger
from benchmarks.ledger import made_up
from tests.report.conftest import IN_CHROMIUM

pytestmark = IN_CHROMIUM


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, chance = tmp_path_factory.mktemp("ledger"), random.Random(1)
    for number in range(120):
        write_record(root, made_up(number, chance))
    path = root / "index.html"
    path.write_text(render_ledger(read_ledger(root)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_shows_filters_and_compares(browser: Browser, page: Path, width: int, scheme: Any) -> None:
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.goto(page.as_uri())
    assert view.locator("#count").inner_text().startswith("120 of 120")
    assert view.locator("#table tbody tr").count() == 50
    view.locator("#more").click()
    assert view.locator("#table tbody tr").count() == 120
    view.get_by_label("Vendor").select_option("acme")
    view.locator("#filters").get_by_label("Case").select_option("bert")
    assert 0 < view.locator("#table tbody tr").count() < 120
    assert set(view.locator("#table tbody tr td:nth-child(2)").all_inner_texts()) == {"X1", "X2"}
    view.locator("#charts").scroll_into_view_if_needed()
    view.wait_for_selector("#history .main-svg", state="attached")
    view.locator("#pairs tbody tr").first.wait_for()
    assert "comparable" in view.locator("#summary").inner_text()
    view.locator("#table details").first.click()
    assert "MADE UP" in view.locator("#table dl").inner_text()
    assert not view.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not errors
    view.close()
