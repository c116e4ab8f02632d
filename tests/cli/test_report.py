from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from accelmark.cli.finished.run import evaluate, report
from accelmark.cli.help import Verb
from accelmark.results.store.bundle import write_manifest
from accelmark.run.record.directory import measure_run
from tests.made_run import Made, make_run

app = typer.Typer()
app.command(cls=Verb)(report)
runner = CliRunner()


def test_a_killed_run_is_summarised_and_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = runner.invoke(app, [str(run)], catch_exceptions=False)
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
    runner.invoke(app, [str(run), "--recompute"], catch_exceptions=False)
    assert result.read_text() == before


def test_evaluate_measures_the_run_that_a_name_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "toy")
    monkeypatch.chdir(tmp_path)
    used: list[Path] = []
    again = SimpleNamespace(counts=True, is_reproduced=True, values=dict)
    monkeypatch.setattr("accelmark.run.controller.evaluate.evaluate_run", lambda run, *_: used.append(run))
    monkeypatch.setattr("accelmark.run.controller.evaluate.remove_repeated", lambda _: None)
    monkeypatch.setattr("accelmark.audit.verify.checked_again", lambda _: [again])
    monkeypatch.setattr("accelmark.run.record.directory.measure_run", lambda run, recompute: used.append(run))
    for name in ("toy", "latest"):
        evaluate(Path(name), as_json=True)
    assert used == 4 * [Path("runs/toy")]
