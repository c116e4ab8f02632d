"""The pages over many runs in a real browser: Chromium, headless."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.made_run import measured_run, perflog
from tests.report.conftest import IN_CHROMIUM
from tests.report.serving import serving
from tests.report.test_browser import CONTRAST
from tests.report.test_view import running

pytestmark = IN_CHROMIUM


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browsed") / "runs"
    for number in range(8):
        run = measured_run(
            root / f"n{number}", rounds=2, windows=3, eval_windows=(2, 3), step_ms=9.0 if number < 4 else 6.0
        )
        for file in (run / "summary.json", *run.glob("*/round*/result.json")):
            file.write_text(file.read_text().replace("2026-11-21T", f"2026-11-{10 + number}T"))
    measured_run(root / "two", rounds=2, windows=3, eval_windows=(2, 3), nproc=2)
    running(root)
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with serving(runs) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=address)
    found = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: asked.append(request.url))
    yield found
    context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def test_runs_are_chosen_and_compared(page: Page) -> None:
    page.goto("/")
    page.get_by_label("Compare n0", exact=True).check()
    page.get_by_label("Compare n7", exact=True).check()
    page.get_by_role("button", name="Compare selected runs").click()
    page.wait_for_url("**/compare?**")
    row = page.locator("tr", has=page.locator("th", has_text="Throughput, steady"))
    assert row.locator(".effect").text_content() == "better"
    assert page.evaluate("getComputedStyle(document.querySelector('.effect.better')).fontWeight") == "600"


def test_charts_of_a_run_scaling_and_a_change_of_level_are_drawn(page: Page) -> None:
    page.goto("/run/n0")
    page.wait_for_selector("html[data-drawn]")
    assert page.locator(".plot .main-svg").count() >= 3
    page.goto("/scaling")
    assert page.locator(".chart .point").count() == 2
    page.goto("/trend")
    assert page.locator(".chart .point").count() == 8
    assert page.locator(".chart .shapelayer path").count() >= 1
    assert page.locator("tbody tr", has_text="change point").locator("th").text_content() == "n4"


def test_the_page_of_a_run_in_progress_updates_itself(page: Page, runs: Path) -> None:
    page.goto("/")
    assert "1.250" in (page.locator("#live").text_content() or "")
    log = next((runs / "running").glob("*/round*/*/rank0.out.log"))
    window: dict[str, object] = {
        "global_steps": 6, "num_trained_samples": 48, "wall_ms": 1000.0, "loss": 0.5, "epoch": 0,
        "learning_rate": 0.1, "losses": [0.5], "step_ms": [], "data_wait_ms": [],
    }  # fmt: skip
    with log.open("a") as file:
        file.write(perflog("STEP_END", window, 2, 0))
    page.locator("#live", has_text="0.5000").wait_for()


def test_a_phone_needs_no_sideways_scrolling_and_text_has_contrast(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/", "/compare?run=n0&run=n7", "/trend", "/scaling"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        assert [weak for weak in page.evaluate(CONTRAST) if not weak.startswith("action")] == [], path
        assert page.locator("table:not(:has(caption))").count() == 0


def test_a_person_signs_in_with_the_token(browser: Browser, runs: Path) -> None:
    token = "a-token-of-enough-letters-1234567890"  # noqa: S105 - made up for tests
    with serving(runs, token) as port:
        context = browser.new_context(base_url=f"http://127.0.0.1:{port}")
        guarded = context.new_page()
        guarded.goto("/")
        guarded.get_by_label("Token").fill("wrong")
        guarded.get_by_role("button", name="Sign in").click()
        guarded.get_by_text("Wrong token.").wait_for()
        guarded.get_by_label("Token").fill(token)
        guarded.get_by_role("button", name="Sign in").click()
        guarded.get_by_role("heading", name="Runs in runs/").wait_for()
        assert token not in guarded.url
        context.close()


def test_the_page_of_a_run_appears_by_itself_when_it_ends(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    running(root)
    with serving(root) as port:
        context = browser.new_context(base_url=f"http://127.0.0.1:{port}")
        page = context.new_page()
        page.goto("/run/running")
        page.get_by_text("The report appears here").wait_for()
        ended = measured_run(tmp_path / "running", rounds=1, windows=2, eval_windows=(2,), metrics=(0.95,))
        shutil.copytree(ended, root / "running", dirs_exist_ok=True)
        page.get_by_text("Benchmark report").wait_for(timeout=90_000)
        context.close()
