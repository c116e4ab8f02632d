"""Probing the CPU of this machine for real, briefly, through agent and launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.results.figures import FigureName
from accelmark.results.rounds import round_result
from accelmark.run.probe import probe, remembered
from accelmark.spec.catalog import load_vendor
from accelmark.spec.ceilings import Ceilings, Rate
from tests.made_run import Made, make_round


def test_a_probe_of_two_ranks_measures_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))
    assert remembered("cpu", "CPU") is None
    found = probe(load_vendor("cpu"), "CPU", 2, ["matmul", "collectives"], 1.0)
    assert found.world_size == 2
    fp32, all_reduce = found.matmul["fp32"], found.collectives["all_reduce"]
    assert fp32.value is not None
    assert fp32.value > 0
    assert all_reduce.value is not None
    assert found.matmul["tf32"].reason == "a CPU has no tf32"
    assert found.memory == {}
    assert remembered("cpu", "CPU") == found


def test_mfu_against_the_probe_is_achieved_over_measured(tmp_path: Path) -> None:
    job = make_round(tmp_path / "run" / "toy" / "round1", Made())
    rate = Rate(value=80.0, unit="TFLOP/s")
    ceilings = Ceilings(
        device_type="acme", device_name="X1", world_size=1, framework="pytorch", measured_at="", matmul={"bf16": rate}
    )
    (tmp_path / "run" / "toy" / "round1" / "job.json").write_text(
        job.model_copy(update={"ceilings": ceilings}).model_dump_json()
    )
    figures = round_result(tmp_path / "run" / "toy" / "round1").figures
    assert figures[FigureName.MFU].value == pytest.approx(0.064)
    assert figures[FigureName.MFU_MEASURED].value == pytest.approx(0.08)
