"""Acceptance of a vendor's case from its runs at several scales."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.audit.acceptance import MIN_REPEATS_S, judge, newest_cases, rounds_lacking, support
from accelmark.cli.main import app
from accelmark.results.figures import FigureName
from accelmark.results.schema import Finding
from accelmark.results.sources import open_sources
from tests.made_run import loaded, measured_run


@pytest.mark.usefixtures("plugins")
def test_each_scale_is_judged_and_the_readme_gets_both_tables(tmp_path: Path) -> None:
    measured_run(tmp_path / "runs" / "one", rounds=1, jitter=0.0)
    measured_run(tmp_path / "runs" / "two", rounds=1, jitter=0.0, nproc=2, step_ms=11.5)
    readme = tmp_path / "README.md"
    readme.write_text("# Toy\n")
    options = ["--scales", "1x1,1x2,2x2", "--efficiency", "0.9", "--readme", str(readme), "--json"]
    for _ in range(2):
        done = CliRunner().invoke(app, ["accept", "nvidia", "toy", "--runs", str(tmp_path / "runs"), *options])
    assert done.exit_code == 1, done.output
    passed = {(row["scale"], row["rule"]): row["passed"] for row in json.loads(done.stdout)}
    assert passed["1x1", "target"] is True
    assert passed["1x1", "telemetry"] is True
    assert passed["1x1", "repeats"] is False, "the made rounds are short"
    assert ("1x1", "speed-up") not in passed
    assert passed["1x2", "speed-up"] is False, "80 % of ideal"
    assert passed["2x2", "run"] is False
    text = readme.read_text()
    assert text.startswith("# Toy\n")
    runs, _ = open_sources([tmp_path / "runs"])
    states = {(row.case, row.framework, row.vendor): row.state for row in support(runs)}
    assert states["toy", "pytorch", "nvidia"] == "ran"
    assert states["resnet_mini", "pytorch", "nvidia"] == "described"
    assert states["resnet_mini", "pytorch", "zixiao"] == "not possible"
    assert [text.count(each) for each in ("<!-- acceptance toy:pytorch -->", "| 1x2 | speed-up", "加速比")] == [1, 1, 1]
    assert "| Case | Machine | Software | " in text, "the figures of the runs"
    assert f"| 1x1 | 重复 | 至少 {MIN_REPEATS_S / 60:.0f}" in text


@pytest.mark.usefixtures("plugins")
def test_only_unreviewed_peaks_do_not_fail_the_adaptation(tmp_path: Path) -> None:
    case = newest_cases([loaded(tmp_path / "one", rounds=1)], "nvidia", "toy", "pytorch")[1, 1]
    unreviewed = Finding(rule="chip-mismatch", severity="open", expected="", actual="")
    unlocked = unreviewed.model_copy(update={"rule": "fixed-setting"})
    for findings, passed in (([unreviewed], True), ([unreviewed, unlocked], False)):
        changed = case._replace(result=case.result.model_copy(update={"verdict": "OPEN", "findings": findings}))
        judged = judge({(1, 1): changed}, [(1, 1)], None)
        assert next(row.passed for row in judged if row.rule == "adaptation") is passed


def test_rounds_are_added_until_a_scale_lasts_ten_minutes(tmp_path: Path) -> None:
    short = newest_cases([loaded(tmp_path / "one", rounds=1, jitter=0.0)], "nvidia", "toy", "pytorch")[1, 1]
    each_s = short.succeeded[0].value_of(FigureName.RAW_TRAIN_TIME)
    assert each_s is not None
    assert rounds_lacking(None) == 1
    assert rounds_lacking(short) == math.ceil(1.1 * MIN_REPEATS_S / each_s)
    long = short._replace(result=short.result.model_copy(update={"rounds": short.result.rounds * 100000}))
    assert rounds_lacking(long) == 0


def test_a_dry_run_shows_the_rounds_that_lack_and_starts_nothing(tmp_path: Path) -> None:
    options = ["--scales", "1x1,1x2", "--run", "--dry-run", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, ["accept", "cpu", "resnet_mini", *options])
    assert done.exit_code == 0, done.output
    assert "resnet_mini-pytorch-CPUx1x1" in done.output
    assert "resnet_mini-pytorch-CPUx1x2" in done.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("plugins")
def test_a_case_without_a_run_is_refused_with_the_option_that_trains_it(tmp_path: Path) -> None:
    options = ["--scales", "1x1", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, ["accept", "nvidia", "toy", *options])
    assert str(done.exception).endswith("has no training of toy on nvidia: add --run, with --scales 1x1,1x8")
