from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.report.tables import BEGIN, END
from accelmark.results.sources import open_sources
from accelmark.results.store.bundle import SUFFIX, write_bundle, write_manifest
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.results.table import matching, rows_of
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import RequestError
from accelmark.spec.number_format import printable
from tests.made_run import Made, make_run, measured_run

runner = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    measured_run(root / "base", rounds=2)
    measured_run(root / "fast", rounds=2, step_ms=5.0)
    measured_run(root / "two", rounds=1, nproc=2)
    measured_run(root / "old", rounds=1)
    summary = root / "old" / "summary.json"
    summary.write_text(summary.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    (root / "torn").mkdir()
    (root / "torn" / "summary.json").write_text('{"schema')
    return root


def ask(*arguments: object) -> str:
    return runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stdout


def test_bad_runs_are_named_and_the_others_are_shown(runs: Path) -> None:
    told = json.loads(ask("results", runs, "--json").splitlines()[-1])
    assert {row["run"] for row in told["results"]} == {"base", "fast", "two"}
    assert len(told["problems"]) == 2
    assert any("old/summary.json: has schema version 99" in problem for problem in told["problems"])
    assert any("torn/summary.json: is not JSON" in problem for problem in told["problems"])


def test_rows_are_filtered_and_grouped(runs: Path) -> None:
    text = ask("results", runs, "--where", "scale=1X1", "--group-by", "chip,scale")
    assert "chip X1, scale 1x1" in text
    assert "two" not in text
    with pytest.raises(RequestError, match="did you mean 'scale'"):
        ask("results", runs, "--where", "scal=1x1")
    with pytest.raises(RequestError, match="COLUMN=VALUE"):
        ask("results", runs, "--where", "scale")


def with_case(run: LoadedRun, name: str, **changes: object) -> LoadedRun:
    """A run whose case is otherwise: GENERATED."""
    case = run.summary.cases[0].model_copy(update=changes)
    return replace(run, path=Path(name), summary=run.summary.model_copy(update={"run": name, "cases": (case,)}))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["marks=open,busy_machine"], ["both", "busy", "open"]),
        (["marks=open", "marks=BUSY_MACHINE"], ["both"]),
        (["marks="], ["none"]),
        (["variant=small, two branches fp32"], ["none"]),
    ],
)
def test_marks_are_found_one_by_one_and_texts_with_commas_whole(
    runs: Path, wanted: list[str], found: list[str]
) -> None:
    [run], _ = open_sources([runs / "base"])
    many = [
        with_case(run, "none", variant="small, two branches fp32"),
        with_case(run, "open", marks=("open",)),
        with_case(run, "busy", marks=("busy_machine",)),
        with_case(run, "both", marks=("open", "busy_machine")),
    ]
    pairs = [(name, value) for name, _, value in (text.partition("=") for text in wanted)]
    assert sorted(row["run"] for row in rows_of(matching(many, pairs)) if isinstance(row["run"], str)) == found


def test_sql_queries_are_answered(runs: Path) -> None:
    told = ask("results", runs, "--json", "--sql", "SELECT scale, count(*) AS n FROM results GROUP BY 1 ORDER BY 1")
    assert json.loads(told.splitlines()[-1])["results"] == [{"scale": "1x1", "n": 2}, {"scale": "1x2", "n": 1}]


WRONG_SQL = [
    ("SELEC 1", "invalid SQL"), ("SELECT nothing FROM results", "the query failed"),
    ("SELECT * FROM runs", "runs does not exist.*'results'"), ("DROP TABLE results", "read-only"),
    ("WITH x AS (SELECT 1) DELETE FROM results", "read-only|invalid"), ("COPY results TO '{file}'", "read-only"),
    ("ATTACH '{file}'", "read-only"), ("SET enable_external_access = true", "read-only"),
    ("SELECT 1; DROP TABLE results", "single SELECT"), ("", "single SELECT"),
    ("SELECT * FROM read_text('{file}')", "the query failed"), ("SELECT * FROM '{file}'", "the query failed"),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "said"), WRONG_SQL)
def test_sql_that_is_wrong_writes_or_reaches_for_files_is_refused(
    runs: Path, tmp_path: Path, sql: str, said: str
) -> None:
    file = tmp_path / "file.csv"
    file.write_text("a\n1\n")
    with pytest.raises(RequestError, match=said):
        ask("results", runs, "--sql", sql.format(file=file))
    assert file.read_text() == "a\n1\n"


def test_csv_holds_every_column_and_no_formula(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    ask("results", runs, "--format", "csv", "-o", out)
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["run"] for row in rows] == ["base", "fast", "two"]
    assert float(rows[1]["throughput_train"]) > float(rows[0]["throughput_train"])
    assert rows[2]["throughput_train_half95"] == ""
    formula = ask("results", runs, "--format", "csv", "--sql", "SELECT '=1+1' AS x")
    assert "'=1+1" in formula


def test_parquet_reads_back(runs: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    out = tmp_path / "table.parquet"
    ask("results", runs, "--format", "parquet", "-o", out)
    assert duckdb.read_parquet(str(out)).aggregate("count(*), max(ranks)").fetchall() == [(3, 2)]
    with pytest.raises(RequestError, match="--output"):
        ask("results", runs, "--format", "parquet")


def test_markdown_escapes_and_shows_intervals(runs: Path) -> None:
    text = ask("results", runs, "--format", "markdown")
    assert "| base | toy:pytorch | X1 | 1x1 | VALID | 2 |" in text
    assert "tokens/s ± " in text


def test_the_readme_of_a_case_is_written_between_its_markers(runs: Path, tmp_path: Path) -> None:
    readme = tmp_path / "toy" / "README.md"
    readme.parent.mkdir()
    readme.write_text(f"# Toy\n\n{BEGIN}\nold\n{END}\nafter\n")
    ask("results", runs, "--readme", readme)
    text = readme.read_text()
    assert text.count("| 2026-11-21 |") == 3
    assert "Written by `accelmark results --readme`" in text
    assert "old\n" not in text
    assert text.endswith("after\n")
    other = tmp_path / "other" / "README.md"
    other.parent.mkdir()
    other.write_text(text)
    with pytest.raises(RequestError, match="no run of other"):
        ask("results", runs, "--readme", other)


def test_compare_prints_a_table_and_writes_a_page_that_stands_alone(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = ask("compare", runs / "base", runs / "fast", "-o", page)
    assert "better" in text
    assert "settings: " not in text
    html = page.read_text()
    assert "default-src 'none'" in html
    assert 'src="' not in html
    assert 'href="/' not in html


def test_a_bundle_is_compared_like_its_run(runs: Path, tmp_path: Path) -> None:
    bundle = tmp_path / f"fast{SUFFIX}"
    write_bundle(runs / "fast", bundle)
    told = json.loads(ask("compare", runs / "fast", bundle, "--json"))
    assert told["pairs"][0]["differing"] == []
    assert {found["difference"] for found in told["pairs"][0]["differences"]} == {0.0}
    assert "Both are the same run." in ask("compare", runs / "fast", bundle)
    assert "the same run" not in ask("compare", runs / "fast", runs / "base")
    with pytest.raises(RequestError, match=re.escape(f"'accelmark view {tmp_path}'")):
        ask("report", bundle)


def test_compare_prints_json_with_refusals_marked(runs: Path) -> None:
    with pytest.raises(RequestError, match="--across-scales"):
        ask("compare", runs / "base", runs / "two")
    told = json.loads(ask("compare", runs / "base", runs / "two", "--force", "--json"))
    assert told["pairs"][0]["not_comparable"] == ["1 host × 2 devices, baseline 1 host × 1 device"]


def test_terminal_control_sequences_in_names_are_escaped(runs: Path, tmp_path: Path) -> None:
    for name in ("base", "fast"):
        shutil.copytree(runs / name, tmp_path / name)
        for file in tmp_path.glob(f"{name}/**/*.json"):
            for word in ("run", "model", "framework_version", "name"):
                odd = rf'"{word}": "\\u001b[31m\\u202e[red]'
                file.write_text(re.sub(rf'"{word}": ?"', odd, file.read_text()))
    for arguments in (
        ["results", tmp_path],
        ["results", tmp_path, "--format", "markdown"],
        ["results", tmp_path, "--group-by", "run"],
        ["results", tmp_path, "--sql", 'SELECT run AS "\x1b[31m" FROM results'],
        ["compare", tmp_path / "base", tmp_path / "fast"],
    ):
        text = ask(*arguments)
        assert "\\x1b[31m" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    with pytest.raises(RequestError, match="no case in common") as caught:
        ask("compare", tmp_path / "base", runs / "fast")
    assert "\x1b" in str(caught.value)
    assert "\x1b" not in printable(str(caught.value))


def test_a_killed_run_is_summarised_and_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = runner.invoke(app, ["report", str(run)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.strip() == str(run / "report.html")
    assert (run / "summary.json").is_file()


def test_recompute_reads_the_events_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(rounds=2))
    measure_run(run)
    result = run / "toy-pytorch-X1x1x1" / "round1" / "result.json"
    before = result.read_text()
    result.write_text(before.replace("12800.0", "99999.0"))  # as by other definitions of the figures
    write_manifest(run)
    runner.invoke(app, ["report", str(run), "--recompute"], catch_exceptions=False)
    assert result.read_text() == before
