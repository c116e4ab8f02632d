"""The pages and tables of runs, of serving runs made from a simulated queue, and of clusters."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from accelmark.explain.entries import all_terms
from accelmark.report.charts import embed_json
from accelmark.report.cluster_page import render_cluster
from accelmark.report.comparison import render_comparison
from accelmark.report.run_page import interval_text, ranking, render_page, write_page
from accelmark.report.tables import results_table, shown_table
from accelmark.results.cluster import CheckpointWrites, ClusterReport, Recovery, ScalePoint, ScalingCurve
from accelmark.results.comparison import compare
from accelmark.results.figures import FigureName
from accelmark.results.schema import Finding, Spread
from accelmark.results.store.bundle import check_manifest
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.table import rows_of
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import RequestError
from accelmark.spec.log.inference import ServeFinished
from accelmark.spec.log.records import Ceilings, CollectiveTiming, Rate
from accelmark.spec.rules import RunRules
from tests.made_run import Made, end_round, loaded, make_run
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
