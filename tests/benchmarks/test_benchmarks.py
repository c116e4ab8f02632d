"""The benchmarks of simulated hosts, loaders and the loop; the campaign on an accelerator at toy size on the CPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import loaders
from benchmarks.fanout.simulated import measure
from benchmarks.gpu import pack
from benchmarks.gpu.energy import Samples, compare
from benchmarks.gpu.items import ITEMS
from benchmarks.turns import Cost, Turns


def test_simulated_hosts_are_checked_started_and_followed() -> None:
    (row,) = measure([2])
    assert row["phases"].keys() == {"preflight", "launch", "collection"}
    (row,) = measure([2], (1, 2))
    assert row["sent_bytes"] > row["new_bytes"] > 0


def test_all_loaders_and_the_plain_loop_read_every_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCH", 2)
    assert 80_000 < loaders.write(tmp_path, 6) < 150_000, "bytes, as of a photograph"
    rows = loaders.measure(tmp_path, 1)
    found = loaders.loaders(tmp_path)
    assert [row.loader for row in rows] == list(found)
    assert all(sum(read()) == 6 for read in (loaders.plain(tmp_path / "folders/train"), *found.values()))
    assert all(row.per_second > 0 and row.core_ratio[1] <= row.core_ratio[2] for row in rows)
    assert loaders.table(rows).count("\n") == 1 + len(rows)


def test_the_parts_of_the_way_of_a_batch_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCH", 8)
    found = loaders.parts()
    assert len(found) == 5
    assert all(value > 0 for value in found.values())


def test_loops_take_turns_and_do_nothing_in_between() -> None:
    seen: list[str] = []

    def loop(name: str) -> Any:
        def train(batches: Iterator[str]) -> None:
            seen.extend(f"{name}{batch}" for batch in batches)

        return train

    turns = Turns({"a": loop("a"), "b": loop("b")}, "!")
    turns.run("a", 2)
    turns.run("b", 1)
    turns.run("a", 1)
    turns.close()
    assert seen == ["a!", "a!", "b!", "a!"]


def test_a_loop_that_ends_by_itself_is_recorded() -> None:
    turns = Turns({"once": lambda batches: next(batches)}, 0)
    with pytest.raises(RuntimeError, match="'once' ended"):
        turns.run("once", 2)


def test_a_cost_of_two_microseconds_is_found_in_noise_and_none_where_there_is_none() -> None:
    draw = random.Random(7)
    drift = [100 + draw.gauss(0, 20) for _ in range(400)]
    bare, same, dearer = (
        {number: one + extra + draw.gauss(0, 1) for number, one in enumerate(drift)} for extra in (0, 0, 2)
    )
    low, high = Cost.of(bare, same).extra_us_interval
    assert low < 0 < high
    assert high - low < 0.5
    cost = Cost.of(bare, dearer)
    assert cost.extra_us_interval[0] < 2 < cost.extra_us_interval[1]
    assert cost.relative == pytest.approx(0.02, rel=0.2)


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
