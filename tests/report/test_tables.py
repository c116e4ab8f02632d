from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.report.tables import results_table
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.run.record.directory import measure_run
from tests.made_run import Made, make_run


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    path = make_run(tmp_path / "run", Made(rounds=2, is_open=True))
    measure_run(path)
    return load_run(path)


def test_the_table_has_one_row_per_case_with_verdict_and_marks(run: LoadedRun) -> None:
    head, rule, row = results_table([run]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "12,800" in row
    assert "OPEN (open)" in row
    assert "2026-11-21" in row


def test_foreign_models_are_left_out(run: LoadedRun) -> None:
    assert results_table([run], "other") == ""
