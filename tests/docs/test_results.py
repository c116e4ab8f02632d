"""The pages of ``results/`` are what docs/results.py writes from their records."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from accelmark.results.figures import FigureName as F
from accelmark.results.sources import open_sources

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_pages", ROOT / "docs/results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_follows_from_its_record_and_notes(written: ModuleType) -> None:
    pages = written.pages()
    assert {path.name for path in pages} == {path.name for path in (ROOT / "results").glob("*.md")}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/results.py"


def test_a_result_on_synthetic_data_is_marked_and_never_valid(written: ModuleType) -> None:
    records = written.records().values()
    assert any("synthetic" in record["marks"] for record in records)
    assert [
        record["title"] for record in records if "synthetic" in record["marks"] and record["verdict"] == "VALID"
    ] == []


def test_the_rate_of_the_median_step_agrees_with_the_achieved_flops(written: ModuleType) -> None:
    """Mean rate x FLOPs of a unit is the recorded rate of operations; the median step uses the same units and FLOPs."""
    for record in written.records().values():
        figures = record["figures"]
        per_unit = written.median_step_mfu(record) * record["chip"]["peaks"][record["precision"]] * 1e12
        per_unit /= written.median_step_rate(record)
        recorded = figures["achieved_tflops_per_device"]["value"] * 1e12 / figures["throughput_per_device"]["value"]
        assert per_unit == pytest.approx(recorded, rel=0.05), record["title"]


def test_accelmark_results_lists_them(written: ModuleType) -> None:
    runs, problems = open_sources([ROOT / "results"])
    assert problems == []
    records = written.records()
    assert {run.summary.run: run.summary.cases[0].verdict for run in runs} == {
        name: record["verdict"] for name, record in records.items()
    }
    for run in runs:
        rate = records[run.summary.run]["figures"]["throughput_steady"]["value"]
        assert run.summary.cases[0].mean_of(F.THROUGHPUT_STEADY) == rate
