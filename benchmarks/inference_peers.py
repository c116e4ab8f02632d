"""Compare runs of AccelMark with other tools and with an expert's loops, on the models of the mini cases.

Run ``python -m benchmarks.inference_peers [--points resnet_mini:100 ...] [--rounds 4] [--seconds 2]`` on an idle
machine; rows are merged into ``results/inference_peers.json`` and the table of ``inference.md``.

AccelMark's side is the whole sixth step of a run: the case's data, whose batches are read, mixed, perturbed and
staged, the engine in its process, the evaluation, and the comparison with the framework. Its figure is
``inference_core``. The others get the ONNX file that AccelMark's third step exported (for int8, the quantised one).
All take turns, in an order that changes every round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.infer.measure import CheckedPass
from accelmark.infer.run import InferenceRun
from accelmark.plan.request import host_capabilities, vendor_layers
from accelmark.results.rounds.inference import phase_figures
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import FolderRef, find, load_case, load_vendor
from accelmark.spec.settings.inference import InferSettings, InferStep

POINTS: Final = (
    "resnet_mini:100", "resnet_mini:8", "resnet_mini:1", "minilm:16", "minilm:1", "efficientnet_lite0:4",
    "efficientnet_lite0:1",
)  # fmt: skip
PAGE: Final = Path(__file__).with_name("inference.md")
RESULTS: Final = Path(__file__).parent / "results" / "inference_peers.json"
LOOP: Final = Path(__file__).with_name("expert_loop.py")
MARKS: Final = ("<!-- peers -->\n", "<!-- /peers -->")
LIBRARIES: Final = ("torch", "openvino", "onnxruntime")
LOOPS: Final = {"fp32": ("ort", "ov-sync", "ov-queue")}
OTHER_LOOPS: Final = ("ov-sync", "ov-queue")
SYNTHETIC: Final = ("efficientnet_lite0",)
"""Models of which no data is at hand: made-up inputs, also for the calibration of int8."""
MOST_ITEMS: Final = {"minilm": 96, "resnet_mini": 4000, "efficientnet_lite0": 32}
"""Items of a pass, since the framework computes them too."""
OURS: Final = ("default", "tuned")
Turn = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """Items per second of each side at one batch size: medians over the rounds."""

    model: str
    batch: int
    settings: dict[str, str]
    """Of AccelMark's two sides."""
    rates: dict[str, float]
    rounds: dict[str, list[float]]
    default: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Ratio of AccelMark's default to the best of the others in the same precision, with its interval."""
    tuned: tuple[float, float, float] = (0.0, 0.0, 0.0)
    best: dict[str, str] = field(default_factory=dict)
    """The best of the others, for each of AccelMark's sides."""
    call_us: dict[str, float] = field(default_factory=dict)
    """Microseconds of a call, and what crossing to the engine's process adds to it."""
    versions: dict[str, str] = field(default_factory=dict)


@contextmanager
def compiled(name: str, settings: Mapping[str, Any], directory: Path) -> Iterator[tuple[InferenceRun, Path]]:
    """Take the first five steps of a run; yield them with the file that the engine compiled."""
    case, folder = load_case(name), find("cases", name)
    assert case.infer is not None
    specs = dataset_specs(case.data, f"cases/{name}/case.yaml")
    needed = () if settings.get("synthetic") else case.infer.data
    data = {spec.name: ensure(spec, allow_subset=True) for spec in specs if spec.name in needed}
    key = CaseKey(model=name, framework="pytorch", hardware="CPU")
    adaptation = find("vendors", "cpu").path / "cases" / f"{name}-pytorch"
    capabilities = host_capabilities(load_vendor("cpu"))
    layers, _ = vendor_layers([adaptation], "cpu", key, capabilities, "infer")
    values = dict(case.infer.configurations)
    for layer in (*(each.values for each in layers), settings):
        values |= layer
    work = InferJob(
        unit=case.infer.unit, metric=case.infer.metric, tolerance=case.infer.tolerance, reference=None,
        settings=InferSettings.model_validate(values), parameters=case.infer.parameters,
    )  # fmt: skip
    job = JobSpec(
        key=key, round=1,
        case=FolderRef(name=name, path=folder.path, package=folder.package, sha256="0"), case_version=case.version,
        vendor="cpu", device_type="cpu", framework_module=None, collective_backend="gloo", data_dirs=data,
        checkpoint_dir=directory, work=work,
    )  # fmt: skip
    directory.mkdir(parents=True)
    steps = InferenceRun(job, work, directory, lambda *_: None, 0.0)
    try:
        for step in (InferStep.INITIALISE, InferStep.CREATE, InferStep.EXPORT, InferStep.COMPILE):
            if step is not InferStep.EXPORT or "exist_onnx_path" not in settings:
                steps._run_step(step, None)
            if steps.failure is not None:
                raise steps.failure[1]
        quantised = sorted((directory / "engine").glob("*-int8.onnx"))
        yield steps, quantised[0] if quantised else Path(settings.get("exist_onnx_path") or steps.onnx_path or "")
    finally:
        if steps.process is not None:
            steps.process.close()


def turn_of(steps: InferenceRun, crossing: dict[str, float]) -> Turn:
    """Return a turn of AccelMark: the passes of the sixth step; the figure ``inference_core``."""
    assert steps.process is not None
    process, settings = steps.process, steps.settings
    framework = steps._framework("fp32")

    def turn() -> float:
        with torch.inference_mode():
            measured, _, _ = CheckedPass(steps.case, steps.batches, process, framework.call, steps.emit).run()
        figures = phase_figures(measured.windows, settings.batch_size, "")
        calls = sum(len(window.items) for window in measured.windows)
        crossing["added"] = sum(window.crossing_ms or 0.0 for window in measured.windows) * 1000 / calls
        assert figures.core.value is not None
        return figures.core.value

    return turn


def loop(kind: str, file: Path, batch: int, seconds: float, precision: str) -> Turn:
    """Return a turn of an expert's loop, in a process of its own."""
    command = [sys.executable, str(LOOP), kind, str(file), str(batch), str(seconds), precision]

    def turn() -> float:
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
        return float(json.loads(found.stdout.splitlines()[-1])["items_per_s"])

    return turn


def benchmark_app(file: Path, batch: int, seconds: float, inputs: Mapping[str, list[int]], precision: str) -> Turn:
    """Return a turn of OpenVINO's benchmark_app with its defaults: throughput, asynchronous calls."""
    shapes = ",".join(f"{name}{[batch, *shape]}".replace(" ", "") for name, shape in inputs.items())
    command = [
        str(Path(sys.executable).with_name("benchmark_app")), "-m", str(file), "-d", "CPU", "-hint", "throughput",
        "-shape", shapes, "-t", str(max(1, round(seconds))), "-infer_precision", {"bf16": "bf16"}.get(precision, "f32"),
    ]  # fmt: skip

    def turn() -> float:
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment(), cwd="/tmp")
        count, took_ms = (re.search(rf"{word}:\s+([\d.]+)", found.stdout) for word in ("Count", "Duration"))
        assert count is not None
        assert took_ms is not None
        return float(count[1]) * batch / float(took_ms[1]) * 1000

    return turn


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median ratio of two rates of the same round, with a bootstrap interval of 95 %."""
    pairs = [ours / theirs for ours, theirs in zip(one, other, strict=True)]
    chance = random.Random(1)
    found = sorted(statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), found[50], found[-50]


def measured(
    name: str, batch: int, sides: Mapping[str, Mapping[str, Any]], rounds: int, seconds: float, limit_s: float,
    before: Mapping[str, list[float]],
) -> Row:  # fmt: skip
    """Measure one point, for AccelMark's ``sides`` and the others in their precisions; no round begins after a time.

    ``before`` are rates of earlier rounds, which the new ones are added to.
    """
    both: dict[str, Any] = {"batch_size": batch, "inference_duration_s": seconds, "repeat": 1}
    if name in SYNTHETIC:
        both["synthetic"] = True
    if name in MOST_ITEMS:
        both["max_batches"] = MOST_ITEMS[name] // batch
    crossings: dict[str, dict[str, float]] = {side: {} for side in sides}
    precisions, titles, turns = dict[str, str](), dict[str, str](), dict[str, Turn]()
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        for side, settings in sides.items():
            exported = next((each / "engine" / "model.onnx" for each in Path(text).iterdir()), None)
            given = both | ({"exist_onnx_path": str(exported)} if exported else {}) | dict(settings)
            steps, file = stack.enter_context(compiled(name, given, Path(text) / side))
            precision = precisions[side] = steps.settings.precision
            titles[side], turns[side] = steps.settings.title, turn_of(steps, crossings[side])
            values = dict(zip(steps.case.input_names, next(iter(steps.batches)).inputs, strict=True))
            inputs = {key: list(value.shape[1:]) for key, value in values.items()}
            if f"benchmark_app {precision}" not in turns:
                loops = LOOPS.get(precision, OTHER_LOOPS)
                turns[f"benchmark_app {precision}"] = benchmark_app(file, batch, seconds, inputs, precision)
                turns |= {f"{kind} {precision}": loop(kind, file, batch, seconds, precision) for kind in loops}
        rates: dict[str, list[float]] = {each: [*before.get(each, ())] for each in turns}
        names, began = list(turns), time.monotonic()
        for number in range(rounds):
            if time.monotonic() - began > limit_s:
                break
            shift = number % len(names)
            for each in (*names[shift:], *names[:shift]):
                rates[each].append(turns[each]())
    middle = {each: statistics.median(values) for each, values in rates.items()}
    best = {
        side: max((each for each in middle if each.endswith(f" {precisions[side]}")), key=middle.__getitem__)
        for side in sides
    }
    call_us = {side: batch / middle[side] * 1e6 for side in sides}
    call_us |= {f"{side} crossing": crossings[side]["added"] for side in sides}
    versions = {library: version(library) for library in LIBRARIES} | {"processor": processor()}
    ratios = {side: ratio(rates[side], rates[best[side]]) for side in sides}
    return Row(name, batch, titles, middle, rates, best=best, call_us=call_us, versions=versions, **ratios)


def processor() -> str:
    """Return the model name and number of cores."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{found[1] if found else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def held_points() -> dict[str, Any]:
    """Return the rows of the JSON file by their points."""
    held: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return held


def keep(row: Row) -> None:
    """Merge a row into the JSON file, and write the table of the page."""
    held = held_points()
    point, fresh = f"{row.model}:{row.batch}", asdict(row)
    other = held.get(point, {})
    for name in ("settings", "rates", "rounds", "best", "call_us"):
        fresh[name] = other.get(name, {}) | fresh[name]
    held[point] = fresh | {side: other[side] for side in OURS if side not in row.settings and side in other}
    RESULTS.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    heads = ("model", "batch", "side", "settings", "items/s", "µs a call (crossing)", "best of the others, items/s",
             "ratio to it", "benchmark_app, items/s")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in (held[point] for point in POINTS if point in held):
        for side in (side for side in OURS if side in each["best"]):
            best, precision = each["best"][side], each["best"][side].rpartition(" ")[2]
            middle, low, high = each[side]
            cells = (
                each["model"], str(each["batch"]), side, each["settings"][side], f"{each['rates'][side]:,.0f}",
                f"{each['call_us'][side]:,.0f} ({each['call_us'][f'{side} crossing']:.1f})",
                f"{best.rpartition(' ')[0]} {each['rates'][best]:,.0f}", f"{middle:.3f} ({low:.3f} to {high:.3f})",
                f"{each['rates'][f'benchmark_app {precision}']:,.0f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1], 1)[1]
    PAGE.write_text("".join((before, MARKS[0], "\n".join(lines), "\n", MARKS[1], after)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", nargs="*", default=POINTS, metavar="MODEL:BATCH")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no round of a point begins")
    parser.add_argument("--default", type=json.loads, default={}, help="settings of the default, as JSON")
    parser.add_argument("--tuned", type=json.loads, default={"compiler": "openvino", "precision": "int8"})
    parser.add_argument("--sides", nargs="*", default=OURS, choices=OURS, help="those that are measured again")
    parser.add_argument("--append", action="store_true", help="add rounds to those of the file, of the same machine")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    for point in given.points:
        name, batch = point.split(":")
        sides = {side: getattr(given, side) for side in OURS if side in given.sides}
        before = held_points().get(point, {}).get("rounds", {}) if given.append else {}
        row = measured(name, int(batch), sides, given.rounds, given.seconds, given.limit, before)
        print(json.dumps(asdict(row)), flush=True)
        if not given.dry:
            keep(row)


if __name__ == "__main__":
    main()
