"""The summary of a run in the terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from accelmark.results.cluster import scaling_curves
from accelmark.results.figures import FigureName as F
from accelmark.results.schema import AdaptationCost, ReplacedHook, Spread, Summary
from accelmark.run.display.summary import print_summary, scaling_lines
from accelmark.spec.number_format import THIN
from tests.results.compared_runs import loaded


def test_the_terminal_shows_the_share_of_linear_speed_up_of_each_scale(tmp_path: Path) -> None:
    runs = [
        loaded(tmp_path / "one", jitter=0.0),
        loaded(tmp_path / "two", nproc=2, jitter=0.0, step_ms=12.5),
    ]
    _, line = scaling_lines(scaling_curves(runs))
    (curve,) = scaling_curves(runs)
    shown = line.plain.replace(THIN, " ")
    assert shown.startswith(f"scaling {curve.model}:{curve.framework}:{curve.chip}  1×1 100 %  1×2 ")
    assert shown.endswith("%")


def shown(summary: Summary, run_dir: Path, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_summary(summary, run_dir, None, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_invalid_result_has_no_tick_and_the_summary_names_the_vendor_and_its_hooks(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    assert "Vendor nvidia: standard cases, nothing changed" in shown(summary, tmp_path / "run")
    hooks = (ReplacedHook(name="create_optimizer", place="extern/__init__.py:4", num_lines=3),)
    changed = {"verdict": "INVALID", "reasons": ("why",), "adaptation": AdaptationCost(hooks=hooks)}
    (case,) = summary.cases
    text = shown(summary.model_copy(update={"cases": (case.model_copy(update=changed),)}), tmp_path / "run")
    assert "✓" not in text
    assert "✕" in text
    assert "Vendor nvidia changed toy: hook create_optimizer" in text
    assert "resume" not in text


def test_a_verdict_is_explained_below_the_table(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    (case,) = summary.cases

    def text(**changed: object) -> str:
        changed_case = case.model_copy(update={"marks": (), "verdict": "VALID", **changed})
        return " ".join(shown(summary.model_copy(update={"cases": (changed_case,)}), tmp_path / "run").split())

    assert "VALID: The result counts" in text()
    assert "timing" not in text()
    assert "timing is unreliable" in text(marks=("busy_machine",))
    assert "OPEN: Not a closed result" in text(verdict="OPEN")
    assert "cancelled: The run was stopped" in text(verdict="INVALID", state="cancelled")


def test_an_interrupted_run_ends_with_the_command_that_continues_it(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    (case,) = summary.cases
    for state, option in (("cancelled", ""), ("lost", ""), ("failed", " --failed")):
        cases = (case, case.model_copy(update={"state": state, "converged": False}))
        text = shown(summary.model_copy(update={"cases": cases}), tmp_path / "run")
        assert text.endswith(f"Continue with: accelmark resume {tmp_path / 'run'}{option}\n"), text
        assert "missed" not in text, "whether the target would have been reached is not known"


def test_figures_of_scenarios_and_of_a_searched_rate_are_shown_where_they_were_measured(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    (case,) = summary.cases
    assert "Offline scenario" not in shown(summary, tmp_path / "run")
    measured = {
        name: Spread(mean=21195.2, stdev=None, ci95=None, num_rounds=1) for name in (F.OFFLINE_RATE, F.SLO_RATE)
    }
    missing = {F.SERVER_RATE: Spread(mean=None, stdev=None, ci95=None, num_rounds=0, reason="not asked for")}
    changed = case.model_copy(update={"figures": {**case.figures, **measured, **missing}})
    text = shown(summary.model_copy(update={"cases": (changed,)}), tmp_path / "run").replace(THIN, " ")
    assert "toy: Offline scenario 21,195 samples/s, Highest rate within the SLO 21,195 requests/s\n" in text


def test_inference_without_an_engine_shows_the_figures_of_the_framework(tmp_path: Path) -> None:
    summary = loaded(tmp_path / "run").summary
    (case,) = summary.cases
    figures = {
        name: Spread(mean=value, stdev=None, ci95=None, num_rounds=1, reason=None)
        for name, value in ((F.VALIDATION_CORE, 8151.0), (F.VALIDATION_METRIC, 0.9161))
    }
    for engine, has in (({}, True), ({F.INFERENCE_CORE: figures[F.VALIDATION_CORE]}, False)):
        changed = case.model_copy(update={"task": "infer", "figures": {**figures, **engine}})
        text = shown(summary.model_copy(update={"cases": (changed,)}), tmp_path / "run").replace(THIN, " ")
        assert ("0.9161" in text) is has, text
