"""The pages and tables of runs, of serving runs made from a simulated queue, and of clusters; the web server."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.explain.entries import all_terms
from accelmark.report.charts import embed_json
from accelmark.report.cluster_page import render_cluster
from accelmark.report.comparison import render_comparison
from accelmark.report.run_page import interval_text, ranking, render_page, write_page
from accelmark.report.tables import results_table, shown_table
from accelmark.report.view import RunIndex, is_loopback, listen, make_app, read_or_create_token, server_for
from accelmark.results.cluster import CheckpointWrites, ClusterReport, Recovery, ScalePoint, ScalingCurve
from accelmark.results.comparison import compare
from accelmark.results.figures import FigureName
from accelmark.results.schema import Finding, Spread
from accelmark.results.store.bundle import SUFFIX, check_manifest, write_bundle
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.table import rows_of
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import RequestError
from accelmark.spec.log.inference import ServeFinished
from accelmark.spec.log.records import Ceilings, CollectiveTiming, Rate
from accelmark.spec.rules import RunRules
from tests.made_run import Made, end_round, loaded, make_run, measured_run, perflog
from tests.results.test_sources import RECORDED
from tests.run.fakes import make_plan
from tests.served_run import Queue, Served, Stage, make_served_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def page_of(run: Path) -> str:
    measure_run(run)
    return render_page(load_run(run))


def with_case(run: LoadedRun, **changed: object) -> LoadedRun:
    """A run whose case is otherwise: GENERATED."""
    case = run.summary.cases[0].model_copy(update=changed)
    return replace(run, summary=run.summary.model_copy(update={"cases": (case,)}))


def visible(page: str) -> str:
    """The text of a page without its scripts and styles."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def test_verdict_and_headline_figures_come_first(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", Made(rounds=2)))
    tiles = re.findall(r'<div class="tile( decisive)?"><dt>([^<]*)</dt>', page)
    assert [title for decisive, title in tiles if decisive] == [title for _, title in tiles[:3]]
    assert tiles[0] == (" decisive", "Throughput, steady")
    assert "Peak host memory" not in [title for _, title in tiles], "the memory of the whole machine leads nowhere"
    assert re.search(r"<details><summary>\d+ other settings", page)
    assert re.search(r"<details><summary>Host ", page)
    text = visible(page)
    assert text.index("batch_size") < text.index("other settings of the standard case"), "the changed setting is first"
    order = [text.index(word) for word in ("VALID", "Throughput, steady", "Progress", "Telemetry", "Figures", "Rounds")]
    assert order == sorted(order)
    assert "12,800" in text
    assert "Run, 21 Nov 2026 " in text
    assert "6.40" in text  # MFU in percent


def test_findings_are_folded_where_the_result_is_valid(tmp_path: Path) -> None:
    run = loaded(tmp_path / "run", rounds=2)
    found = (Finding(severity="warning", rule="busy-at-start", expected="", actual="busy"),)
    for verdict, opened in (("VALID", ""), ("INVALID", " open")):
        page = render_page(with_case(run, verdict=verdict, findings=found))
        assert f"<details{opened}><summary>1 finding: 1 warning</summary>" in page


@pytest.mark.parametrize(
    ("changed", "badge", "explained"),
    [
        ({}, "✓ VALID", "The audit confirmed it."),
        ({"marks": ("busy_machine",)}, "✓ VALID, timing unreliable", "the timing is unreliable."),
        ({"marks": ("speed_only",)}, "✓ VALID, speed only", "convergence was not checked."),
        ({"verdict": "INVALID", "state": "cancelled"}, "– cancelled", "was not judged."),
    ],
)
def test_a_verdict_is_explained_under_its_badge(
    tmp_path: Path, changed: dict[str, object], badge: str, explained: str
) -> None:
    page = render_page(with_case(loaded(tmp_path / "run"), **{"verdict": "VALID", "marks": (), **changed}))
    assert f"{badge} " in visible(page)
    assert explained in visible(page)
    assert ('decisive"><dt>Throughput' in page) == (
        "marks" not in changed or "busy_machine" not in str(changed["marks"])
    )


def test_a_finding_is_a_link_to_the_text_of_its_rule(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2, telemetry=False))
    page = page_of(run)
    (case,) = load_run(run).summary.cases
    assert case.findings
    for finding in case.findings:
        rule = finding.rule
        (row,) = re.findall(rf'<tr id="[^"]+-rule-{rule}">(.*?)</tr>', page)
        assert all_terms()["audit rule"][rule].why in unescape(row)
    written = [text for text in (*case.reasons, *case.warnings) if text.endswith("]")]
    assert written
    links = re.findall(r'<a href="#([^"]+-rule-[^"]+)">\[', page)
    assert len(links) >= len(written)
    assert all(f'<tr id="{link}">' in page for link in links)


def test_null_figures_have_their_reasons_and_settings_their_provenance(tmp_path: Path) -> None:
    text = visible(page_of(make_run(tmp_path / "run", Made(chip=None))))
    assert "Not measured" in text
    assert re.search(r"MFU( · [^·]*)* the peak of .* vendor nvidia does not describe this chip", text), (
        "name, then reason"
    )
    assert re.search(r"batch_size 8 command line 4 \(case\.yaml\)", text)


def test_reasons_warnings_and_findings_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2, telemetry=False))
    end_round(run / "toy-pytorch-X1x1x1" / "round2", "lost", "host node00 went away")
    text = visible(page_of(run))
    assert "round 2 was lost: host node00 went away" in text
    assert "telemetry-missing" in text
    assert "INVALID" in text


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    log = run / "toy-pytorch-X1x1x1" / "round1" / "node00_noderank0" / "rank0.out.log"
    log.write_text(log.read_text().replace('"accuracy"', json.dumps(HOSTILE)))
    end_round(run / "toy-pytorch-X1x1x1" / "round1", "failed", HOSTILE)
    page = page_of(run)
    assert HOSTILE not in page
    assert "<img src=x" not in page
    assert HOSTILE in visible(page)


def test_json_in_a_script_cannot_end_it() -> None:
    hostile = {"</script>": "<!-- & \u2028 ]]>"}
    text = embed_json(hostile)
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == hostile
    with pytest.raises(ValueError, match="Out of range"):
        embed_json(float("nan"))


def test_the_page_is_self_contained_small_and_covered_by_the_manifest_of_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=3, nproc=4, windows=300, jitter=1.0))
    measure_run(run)
    assert write_page(run) == run / "report.html"
    assert "report.html" in (run / "MANIFEST.sha256").read_text()
    assert check_manifest(run) == []
    page = (run / "report.html").read_text()
    assert len(page.encode()) < 7_000_000
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", own)
    assert "default-src 'none'" in own


def test_an_unreadable_round_is_named_and_the_page_is_still_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    measure_run(run)
    (run / "toy-pytorch-X1x1x1" / "round2" / "result.json").write_text("{")
    text = visible(render_page(load_run(run)))
    assert "Problems of files" in text
    assert "round2/result.json" in text


def test_the_slowest_rank_is_named_with_the_time_of_every_rank(tmp_path: Path) -> None:
    text = visible(page_of(make_run(tmp_path / "run", Made(nnodes=2, own_ms=(5.0, 7.0)))))
    assert "Rank 1 on host node01 takes longer to compute than the others, which costs them 20 % of each step" in text
    assert "20 % of each step. Means over steps in ms." in text
    assert "Wait for ranks" in text
    text = visible(page_of(make_run(tmp_path / "other", Made(nnodes=2))))
    assert "Wait for ranks" not in text
    assert "The slowest rank is not known: 0 of 2 ranks logged their own part of steps." in text


def test_a_difference_near_zero_has_an_absolute_interval() -> None:
    spread = Spread(mean=-0.0002, stdev=0.0006, ci95=(-0.0017, 0.0013), num_rounds=3)
    assert interval_text(FigureName.METRIC_DIFFERENCE, spread) == "± 0.0015"
    assert interval_text(FigureName.ENGINE_METRIC, spread).startswith("± 750")


def test_a_run_by_rules_ranks_its_cases_by_flops_and_names_the_rules_with_their_hash(tmp_path: Path) -> None:
    rules = RunRules(name="own", version=4, mutable=("batch",))
    run = make_run(tmp_path / "run", Made(rules=rules))
    page = visible(page_of(run))
    assert f"By rules own (version 4, SHA-256 {rules.sha256[:12]})" in page
    ranked = ranking(load_run(run))
    assert ranked is not None
    ((flops, anchor, case),) = ranked[1]
    whole = case.mean_of(FigureName.THROUGHPUT_WHOLE)
    assert whole is not None
    assert flops == pytest.approx(whole / 16 * 8e9), "16 tokens a sample of 8e9 FLOP"
    assert (anchor, case.verdict) == ("case-1", "OPEN"), "AccelMark does not ship these rules"
    assert "Ranking" not in visible(page_of(make_run(tmp_path / "plain")))


def test_the_table_has_one_row_per_case_of_the_model_with_verdict_and_marks(tmp_path: Path) -> None:
    run = loaded(tmp_path / "run", rounds=2, jitter=0.0, is_open=True)
    head, rule, row = results_table([run]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "12,800" in row
    assert "OPEN (open)" in row
    assert "2026-11-21" in row
    assert results_table([run], "other") == ""


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


def served_run(path: Path, served: Served | None = None) -> LoadedRun:
    measure_run(make_served_run(path, served or Served(STAGES, settings=SETTINGS)))
    return load_run(path)


def test_the_page_has_the_stages_latencies_charts_and_the_server(tmp_path: Path) -> None:
    html = render_page(served_run(tmp_path / "run"))
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
    text = visible(render_page(served_run(tmp_path / "run", Served((), ended=ended))))
    assert "No stage was measured." in text
    assert "it ended with <9>" in text


def test_a_stage_without_a_window_says_why(tmp_path: Path) -> None:
    served = Served((STAGES[1], Stage(QUEUE, 8, concurrency=8)), settings={"load": {"concurrency": [4, 8]}})
    html = render_page(served_run(tmp_path / "run", served))
    assert 'title="no request was started after the load was reached: the stage is too short"' in html
    assert re.search(r'title="8 in the whole stage"[^>]*>\s*8\s*<', html), "its requests, which are in no window"


def test_tables_have_the_server_its_load_and_figures(tmp_path: Path) -> None:
    run = served_run(tmp_path / "run")
    table = results_table([run]).splitlines()
    assert "Server and load" in table[0]
    assert "TTFT, median" in table[0]
    assert "| toy 1.0 |" in table[2]
    assert "toy, 4 at a time" in table[2]
    rows = rows_of([run])
    assert rows[0]["task"] == "serve"
    assert rows[0]["slo_rate_requests_per_second"] == 10
    titles, cells = shown_table(rows)
    shown = dict(zip(titles, cells[0], strict=True))
    assert shown["Output tokens"].endswith("tokens/s")


def test_a_comparison_has_the_curves_of_all_runs(tmp_path: Path) -> None:
    slower = Queue(slots=4, service_s=lambda noise: 0.3, prefill_share=0.25, tokens=16)
    stages = tuple(Stage(slower, stage.num_requests, stage.concurrency, stage.rate) for stage in STAGES[:3])
    runs = [
        served_run(tmp_path / "one"),
        served_run(tmp_path / "two", Served(stages, settings=SETTINGS)),
        served_run(tmp_path / "three", Served(STAGES, settings=SETTINGS)),
    ]
    comparison = compare(runs)
    assert [len(pair.other.load_curve) for pair in comparison.pairs] == [3, 4]
    html = render_comparison(comparison)
    assert html.count('<div class="chart">') == 2
    assert all(f'"name":"{name}: pytorch' in html for name in ("one", "two", "three"))


def test_servers_with_other_limits_are_not_compared(tmp_path: Path) -> None:
    for name, limit in (("one", 200), ("two", None)):
        served_run(tmp_path / name)
        (file,) = (tmp_path / name).glob("*/round1/result.json")
        settings = {"slo.ttft_ms": {"value": limit, "layer": "run.yaml", "replaced": (), "forced": False}}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": settings}))
    with pytest.raises(RequestError, match=r"slo\.ttft_ms –, baseline 200"):
        compare([load_run(tmp_path / name) for name in ("one", "two")])


POINTS = (
    ScalePoint("scaling", 1, 8, 100.0, 1.0, 1.0, None, "16"),
    ScalePoint("scaling", 4, 8, 380.0, 3.8, 0.95, None, "16"),
)
CURVE = ScalingCurve("llama_mini", "pytorch", "X1", "fp32", "token", synthetic=False, points=POINTS)


def report(**changed: object) -> ClusterReport:
    same: dict[str, Any] = {"operation": "all_reduce", "time_us": 10.0, "algorithm_gb_s": 1.0, "repetitions": 3}
    sweep = [CollectiveTiming(size_bytes=size, bus_gb_s=rate, **same) for size, rate in ((2**10, 0.5), (2**32, 45.25))]
    ceilings = Ceilings(
        device_type="cpu", device_name="X1", world_size=32, framework="pytorch 2.13.0",
        measured_at="2026-01-01T00:00:00Z",
        collectives={"all_reduce": Rate(value=45.25, unit="GB/s", size="4096 MiB")}, sweep=tuple(sweep),
    )  # fmt: skip
    values: dict[str, object] = {
        "name": "rack <1>", "hosts": ("n1", "n2", "n3", "n4"), "nproc": 8, "vendor": "acme", "hardware": "X1",
        "case": "llama_mini:pytorch", "measured_at": "2026-01-01T00:00:00Z", "accelmark_version": "1",
        "collectives": ceilings,
        "checkpoints": CheckpointWrites(num_checkpoints=4, num_bytes=2**30, duration_s=0.5, mb_per_s=2147.48),
        "recovery": Recovery(rank=31, host="n4", noticed_s=1.5, restarted_s=2.25, trained_s=8.0, lost_steps=50),
    }  # fmt: skip
    return ClusterReport.model_validate(values | changed)


def test_every_part_that_was_measured_is_on_the_page() -> None:
    page = render_cluster(report(), CURVE)
    for text in (
        "rack &lt;1&gt;", "95.0\u202f%", "45.25\u202fGB/s", "1 KiB", "4 GiB", "2.147\u202fGB/s", "11.75\u202fs",
        "planned kill of rank 31, detected after 1.500\u202fs", "all-reduce",
    ):  # fmt: skip
        assert text in page, text
    assert "Not measured" not in page
    assert "not conclusive" not in page
    assert "busy machine" not in page


def headlines(page: str) -> list[str]:
    return re.findall(r'<dd class="number">([^<]*)</dd>', page)


@pytest.mark.parametrize(
    ("changed", "speedup", "doubt"),
    [
        ({"disturbed": {"scaling": ("n2: 99 % of the cores are busy",)}}, 3.8, "other work on the hosts"),
        ({"one_machine": ("n1", "n2")}, 3.8, "2 hosts are one machine"),
        ({}, 4.88, "above 100\u202f%"),
    ],
)
def test_an_efficiency_that_its_conditions_do_not_carry_is_no_headline(
    changed: dict[str, object], speedup: float, doubt: str
) -> None:
    last = POINTS[1]._replace(speedup=speedup, efficiency=speedup / 4)
    page = render_cluster(report(**changed), CURVE._replace(points=(POINTS[0], last)))
    assert headlines(page)[0] == "–"
    assert f"4×8 against 1×8, not conclusive: {doubt}" in page
    assert f"{speedup / 4 * 100:.3g}" in page, "its section has it"
    assert ("More than 100" in page) == (speedup > 4)


def test_each_part_has_the_other_work_that_ran_meanwhile() -> None:
    page = render_cluster(report(disturbed={"recovery": ("n4: 99 % of the cores are busy",)}), CURVE)
    scaling, collectives, checkpoints, recovery = page.split('<section class="case"')[1:]
    assert "n4: 99 % of the cores are busy" in recovery
    assert "busy machine" in recovery
    assert all("busy machine" not in part for part in (scaling, collectives, checkpoints))
    assert headlines(page)[0] == "95.0\u202f%"
    assert "detected after 1.500\u202fs; other work on the hosts" in page


def test_a_part_that_was_not_measured_has_its_reason_instead() -> None:
    reasons = {
        "scaling": "the cluster has one host",
        "collectives": "one rank needs no collectives",
        "checkpoints": "no checkpoint was written",
        "recovery": "rank 0 was not killed",
    }
    page = render_cluster(report(collectives=None, checkpoints=None, recovery=None, reasons=reasons), None)
    assert all(f"Not measured: {reason}." in page for reason in reasons.values())
    assert page.count('<dd class="number">–</dd>') == 4


@contextmanager
def serving(directory: Path, token: str | None = None) -> Iterator[int]:
    """Serve a directory; yield the port."""
    server = server_for(make_app(RunIndex(directory), "127.0.0.1", token))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class Asked:
    """One reply."""

    def __init__(self, port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        self.status, self.headers = reply.status, reply.headers
        self.text = reply.read().decode()
        connection.close()


TOKEN = "a-token-of-enough-letters-1234567890"  # noqa: S105 - made up for tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served") / "runs"
    root.mkdir()
    measured_run(root / "base", rounds=2)
    measured_run(root / "team" / "fast", rounds=2, step_ms=5.0)
    measured_run(root / "two", rounds=1, nproc=2)
    measured_run(root / "<i>bold", rounds=1, model="<b>x</b>")
    (root / "torn").mkdir()
    (root / "torn" / "summary.json").write_text("{")
    outside = measured_run(root.parent / "outside", rounds=1)
    (root / "link").symlink_to(outside)
    return root


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with serving(runs) as found:
        yield found


def test_the_list_shows_every_run_names_the_bad_one_and_is_filtered(port: int, runs: Path) -> None:
    page = Asked(port, "/")
    assert page.status == 200
    for name in ("/run/base", "/run/team/fast", "/run/two"):
        assert f'href="{name}"' in page.text
    assert "torn/summary.json: is not JSON" in page.text
    for text in (str(runs), "<i>bold", "<b>x</b>"):
        assert text not in page.text
    filtered = Asked(port, "/?scale=1x2").text
    assert ("/run/two" in filtered, "/run/base" in filtered) == (True, False)
    assert "No result matches the filter" in Asked(port, "/?q=nothing-is-called-so").text


def test_a_run_has_its_page_and_compares(port: int) -> None:
    page = Asked(port, "/run/team/fast")
    assert page.status == 200
    assert "Benchmark report" in page.text
    compared = Asked(port, "/compare?run=base&run=team/fast")
    assert compared.status == 200
    assert "effect better" in compared.text
    refused = Asked(port, "/compare?run=base&run=two")
    assert refused.status == 400
    assert "not comparable" in refused.text
    assert "even if not comparable" in refused.text
    assert "--" not in refused.text.partition("<main")[2]
    assert Asked(port, "/compare?run=base&run=two&across=1").status == 200
    assert "Not comparable; compared all the same" in Asked(port, "/compare?run=base&run=two&force=1").text
    assert Asked(port, "/compare?run=base").status == 400
    assert Asked(port, "/compare?run=base&run=gone").status == 404


def test_scaling_trend_and_the_table_for_programs(port: int) -> None:
    assert '<div class="chart">' in Asked(port, "/scaling").text
    trend = Asked(port, "/trend?figure=mfu")
    assert trend.status == 200
    assert "MFU" in trend.text
    told = json.loads(Asked(port, "/results.json").text)
    assert {row["path"] for row in told["results"]} == {"base", "team/fast", "two", "<i>bold"}


@pytest.mark.parametrize(
    "path",
    ["/run/../outside", "/run/%2e%2e/outside", "/run/link", "/run//etc/passwd", "/static/../page.html", "/run/",
     "/static/page.html", "/nothing", "/run/base/../../outside", "/run/torn"],
)  # fmt: skip
def test_files_outside_the_runs_are_not_served(port: int, path: str) -> None:
    assert Asked(port, path).status == 404


def test_nothing_can_be_changed_and_another_name_for_this_machine_is_refused(port: int) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert Asked(port, "/run/base", method).status in {405, 501}
    assert Asked(port, "/", Host="evil.example").status == 421
    assert Asked(port, "/", Host="localhost:8710").status == 200


def test_pages_allow_no_foreign_content(port: int) -> None:
    for path in ("/", "/scaling", "/compare?run=base&run=team/fast", "/run/base"):
        page = Asked(port, path)
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        own = re.sub(r"<script>.*?</script>", "", page.text, flags=re.DOTALL)
        assert re.findall(r"""(?:src|href)=["']https?:""", own) == []
    assert "unsafe-inline" not in Asked(port, "/").headers["Content-Security-Policy"]


def test_a_token_is_asked_for_and_never_shown(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(runs, TOKEN) as guarded:
        for path in ("/", "/run/base", "/results.json", "/live", "/metrics"):
            asked = Asked(guarded, path)
            assert asked.status == 401
            assert "base" not in re.sub(r"<[^>]*>", "", asked.text)
        assert Asked(guarded, "/", Authorization=f"Bearer {TOKEN}").status == 200
        assert Asked(guarded, "/", Authorization=f"Bearer {TOKEN}x").status == 401
        assert Asked(guarded, "/", Authorization="Bearer é").status == 401
        assert Asked(guarded, f"/?token={TOKEN}").status == 401
        wrong = Asked(guarded, "/sign-in", "POST", "token=wrong")
        assert wrong.status == 403
        right = Asked(guarded, "/sign-in", "POST", f"token={TOKEN}")
        assert right.status == 303
        cookie = right.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert Asked(guarded, "/", Cookie=cookie.partition(";")[0]).status == 200
        assert Asked(guarded, "/sign-in", "POST", "x" * 5000).status == 413
    assert TOKEN not in "".join(capfd.readouterr())


def test_beyond_this_machine_a_token_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--token-file"):
        CliRunner().invoke(app, ["view", str(tmp_path), "--host", "0.0.0.0"], catch_exceptions=False)  # noqa: S104
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_the_tokens_file_is_made_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_or_create_token(file)
    assert len(token) >= 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_or_create_token(file) == token
    file.chmod(0o644)
    with pytest.raises(RequestError, match="other users can read"):
        read_or_create_token(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(RequestError, match="20 to 256"):
        read_or_create_token(file)


def running(root: Path) -> Path:
    """A run in progress, as its coordinator and rank 0 would have left it by now: GENERATED."""
    run = root / "running"
    run.mkdir(parents=True)
    plan = make_plan(("steps=5",))
    (run / "plan.json").write_text(plan.model_dump_json())
    job = plan.jobs[0]
    events = [{"at": "2026-11-21T10:00:00.000Z", "kind": "state", "job": job.directory, "state": "running"}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    place = run / job.directory / "localhost_noderank0"
    place.mkdir(parents=True)
    window = {
        "global_steps": 5, "num_trained_samples": 40, "wall_ms": 1000.0, "loss": 1.25, "epoch": 0, "losses": [1.25],
        "learning_rate": None, "step_ms": [200.0], "data_wait_ms": [0.0],
    }  # fmt: skip
    (place / "rank0.out.log").write_text(perflog("TRAIN_START", {}, 0, 0) + perflog("STEP_END", window, 1, 0))
    sample = {"t": 1.0, "wall": time.time(), "host": {"cpu": 0.5}, "devices": [{"index": 0, "power_w": 250.0}]}
    (place / "telemetry.jsonl").write_text(json.dumps({"header": {}}) + "\n" + json.dumps(sample) + "\n")
    return run


def test_a_run_in_progress_shows_its_progress(tmp_path: Path) -> None:
    running(tmp_path / "runs")
    with serving(tmp_path / "runs") as found:
        page = Asked(found, "/live")
        assert "loss <b>1.250</b>" in page.text
        assert "step <b>5" in page.text
        assert "running" in page.text
        assert "the report appears here" in Asked(found, "/run/running").text.lower()
        metrics = Asked(found, "/metrics").text
    assert 'accelmark_device_power_watts{case="toy0-pytorch-X1x1x1",device="0",node=' in metrics
    assert metrics.count("# TYPE accelmark_host_cpu_ratio gauge") == 1


def test_bundles_and_searches_are_listed_shown_and_compared(tmp_path: Path) -> None:
    measured_run(tmp_path / "runs" / "run", rounds=2)
    other = measured_run(tmp_path / "elsewhere", rounds=2, windows=4)
    write_bundle(other, tmp_path / "runs" / f"packed{SUFFIX}")
    write_bundle(tmp_path / "runs" / "run", tmp_path / "runs" / f"copy{SUFFIX}")
    shutil.copytree(RECORDED, tmp_path / "runs" / "search")
    with serving(tmp_path / "runs") as found:
        text = Asked(found, "/").text
        assert f'href="/run/packed{SUFFIX}"' in text
        assert f'href="/run/copy{SUFFIX}"' not in text
        assert "automl-fashion-mnist:pytorch" in text
        assert "Benchmark report" in Asked(found, f"/run/packed{SUFFIX}").text
        assert Asked(found, f"/compare?run=run&run=packed{SUFFIX}").status == 200


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_the_server_after_its_open_responses(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", "view", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        port = int(address.rpartition(":")[2].strip("/"))
        assert Asked(port, "/").status == 200
        server.send_signal(number)
        _, errors = server.communicate(timeout=300)
    assert server.returncode == code
    assert errors == ""
