"""Runs from wherever people point, what is wrong with them, and files that are whole or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from accelmark.results.comparison import compare
from accelmark.results.figures import FigureName as F
from accelmark.results.sources import load_source, open_sources
from accelmark.results.store.bundle import SUFFIX, write_bundle
from accelmark.results.store.files import write_atomic
from accelmark.results.table import rows_of
from accelmark.spec.errors import RequestError
from tests.made_run import measured_run

RECORDED = Path(__file__).parent / "recorded" / "search"
"""Recorded from `accelmark automl run` on two cores of an AMD EPYC, 2026-11-21: three trials on 3,000 pictures."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    measured_run(root / "run", rounds=2)
    write_bundle(root / "run", root / f"packed{SUFFIX}")
    write_bundle(root / "run", root / "renamed.tar")
    return root


def test_copies_of_a_run_below_a_directory_are_one_run(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places, tmp_path / "runs")
    export = tmp_path / "runs" / "mlruns" / "0" / "abc" / "artifacts"
    export.mkdir(parents=True)
    for name in ("summary.json", "plan.json"):  # what an export to MLflow logs
        shutil.copy(places / "run" / name, export)
    runs, problems = open_sources([tmp_path])
    assert problems == []
    assert [Path(str(row["path"])).name for row in rows_of(runs)] == ["run"]
    shutil.rmtree(tmp_path / "runs" / "run")
    runs, problems = open_sources([tmp_path])
    assert ([run.path.suffix for run in runs], problems) == ([".tar"], [])


def test_a_run_of_the_same_name_with_other_results_is_no_copy(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "run", tmp_path / "run")
    other = shutil.copytree(places / "run", tmp_path / "other") / "summary.json"
    changed = json.loads(other.read_text())
    changed["cases"][0]["figures"]["throughput_train"]["mean"] *= 2
    other.write_text(json.dumps(changed))
    assert [run.path.name for run in open_sources([tmp_path])[0]] == ["other", "run"]
    assert len(open_sources([places / "run", places / f"packed{SUFFIX}"])[0]) == 2, "named paths are kept"


def test_a_result_with_facts_of_an_odd_type_is_named(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "run", tmp_path / "run")
    first, _ = sorted(tmp_path.glob("run/*/round*/result.json"))
    result = json.loads(first.read_text())
    result["environment"]["started"]["hooks"] = "none"
    first.write_text(json.dumps(result))
    runs, problems = open_sources([tmp_path])
    assert [len(run.rounds) for run in runs] == [1]
    assert any(problem.startswith(f"{first}: ") for problem in problems)


def test_an_edited_bundle_is_named_and_the_others_show(places: Path, tmp_path: Path) -> None:
    for name in ("run", f"packed{SUFFIX}"):
        source = places / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    raw = (places / "renamed.tar").read_bytes()
    at = raw.index(b'"throughput_train":{"value":') + 28
    digit = b"1" if raw[at : at + 1] != b"1" else b"2"
    (tmp_path / f"edited{SUFFIX}").write_bytes(raw[:at] + digit + raw[at + 1 :])
    (tmp_path / f"torn{SUFFIX}").write_bytes(raw[: len(raw) // 3])
    (tmp_path / f"noise{SUFFIX}").write_bytes(b"no tar at all")
    (tmp_path / "unrelated.tar").write_bytes(b"somebody else's")
    runs, problems = open_sources([tmp_path])
    assert [run.path.name for run in runs] == ["run"]
    for name in ("edited", "torn", "noise"):
        assert sum(f"{name}{SUFFIX}" in problem for problem in problems) == 1
    assert any("was edited" in problem for problem in problems)


def test_a_search_is_a_row_with_its_own_figures() -> None:
    run = load_source(RECORDED)
    [row] = rows_of([run])
    report = json.loads((RECORDED / "report.json").read_text())
    assert (row["task"], row["case"], row["chip"]) == ("automl", "automl-fashion-mnist:pytorch", "CPU")
    assert row["search_score"] == report["final"]["score"]
    assert row["search_held_out_error"] == report["final"]["error"]
    assert row["energy_j"] is None
    reason = run.rounds["search"].figures[F.ENERGY].reason
    assert reason is not None
    assert "powercap" in reason


def search(place: Path, *, report: dict[str, object] | None = None, config: dict[str, object] | None = None) -> Path:
    """Copy the recorded search with some entries changed."""
    shutil.copytree(RECORDED, place)
    for name, changes in (("report.json", report), ("automl.json", config)):
        file = place / name
        file.write_text(json.dumps(json.loads(file.read_text()) | (changes or {})))
    return place


@pytest.mark.parametrize(
    ("report", "config"), [({"counting": "aiperf-v1"}, {}), ({}, {"network": "resnet50"}), ({}, {"dataset": {}})]
)
def test_searches_of_other_rules_networks_or_data_are_not_comparable(
    tmp_path: Path, report: dict[str, object], config: dict[str, object]
) -> None:
    runs, _ = open_sources([RECORDED, search(tmp_path / "other", report=report, config=config | {"seed": 7})])
    with pytest.raises(RequestError, match="not comparable"):
        compare(runs)
    [pair] = compare(runs, force=True).pairs
    assert pair.not_comparable
    assert {found.figure for found in pair.differences} >= {F.SEARCH_SCORE, F.SEARCH_REGULATED_SCORE, F.SEARCH_TIME}
    assert ("settings", "seed") in {(fact.area, fact.name) for fact in pair.differing}


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_atomic(tmp_path / "private", "x", private=True)
    write_atomic(tmp_path / "open", "x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o004
