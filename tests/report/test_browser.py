"""Pages in a real browser, headless: of a run, a served model and a ledger without a network; and over many runs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from accelmark.ledger.ledger import read_ledger, write_record
from accelmark.report.ledger_page import render_ledger
from accelmark.report.run_page import write_page
from accelmark.run.record.directory import measure_run
from benchmarks.ledger import made_up
from tests.made_run import Made, end_round, make_run, measured_run, perflog
from tests.report.test_page import SETTINGS, STAGES, running, serving
from tests.served_run import Served, make_served_run

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()


@dataclass
class Seen:
    """A page, and everything the browser complained of or asked the network for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(rounds=2, nproc=2, windows=60, jitter=1.0, eval_windows=(20, 40, 60), metrics=(0.5, 0.92, 0.94))
    run = make_run(tmp_path_factory.mktemp("browser") / "run", made)
    measure_run(run)
    return write_page(run)


def opened(browser: Browser, width: int = 1280, **options: Any) -> Seen:
    seen = Seen(browser.new_context(viewport={"width": width, "height": 900}, **options).new_page())
    seen.page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    return seen


def see(browser: Browser, path: Path, *, width: int = 1280, scheme: str = "light") -> Seen:
    seen = opened(browser, width, color_scheme=scheme, offline=True)
    seen.page.goto(path.as_uri())
    seen.page.wait_for_selector("html[data-drawn]")
    return seen


def paper(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_plots_are_there_without_the_network_and_nothing_complains(browser: Browser, report: Path) -> None:
    seen = see(browser, report)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert seen.page.locator(".plot .main-svg").count() >= 3
    progress = seen.page.locator('[data-kind="progress"]')
    assert progress.locator(".scatterlayer .trace").count() == 3 * 2  # loss, accuracy, throughput of two rounds
    telemetry = seen.page.locator('[data-kind="telemetry"]')
    assert telemetry.locator(".scatterlayer .trace").count() == 5 * 2 + 2  # of two devices, of one host
    for kind in ("progress", "telemetry", "bars"):
        box = seen.page.locator(f'[data-kind="{kind}"]').bounding_box()
        assert box is not None
        assert box["height"] > 200
        assert box["width"] > 700
    seen.page.evaluate("Plotly.relayout(document.querySelector('[data-kind=progress]'), "
                       "{'xaxis.range[0]': 1, 'xaxis.range[1]': 3})")  # fmt: skip
    seen.page.wait_for_function("document.querySelector('[data-kind=telemetry]').layout.xaxis.range[1] === 3")
    seen.page.context.close()


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, report: Path) -> None:
    light, dark = see(browser, report), see(browser, report, scheme="dark")
    assert paper(light.page) == "rgb(255, 255, 255)"
    assert paper(dark.page) == "rgb(17, 20, 23)"
    light.page.get_by_role("button", name="Switch between light and dark").click()
    assert paper(light.page) == paper(dark.page)
    fill = light.page.evaluate("document.querySelector('.plot').layout.paper_bgcolor")
    assert fill == "#111417"
    assert light.complaints == dark.complaints == []
    light.page.context.close()
    dark.page.context.close()


def test_it_prints_in_light_with_everything_open(browser: Browser, report: Path) -> None:
    seen = see(browser, report, scheme="dark")
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert paper(seen.page) == "rgb(255, 255, 255)"
    assert seen.page.locator("details:not([open])").count() == 0
    assert len(seen.page.pdf(format="A4")) > 20_000
    seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert paper(seen.page) == "rgb(17, 20, 23)"
    seen.page.context.close()


def test_tables_have_heads_and_captions_and_text_has_contrast_on_a_desktop_and_a_phone(
    browser: Browser, report: Path
) -> None:
    for scheme, width in (("light", 390), ("dark", 1280)):
        seen = see(browser, report, scheme=scheme, width=width)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.locator("table:not(:has(caption))").count() == 0
        assert seen.page.locator("th:not([scope])").count() == 0
        assert seen.page.locator(".plot:not([aria-label])").count() == 0
        weak = seen.page.evaluate(CONTRAST)
        assert weak == [], scheme
        seen.page.context.close()


def test_a_failed_run_shows_its_reason_and_runs_no_script_of_it(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(telemetry=False))
    hostile = "</script><script>window.hacked = 1</script>"
    end_round(run / "toy-pytorch-X1x1x1" / "round1", "failed", hostile)
    measure_run(run)
    seen = see(browser, write_page(run))
    assert seen.page.evaluate("window.hacked") is None
    assert hostile in (seen.page.locator(".note.bad").text_content() or "")
    assert seen.complaints == []
    seen.page.context.close()


@pytest.mark.heavy
def test_charts_of_a_served_model_fit_a_desktop_and_a_phone_in_light_and_dark(browser: Browser, tmp_path: Path) -> None:
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


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, chance = tmp_path_factory.mktemp("ledger"), random.Random(1)
    for number in range(120):
        write_record(root, made_up(number, chance))
    path = root / "index.html"
    path.write_text(render_ledger(read_ledger(root)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_of_a_ledger_filters_and_compares(browser: Browser, ledger: Path, width: int, scheme: Any) -> None:
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.goto(ledger.as_uri())
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


CONTRAST = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const weak = new Set();
  for (const element of document.querySelectorAll("body *:not(script):not(style):not(svg *)")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    const own = light(getComputedStyle(element).color);
    const ratio = (Math.max(own, back) + 0.05) / (Math.min(own, back) + 0.05);
    if (ratio < 4.5) weak.add(`${element.className || element.tagName}: ${ratio.toFixed(2)}`);
  }
  return [...weak];
}"""


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
    seen = opened(browser, base_url=address)
    yield seen.page
    seen.page.context.close()
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith((address, "data:", "blob:"))] == []


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
        guarded = browser.new_page(base_url=f"http://127.0.0.1:{port}")
        guarded.goto("/")
        guarded.get_by_label("Token").fill("wrong")
        guarded.get_by_role("button", name="Sign in").click()
        guarded.get_by_text("Wrong token.").wait_for()
        guarded.get_by_label("Token").fill(token)
        guarded.get_by_role("button", name="Sign in").click()
        guarded.get_by_role("heading", name="Runs in runs/").wait_for()
        assert token not in guarded.url
        guarded.close()


def test_the_page_of_a_run_appears_by_itself_when_it_ends(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    running(root)
    with serving(root) as port:
        page = browser.new_page(base_url=f"http://127.0.0.1:{port}")
        page.goto("/run/running")
        page.get_by_text("The report appears here").wait_for()
        ended = measured_run(tmp_path / "running", rounds=1, windows=2, eval_windows=(2,), metrics=(0.95,))
        shutil.copytree(ended, root / "running", dirs_exist_ok=True)
        page.get_by_text("Benchmark report").wait_for(timeout=90_000)
        page.close()
