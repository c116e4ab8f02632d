"""Runs made by an earlier version verify, report and compare as when they were made (earlier_version/README.md)."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from accelmark.audit import provenance
from accelmark.audit.verify import verify_run
from accelmark.cli.finished.results import compare, results
from accelmark.cli.finished.run import report
from accelmark.cli.help import Verb
from accelmark.results.store.bundle import unpack

HERE = Path(__file__).parent / "earlier_version"
COMMIT = "05d27fddd68fbe81c995737fde86e8763b089086"
BUNDLES = {"train_2ranks": "INVALID", "infer_resnet_mini": "VALID", "minilm_2rounds": "INVALID"}

app = typer.Typer()
app.command("compare", cls=Verb)(compare)
app.command("report", cls=Verb)(report)
app.command("results")(results)
runner = CliRunner()


def ask(*arguments: object) -> str:
    return runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("earlier")
    for name in BUNDLES:
        packed = lzma.decompress((HERE / f"{name}.accelmark.tar.xz").read_bytes())
        (root / f"{name}.accelmark.tar").write_bytes(packed)
    with tarfile.open(fileobj=io.BytesIO((HERE / "search.tar.xz").read_bytes()), mode="r:xz") as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture
def run(request: pytest.FixtureRequest, bundles: Path, tmp_path: Path) -> Path:
    run_dir, problems = unpack(bundles / f"{request.param}.accelmark.tar", tmp_path)
    assert problems == []
    return run_dir


every_run = pytest.mark.parametrize("run", BUNDLES, indirect=True)


@every_run
def test_figures_states_and_findings_are_reproduced(run: Path) -> None:
    verification = verify_run(run)
    assert verification.changed == ()
    assert [what for what in verification.differences if ": verdict: " not in what] == []
    assert verification.num_figures >= 58


@every_run
def test_the_verdict_is_reproduced(run: Path) -> None:
    if provenance.hash_at(COMMIT) is None:
        pytest.skip("the commit that made the runs is not in this clone, so its files are unknown")
    verification = verify_run(run)
    assert verification.is_intact
    assert verification.summary.cases[0].verdict == BUNDLES[run.name]


@every_run
def test_the_page_is_written_from_stored_and_from_recomputed_results(run: Path, tmp_path: Path) -> None:
    for options in ((), ("--recompute",)):
        page = tmp_path / "page.html"
        told = json.loads(ask("report", run, "-o", page, "--json", *options))
        assert told["problems"] == []
        assert run.name in page.read_text()
        page.unlink()


@pytest.mark.parametrize("name", ["train_2ranks", "infer_resnet_mini", "search"])
def test_a_run_is_compared(bundles: Path, name: str) -> None:
    source = bundles / name if name == "search" else bundles / f"{name}.accelmark.tar"
    (pair,) = json.loads(ask("compare", source, source, "--json"))["pairs"]
    assert len(pair["differences"]) >= 9
    assert {found["relative"] for found in pair["differences"]} <= {0.0, None}


def test_all_are_listed_in_one_table(bundles: Path) -> None:
    told = json.loads(ask("results", bundles, "--json"))
    assert told["problems"] == []
    verdicts = {row["run"]: row["verdict"] for row in told["results"]}
    assert verdicts == BUNDLES | {"search": "VALID"}
