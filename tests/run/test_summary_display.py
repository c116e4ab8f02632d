"""The summary of a run in the terminal."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.figures.scaling import scaling_curves
from accelmark.run.display.summary import scaling_lines
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


def test_one_scale_is_no_scaling(tmp_path: Path) -> None:
    assert scaling_lines(scaling_curves([loaded(tmp_path / "one")])) == []
