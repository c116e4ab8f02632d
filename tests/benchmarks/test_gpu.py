"""The GPU benchmark at toy size on the CPU: every call's items, its state, its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.energy import Samples, compare
from benchmarks.gpu.items import CALLS, ITEMS
from benchmarks.gpu.session import BUDGET_S

ROOT = Path(__file__).parents[2]
SAMPLED = ("infer_eager_1", "infer_tensorrt_1", "changes", "energy", "out_of_memory")
"""Items that stand for their kinds in a quick run of the tests, besides ``llama_7b``; the heavy test runs all."""
CALL_OF = {item.name: number for number, items in CALLS.items() for item in items}
LATER = CALLS[CALL_OF["llama_7b"]][-1].name
SLOW = (CALL_OF["infer_eager_1"], CALL_OF["out_of_memory"])
SAMPLE = {number: [name for name in SAMPLED if CALL_OF[name] == number] for number in map(CALL_OF.get, SAMPLED)}


def call(number: int, output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(number), "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, cwd=output.parent, capture_output=True, text=True, check=False)
    path = output / f"call{number}.json"
    return ended, json.loads(path.read_text()) if path.is_file() else {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.heavy) if n in SLOW else n for n in SAMPLE])
def test_a_call_measures_and_keeps_few_flat_files(number: int, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended, content = call(number, output, "--tiny", "--budget-s", "500", "--only", *SAMPLE[number])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    measured = {name for name in SAMPLE[number] if "tensorrt" not in name}
    assert {name for name, entry in content["items"].items() if entry["state"] != "left out"} == measured
    kept = sorted(path.name for path in output.iterdir() if path.is_file())
    assert kept == [f"call{number}.json", f"logs{number}.tar.gz"]
    with tarfile.open(output / f"logs{number}.tar.gz") as archive:
        assert any(name.endswith("stderr.txt") for name in archive.getnames()) == bool(measured)


@pytest.mark.timeout(600)
def test_finished_items_are_skipped_and_items_over_budget_left_out(tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended, first = call(CALL_OF["llama_7b"], output, "--tiny", "--budget-s", "300", "--only", "llama_7b")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    entry = first["items"]["llama_7b"]
    assert entry["rounds"][0]["steady"]["units_per_s"] > 0
    assert not [reason for reason in entry["reasons"] if "PYTHONPATH" in reason]
    assert "OPEN" in entry["verdict"] or "INVALID" in entry["verdict"]
    ended, second = call(CALL_OF["llama_7b"], output, "--tiny", "--budget-s", "2", "--only", "llama_7b", LATER)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert second["items"]["llama_7b"] == entry
    assert second["items"][LATER]["state"] == "left out"
    assert "call again" in second["items"][LATER]["reason"]


@pytest.mark.timeout(3000)
@pytest.mark.skipif("ACCELMARK_HEAVY_TESTS" not in os.environ, reason="takes half an hour; set ACCELMARK_HEAVY_TESTS")
@pytest.mark.parametrize("number", CALLS)
def test_every_item_of_every_call_runs_on_the_cpu(number: int, tmp_path: Path) -> None:
    ended, content = call(number, tmp_path / "out", "--tiny", "--budget-s", "2500")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    states = {name: entry["state"] for name, entry in content["items"].items()}
    assert set(states) == {item.name for item in CALLS[number]}
    left_out = {name for name, state in states.items() if state == "left out"}
    assert left_out <= {"resnet_mini_jax", "infer_tensorrt_1", "infer_tensorrt_32", "infer_tensorrt_256"}


def test_wheels_are_installed_beside_the_interpreters_packages(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "toy_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheels / "toy_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", "import sys; print('from the wheel', file=sys.stderr)\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    ended, _ = call(1, tmp_path / "out", "--tiny", "--wheels", str(wheels), "--only", "none")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "from the wheel" in ended.stderr


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is an accelerator here")
def test_a_missing_accelerator_is_reported(tmp_path: Path) -> None:
    ended, _ = call(1, tmp_path / "out")
    assert ended.returncode == 2
    assert "No accelerator was found here" in ended.stdout


def test_each_call_fits_into_eight_minutes_by_its_estimates_and_every_item_is_in_one() -> None:
    assert [item.name for items in CALLS.values() for item in items] == [item.name for item in ITEMS]
    assert len(CALL_OF) == len(ITEMS)
    assert all(sum(item.about_s for item in items) <= BUDGET_S < 480 for items in CALLS.values())


def test_trapezoids_over_sparse_samples_miss_short_loads_and_the_counter_does_not() -> None:
    samples = Samples()
    energy = 0.0
    for tick in range(1200):
        power = 700.0 if tick % 20 < 10 else 100.0  # 0.5 s busy, 0.5 s idle
        samples.time_s.append(tick * 0.05)
        samples.power_w.append(power)
        samples.counter_j.append(energy)
        energy += power * 0.05
    found = compare(samples)
    assert found["counter_j"] == pytest.approx(400 * 0.05 * 1199, rel=0.01)
    assert abs(found["relative_error"]["0.1"]) < 0.05
    assert found["relative_error"]["1.0"] > 0.5
