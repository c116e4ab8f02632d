"""Generated pages and tables are current: results, cases, and the coverage of models and frameworks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from accelmark.compat.flagperf.parse import coverage
from accelmark.results.figures import FigureName as F
from accelmark.results.sources import open_sources
from accelmark.spec.plugins.catalog import folders, load_case

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """Import a script of ``docs/``, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written() -> ModuleType:
    return script("results")


@pytest.fixture(scope="module")
def page_written() -> ModuleType:
    return script("cases")


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


def test_the_page_of_cases_follows_from_their_folders(page_written: ModuleType) -> None:
    text = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    assert text == page_written.page(), "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    assert len(shipped) > 50
    assert [name for name in shipped if text.count(f"[{name}](../src/accelmark/cases/{name}/README.md)") != 1] == []


def test_readme_names_every_case_once_by_family_and_size(page_written: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = page_written.MARKED.search(text)
    assert found is not None
    assert found[0] == f"{found[1]}{page_written.families()}{found[2]}", "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    listed = [name.strip() for name in re.split(r"[,;:\n]", found[0])]
    assert [name for name in shipped if listed.count(name) != 1] == []


def test_every_model_of_flagperf_is_carried_by_a_case_or_has_a_reason() -> None:
    assert Counter(row.task for row in coverage()) == {"train": 48, "infer": 11}
    assert len({(row.task, row.model) for row in coverage()}) == 59
    for row in coverage():
        if row.case is None:
            assert row.note, row
        else:
            assert getattr(load_case(row.case), row.task) is not None, row


def test_every_case_is_measured_runs_or_is_not_possible_on_every_vendor() -> None:
    rows = {(row.case, row.task, row.framework): row.vendors for row in script("support").case_support()}
    assert rows["resnet_mini", "train", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["efficientnet_lite0", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "train", "jax"]["nvidia"] == "runs"
    assert rows["resnet_mini", "train", "jax"]["ascend"] == "not possible"
    assert rows["detr", "train", "pytorch"]["cpu"] == "runs"
    assert all(vendors["zixiao"] == "not possible" for vendors in rows.values()), "it declares cannot_run"
    assert ("detr", "train", "jax") not in rows
