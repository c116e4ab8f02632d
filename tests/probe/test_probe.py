"""Probing the CPU of this machine for real, briefly, through agent and launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelmark.probe import device as probe_device
from accelmark.probe.device import Timing
from accelmark.results.figures import FigureName
from accelmark.results.rounds.summary import round_result
from accelmark.run.measure import probe, remembered
from accelmark.spec.log.records import Ceilings, Rate
from accelmark.spec.plugins.catalog import load_vendor
from tests.made_run import Made, make_round


def test_a_probe_of_two_ranks_measures_and_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))
    assert remembered("cpu", "CPU") is None
    found = probe(load_vendor("cpu"), "CPU", 2, ["matmul", "collectives"], 1.0)
    assert found.world_size == 2
    fp32, all_reduce = found.matmul["fp32"], found.collectives["all_reduce"]
    assert fp32.value is not None
    assert fp32.value > 0
    assert all_reduce.value is not None
    assert found.matmul["tf32"].reason == "CPUs do not support tf32"
    assert found.memory == {}
    assert remembered("cpu", "CPU") == found


@pytest.mark.heavy
def test_a_probe_on_a_busy_host_is_marked_and_does_not_replace_one_of_an_idle_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(tmp_path / "cache"))
    spinning = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spinning]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        found = probe(load_vendor("cpu"), "CPU", 1, ["matmul"], 0.5)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "of the cores are busy" in found.disturbed[0]
    assert remembered("cpu", "CPU") == found
    (path,) = (tmp_path / "cache").rglob("x1.json")
    quiet = found.model_copy(update={"disturbed": (), "measured_at": "before"})
    path.with_name("x2.json").write_text(quiet.model_dump_json())
    assert remembered("cpu", "CPU") == quiet


@pytest.mark.parametrize("disturbed", [(), ("99% of the cores are busy",)])
def test_mfu_against_the_probe_is_achieved_over_measured_and_null_of_a_busy_host(
    tmp_path: Path, disturbed: tuple[str, ...]
) -> None:
    round_dir = tmp_path / "run" / "toy" / "round1"
    job = make_round(round_dir, Made())
    ceilings = Ceilings(
        device_type="acme",
        device_name="X1",
        world_size=1,
        framework="pytorch",
        measured_at="",
        disturbed=disturbed,
        matmul={"bf16": Rate(value=80.0, unit="TFLOP/s")},
    )
    (round_dir / "job.json").write_text(job.model_copy(update={"ceilings": ceilings}).model_dump_json())
    figures = round_result(round_dir).figures
    measured = figures[FigureName.MFU_MEASURED]
    assert figures[FigureName.MFU].value == pytest.approx(0.064)
    assert measured.value == (None if disturbed else pytest.approx(0.08))
    assert ("busy during the probe (99% of the cores are busy)" in (measured.reason or "")) == bool(disturbed)


@pytest.mark.parametrize(("device", "largest"), [("cpu", "256 MiB"), ("meta", "4096 MiB")])
def test_collectives_are_measured_up_to_4_gib_on_accelerators(
    device: str, largest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ranks: the world and the timer are stand-ins; buffers are on the meta device, without memory."""
    stand_in(monkeypatch, seconds=1e-3)
    sweep = probe_device.sweep_collectives(torch.device(device), budget_s=1.0)
    rates = probe_device.best_rates(sweep)
    assert {rate.size for rate in rates.values()} == {largest}
    size = int(largest.split()[0]) * 2**20
    factors = {"all_reduce": 2 * 7 / 8, "point_to_point": 1.0}
    for name, rate in rates.items():
        assert rate.value == pytest.approx(factors.get(name, 7 / 8) * size / 1e-3 / 1e9), "bus bandwidth of nccl-tests"


def test_a_sweep_ends_with_a_size_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, seconds=1.0)
    sweep = probe_device.sweep_collectives(torch.device("cpu"), budget_s=1.0)
    assert {timing.size_bytes for timing in sweep} == {1024}
    assert len(sweep) == 5


def stand_in(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(probe_device, "time_collective", lambda operation, device, budget_s: Timing(seconds, 3))
