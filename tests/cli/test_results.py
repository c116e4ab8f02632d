from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from accelmark.cli.finished.results import compare, figures_table, results, show_rows
from accelmark.cli.help import Verb
from accelmark.report.comparison import lines_of
from accelmark.report.printable import printable
from accelmark.report.tables import BEGIN, END
from accelmark.results import comparison as comparing
from accelmark.results.sources import open_sources
from accelmark.results.store.bundle import SUFFIX, write_bundle
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.results.table import matching, rows_of
from accelmark.spec.errors import RequestError
from accelmark.spec.number_format import THIN
from tests.results.compared_runs import made

app = typer.Typer()
app.command("compare", cls=Verb)(compare)
app.command("results")(results)
runner = CliRunner()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    made(root / "base", rounds=2)
    made(root / "fast", rounds=2, step_ms=5.0)
    made(root / "two", rounds=1, nproc=2)
    made(root / "old", rounds=1)
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


def test_a_filter_that_nothing_matches_names_the_values_that_there_are(runs: Path) -> None:
    done = runner.invoke(app, ["results", str(runs), "--where", "scale=9x9"], catch_exceptions=False)
    assert done.stdout == "no results\n"
    assert "no result matches --where; there are scale=1x1" in done.stderr


def test_a_run_in_the_directory_runs_is_found_by_its_name(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    assert "base" in ask("results", "base")


def with_case(run: LoadedRun, name: str, **changes: object) -> LoadedRun:
    """A run whose case is otherwise: GENERATED."""
    case = run.summary.cases[0].model_copy(update=changes)
    return replace(run, path=Path(name), summary=run.summary.model_copy(update={"run": name, "cases": (case,)}))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["marks=open"], ["both", "open"]),
        (["marks=open,busy_machine"], ["both", "busy", "open"]),
        (["marks=open", "marks=BUSY_MACHINE"], ["both"]),
        (["marks="], ["none"]),
        (["variant=small, two branches fp32"], ["none"]),
        (["variant=small, two branches fp32", "marks=open"], []),
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


def test_a_duplicate_column_is_refused(runs: Path) -> None:
    with pytest.raises(RequestError, match="write chip=A,B to match either"):
        ask("results", runs, "--where", "chip=CPU", "--where", "hardware=H100")


def test_sql_queries_are_answered(runs: Path) -> None:
    told = ask("results", runs, "--json", "--sql", "SELECT scale, count(*) AS n FROM results GROUP BY 1 ORDER BY 1")
    assert json.loads(told.splitlines()[-1])["results"] == [{"scale": "1x1", "n": 2}, {"scale": "1x2", "n": 1}]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC 1", "invalid SQL"),
        ("SELECT nothing FROM results", "the query failed"),
        ("SELECT * FROM runs", "runs does not exist.*'results'"),
        ("DROP TABLE results", "read-only"),
        ("INSERT INTO results SELECT * FROM results", "read-only"),
        ("WITH x AS (SELECT 1) DELETE FROM results", "read-only|invalid"),
        ("COPY results TO '{file}'", "read-only"),
        ("ATTACH '{file}'", "read-only"),
        ("SET enable_external_access = true", "read-only"),
        ("SELECT 1; DROP TABLE results", "single SELECT"),
        ("", "single SELECT"),
        ("SELECT * FROM read_text('{file}')", "the query failed"),
        ("SELECT * FROM '{file}'", "the query failed"),
    ],
)
def test_sql_that_is_wrong_writes_or_reaches_for_files_is_refused(
    runs: Path, tmp_path: Path, sql: str, said: str
) -> None:
    file = tmp_path / "file.csv"
    file.write_text("a\n1\n")
    with pytest.raises(RequestError, match=said):
        ask("results", runs, "--sql", sql.format(file=file))
    assert file.read_text() == "a\n1\n"


def test_an_answer_as_json_keeps_every_column_and_holds_only_numbers(runs: Path) -> None:
    sql = (
        "SELECT 1 AS a, 2 AS a, 3 AS a_2, 4 AS a, 'nan'::DOUBLE AS b, ['inf'::DOUBLE, 1.5] AS c, {'x': 'nan'::FLOAT} d"
    )
    told = ask("results", runs, "--json", "--sql", sql)
    [row] = json.loads(told.splitlines()[-1])["results"]
    assert row == {"a": 1, "a_3": 2, "a_2": 3, "a_4": 4, "b": None, "c": [None, 1.5], "d": {"x": None}}


def test_sql_that_takes_too_much_memory_is_reported_and_leaves_no_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelmark.results.table._MEMORY_LIMIT", "16MB")
    with pytest.raises(RequestError, match="needs more than 16MB of memory"):
        ask("results", runs, "--sql", "SELECT md5(i::VARCHAR) AS x FROM range(3000000) AS r(i) ORDER BY x")
    assert list(tmp_path.iterdir()) == []


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


def test_a_readme_is_written_with_what_is_wanted_and_no_html(runs: Path, tmp_path: Path) -> None:
    for name in ("base", "two"):
        shutil.copytree(runs / name, tmp_path / "runs" / name)
    summary = tmp_path / "runs" / "two" / "summary.json"
    summary.write_text(summary.read_text().replace('"hardware": "X1"', '"hardware": "<script>alert(1)</script>"'))
    readme = tmp_path / "toy" / "README.md"
    readme.parent.mkdir()
    readme.write_text(f"{BEGIN}\n{END}\n")
    ask("results", tmp_path / "runs", "--readme", readme, "--where", "scale=1x1")
    assert readme.read_text().count("| 2026-11-21 |") == 1
    ask("results", tmp_path / "runs", "--readme", readme)
    text = readme.read_text()
    assert text.count("| 2026-11-21 |") == 2
    assert "&lt;script>" in text
    assert "<script" not in text
    with pytest.raises(RequestError, match="no run of toy"):
        ask("results", tmp_path / "runs", "--readme", readme, "--where", "scale=4x4")
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--json", "--format", "csv"], "--format has no effect together with --json"),
        (["--json", "--group-by", "chip"], "--group-by has no effect together with --json"),
        (["--format", "csv", "--group-by", "chip"], "--group-by has no effect together with this --format"),
        (["--sql", "SELECT 1", "--group-by", "chip"], "--group-by has no effect together with --sql"),
        (["--readme", "README.md", "--json"], "--json has no effect together with --readme"),
        (["--readme", "README.md", "--sql", "SELECT 1"], "--sql has no effect together with --readme"),
        (["--group-by", "colour", "--where", "run=nothing"], "unknown column 'colour'"),
    ],
)
def test_flags_without_effect_are_refused(runs: Path, flags: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ask("results", runs, *flags)


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


def test_compare_prints_json_with_refusals_marked(runs: Path) -> None:
    with pytest.raises(RequestError, match="--across-scales"):
        ask("compare", runs / "base", runs / "two")
    told = json.loads(ask("compare", runs / "base", runs / "two", "--force", "--json"))
    assert told["pairs"][0]["not_comparable"] == ["1 host × 2 devices, baseline 1 host × 1 device"]


def test_a_comparison_fits_into_80_columns_without_truncation(runs: Path) -> None:
    opened, _ = open_sources([runs / "base", runs / "fast"])
    [pair] = comparing.compare(opened).pairs
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(figures_table(pair, narrow=True))
    text = console.export_text()
    assert "…" not in text
    words = {word for line in lines_of(pair) for word in line.title.split()}
    assert words <= set(text.split()), "no word of a figure's name is cut"
    assert re.search(r"tokens/s +\+[\d.,]+ \(\+[\d.,]+ to \+[\d.,]+\)\s% +better", text)


def test_on_a_narrow_terminal_an_interval_has_its_bounds_in_few_digits(runs: Path) -> None:
    [pair] = comparing.compare(open_sources([runs / "base", runs / "fast"])[0]).pairs
    wide = {"relative_interval": (-0.5, 30.0)}
    found = tuple(each.model_copy(update=wide) for each in pair.differences if each.relative_interval)
    bounds = {line.short.partition(" ")[2] for line in lines_of(pair.model_copy(update={"differences": found}))}
    assert bounds == {f"(\u221250 to >+1,000){THIN}%"}


def test_rows_too_wide_for_a_terminal_take_two_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(open_sources([runs / "base"])[0])
    show_rows(rows, [], console=Console(width=80, highlight=False))
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("base  toy:pytorch  X1  1x1")
    assert f"rounds:{THIN}2" in first
    assert "Throughput" in second


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
