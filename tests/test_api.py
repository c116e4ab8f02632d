"""The Python API, on a real run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import accelmark
from accelmark.api import Run, compare, frame, load_all, run
from accelmark.results.figures import FigureName
from accelmark.spec.errors import RequestError
from tests.made_run import measured_run

SHORT = {"end.max_epochs": None, "end.max_steps": 4, "evaluate.every_epochs": None, "log_every_steps": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("api") / "run"
    return run("resnet_mini:pytorch:CPU", settings=SHORT, vendor="cpu", out=out, synthetic=True, allow_open=True)


def test_a_run_is_loaded_as_typed_objects_and_data_frames(trained: Run) -> None:
    again = accelmark.load(trained.path)
    (case,) = again.cases
    assert (case.verdict, case.state) == ("INVALID", "succeeded"), "synthetic data"
    mean = case.mean_of(FigureName.THROUGHPUT_TRAIN)
    (row,) = again.frame().to_dict("records")
    assert row["throughput_train"] == mean
    losses = again.curves("loss")
    assert list(losses["step"]) == sorted(losses["step"])
    assert len(losses)
    assert set(again.telemetry().columns) >= {"quantity", "time_s", "value"}
    assert {str(again.frame()[name].dtype) for name in ("throughput_train", "mfu", "mfu_half95")} == {"float64"}
    with pytest.raises(RequestError, match="no curve 'los'; it has: loss, throughput"):
        again.curves("los")


def test_runs_are_compared(tmp_path: Path) -> None:
    measured_run(tmp_path / "a")
    measured_run(tmp_path / "b")
    one, two = load_all(tmp_path)
    comparison = compare(one, two)
    assert comparison.pairs
    assert compare(str(tmp_path / "a"), tmp_path / "b").pairs == comparison.pairs
    assert len(frame([one, two])) == 2
    assert repr(one).startswith(f"Run({str(one.path)!r}, succeeded, {one.cases[0].key}: ")
    with pytest.raises(RequestError, match="has 2 runs: use load_all"):
        accelmark.load(tmp_path)


def test_of_many_runs_those_that_cannot_be_read_are_warned_of(tmp_path: Path) -> None:
    measured_run(tmp_path / "a")
    (measured_run(tmp_path / "b") / "summary.json").write_text("{")
    with pytest.warns(UserWarning, match=r"b/summary\.json") as caught:
        (one,) = load_all(tmp_path)
    assert (one.path.name, caught[0].filename) == ("a", __file__)
    with pytest.raises(RequestError, match="is no run"):
        list(load_all(tmp_path / "nothing"))


def test_a_wrong_request_names_its_problem(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="did you mean 'resnet_mini'"):
        run("resnet_mimi", vendor="cpu")
    with pytest.raises(RequestError, match="either keys of cases or a run file"):
        run()
    with pytest.raises(RequestError, match="a run file names the data of each"):
        run(file="quickstart", data=tmp_path)
    with pytest.raises(RequestError, match="no such run"):
        accelmark.load(tmp_path / "nothing")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import accelmark, sys; print(len([m for m in sys.modules if m.startswith('accelmark.')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"
