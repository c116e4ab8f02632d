"""The page, tables, terminal and comparison of serving, of runs made from a simulated queue."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accelmark.report.comparison import render_comparison
from accelmark.report.run_page import render_page
from accelmark.report.tables import results_table, shown_table
from accelmark.results.comparison import compare
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.table import rows_of
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import RequestError
from accelmark.spec.log.serving import ServeFinished
from tests.report.test_page import visible
from tests.served_run import Queue, Served, Stage, make_served_run

QUEUE = Queue(
    slots=4, service_s=lambda noise: 0.2 + 0.02 * noise.random(), prefill_share=0.25, tokens=16, states_queue=True
)
STAGES = (
    Stage(QUEUE, 60, concurrency=1),
    Stage(QUEUE, 160, concurrency=4),
    Stage(QUEUE, 200, rate=10.0),
    Stage(QUEUE, 200, rate=15.0, is_search=True),
)
SETTINGS = {"slo": {"ttft_ms": 200}, "load": {"concurrency": [1, 4], "rates": [10.0], "search": True}}


def run(path: Path, served: Served | None = None) -> LoadedRun:
    measure_run(make_served_run(path, served or Served(STAGES, settings=SETTINGS)))
    return load_run(path)


def test_the_page_has_the_stages_latencies_charts_and_the_server(tmp_path: Path) -> None:
    html = render_page(run(tmp_path / "run"))
    text = visible(html)
    for row in ("1 at a time", "4 at a time", "10/s Poisson", "15/s Poisson search"):
        assert row in text
    assert "The figures of this case are those of 4 at a time : the stage with the highest rate" in text
    assert "TTFT ≤ 200 ms for 99.0 % of the requests" in text.replace("\u202f%", " %")
    assert "toy --port 1" in text
    assert html.count('<div class="chart">') == 2 + 4 + 1, "trade-offs, distributions, timeline"
    assert "In the server's queue" in text
    assert "time since the first stage began" in text
    assert '"title":"Requests in progress"' in html
    assert '"title":"Power"' in html
    assert len(set(re.findall(r'"request (\d+): ', html))) == 160


def test_a_run_whose_server_died_has_a_page_with_the_reason(tmp_path: Path) -> None:
    ended = ServeFinished(state="failed", end_reason="server_died", message="it ended with <9>", e2e_time=1.0)
    text = visible(render_page(run(tmp_path / "run", Served((), ended=ended))))
    assert "No stage was measured." in text
    assert "it ended with <9>" in text


def test_a_stage_without_a_window_says_why(tmp_path: Path) -> None:
    served = Served((STAGES[1], Stage(QUEUE, 8, concurrency=8)), settings={"load": {"concurrency": [4, 8]}})
    html = render_page(run(tmp_path / "run", served))
    assert 'title="no request was started after the load was reached: the stage is too short"' in html
    assert re.search(r'title="8 in the whole stage"[^>]*>\s*8\s*<', html), "its requests, which are in no window"


def test_tables_have_the_server_its_load_and_figures(tmp_path: Path) -> None:
    loaded = run(tmp_path / "run")
    table = results_table([loaded]).splitlines()
    assert "Server and load" in table[0]
    assert "TTFT, median" in table[0]
    assert "| toy 1.0 |" in table[2]
    assert "toy, 4 at a time" in table[2]
    rows = rows_of([loaded])
    assert rows[0]["task"] == "serve"
    assert rows[0]["slo_rate_requests_per_second"] == 10
    titles, cells = shown_table(rows)
    shown = dict(zip(titles, cells[0], strict=True))
    assert shown["Output tokens"].endswith("tokens/s")


def test_a_comparison_has_the_curves_of_all_runs(tmp_path: Path) -> None:
    slower = Queue(slots=4, service_s=lambda noise: 0.3, prefill_share=0.25, tokens=16)
    stages = tuple(Stage(slower, stage.num_requests, stage.concurrency, stage.rate) for stage in STAGES[:3])
    runs = [
        run(tmp_path / "one"),
        run(tmp_path / "two", Served(stages, settings=SETTINGS)),
        run(tmp_path / "three", Served(STAGES, settings=SETTINGS)),
    ]
    comparison = compare(runs)
    assert [len(pair.other.load_curve) for pair in comparison.pairs] == [3, 4]
    html = render_comparison(comparison)
    assert html.count('<div class="chart">') == 2
    assert all(f'"name":"{name}: pytorch' in html for name in ("one", "two", "three"))


def test_servers_with_other_limits_are_not_compared(tmp_path: Path) -> None:
    for name, limit in (("one", 200), ("two", None)):
        run(tmp_path / name)
        (file,) = (tmp_path / name).glob("*/round1/result.json")
        settings = {"slo.ttft_ms": {"value": limit, "layer": "run.yaml", "replaced": (), "forced": False}}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": settings}))
    with pytest.raises(RequestError, match=r"slo\.ttft_ms –, baseline 200"):
        compare([load_run(tmp_path / name) for name in ("one", "two")])
