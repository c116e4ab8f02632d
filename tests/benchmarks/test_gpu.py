"""The campaign on an accelerator at toy size on the CPU: its archive, its items, its limits."""

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
from packaging.requirements import Requirement

from benchmarks.gpu import pack
from benchmarks.gpu.energy import Samples, compare
from benchmarks.gpu.items import ITEMS

ROOT = Path(__file__).parents[2]
SAMPLED = ("flux_gradients_cudnn", "llama_1b_compiled", "energy")
"""Items that stand for their kinds in a quick run of the tests; the heavy test runs all."""


def campaign(output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "run", "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, cwd=output.parent, capture_output=True, text=True, check=False)
    path = output / "results.json"
    return ended, json.loads(path.read_text()) if path.is_file() else {}


@pytest.mark.timeout(600)
def test_a_second_call_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended, first = campaign(output, "--tiny", "--budget-s", "500", "--only", *SAMPLED[:2])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {name: entry["state"] for name, entry in first["items"].items()} == dict.fromkeys(SAMPLED[:2], "succeeded")
    assert first["items"]["llama_1b_compiled"]["rounds"][0]["steady"]["units_per_s"] > 0
    assert first["items"]["flux_gradients_cudnn"]["first_nonfinite"] is None
    ended, second = campaign(output, "--tiny", "--budget-s", "41", "--only", *SAMPLED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {name: second["items"][name] for name in SAMPLED[:2]} == first["items"]
    assert second["items"]["energy"]["state"] == "left out"
    assert "call again" in second["items"]["energy"]["reason"]
    kept = sorted(path.name for path in output.iterdir() if path.is_file())
    assert kept == ["logs1.tar.xz", "logs2.tar.xz", "results.json"]
    with tarfile.open(output / "logs1.tar.xz") as archive:
        assert any(name.endswith("stderr.txt") for name in archive.getnames())


@pytest.mark.timeout(3000)
@pytest.mark.skipif("ACCELMARK_HEAVY_TESTS" not in os.environ, reason="takes half an hour; set ACCELMARK_HEAVY_TESTS")
def test_every_item_runs_on_the_cpu(tmp_path: Path) -> None:
    ended, content = campaign(tmp_path / "out", "--tiny", "--budget-s", "2500")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    states = {name: entry["state"] for name, entry in content["items"].items()}
    assert set(states) == {item.name for item in ITEMS}
    left_out = {name for name, state in states.items() if state == "left out"}
    assert left_out <= {"resnet_mini_jax", "infer_tensorrt_1", "infer_tensorrt_32", "infer_tensorrt_256"}


def test_the_first_two_calls_have_a_limit_for_each_item_and_fit_by_their_estimates() -> None:
    names = [item.name for item in ITEMS]
    assert len(set(names)) == len(names)
    first = names.index("llama_1b_compiled")
    assert sum(item.about_s for item in ITEMS[:first]) <= 540
    assert all(item.about_s < item.limit_s for item in ITEMS)


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


def wheel_of(directory: Path, name: str, *requires: str, content: str = "") -> Path:
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    lines = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_what_a_wheel_requires_is_packed_unless_the_image_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = {"a": ("b>=1", "torch", "c; extra == 'all'"), "b": ("numpy>=2",)}

    def download(requirement: str, into: Path) -> None:
        name = Requirement(requirement).name
        wheel_of(into, name, *requires[name])

    monkeypatch.setattr(pack, "download", download)
    image = pack.image_packages("# a comment\ntorch==2.11.0\nnumpy==2.5.2\n")
    pack.resolve([Requirement("a")], image, {}, tmp_path)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"a", "b"}
    with pytest.raises(pack.PackError, match=r"the image has torch 2\.11\.0"):
        pack.resolve([Requirement("torch>=3")], image, {}, tmp_path)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is an accelerator here")
def test_a_missing_accelerator_is_reported(tmp_path: Path) -> None:
    ended, _ = campaign(tmp_path / "out")
    assert ended.returncode == 2
    assert "No accelerator was found here" in ended.stdout
