"""What the accelerator here makes of training: standard cases on made-up data, in one call of under ten minutes.

Trains ResNet-50 and Llamas of 1.3, 2.7 and 7 billion parameters (as memory allows) in bf16 through AccelMark's own
driver under full telemetry, prints throughput, MFU, memory, power and energy, compares the driver with a bare PyTorch
loop, and writes all of it as JSON. ``--tiny`` does the same with toy sizes, on any machine, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import accelmark
from accelmark.plan.build import Detected, build_plan
from accelmark.plan.plan import Plan
from accelmark.results.figures.definitions import FigureName
from accelmark.results.figures.timeline import read_timeline
from accelmark.results.read.round_dir import read_job
from accelmark.results.rounds.result import round_result
from accelmark.results.schema import RoundResult
from accelmark.run.controller.session import start
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.runfile import CaseRequest, RunSpec
from accelmark.spec.work import TrainJob
from accelmark.telemetry.detect import default_vendor, detect

BUDGET_S: Final = 540.0
MIB: Final = 1 / 1024
RESNET: Final = {"end.max_epochs": None, "log_every_steps": 20, "checkpoint.every_steps": None}
LLAMA: Final = {"log_every_steps": 5, "parallelism": "ddp", "schedule.warmup_steps": 5}


@dataclass(frozen=True)
class Workload:
    """One training run on made-up data."""

    name: str
    case: str
    settings: Mapping[str, Any]
    about_s: float
    """Roughly how long it takes on a current chip, starting included; it is left out where less time is left."""
    memory_gib: float = 0.0
    """Device memory that it needs."""
    compares_bare: bool = False
    """Also time a bare PyTorch loop of the same model, afterwards."""


def llama(num_params: str, hidden: int, intermediate: int, layers: int, length: int, **settings: Any) -> dict[str, Any]:
    """Return the settings of a Llama of this size; ``num_params`` is for the reader."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers, "seq_length": length}
    heads = hidden // 128
    sizes |= {"num_heads": heads, "num_kv_heads": heads}
    return {**LLAMA, **{f"model.{name}": value for name, value in sizes.items()}, **settings}


def workloads(memory_gib: float) -> Iterator[Workload]:
    """Yield what to run, the most telling first. 16 bytes a parameter stay: fp32 weights, gradients, Adam's moments."""
    roomy = memory_gib >= 64
    resnet = {**RESNET, "end.max_steps": 200, "batch_size": 256}
    small = {"batch_size": 4, "activation_checkpointing": not roomy, "end.max_steps": 60}
    yield Workload("resnet50", "resnet50", resnet, about_s=90, memory_gib=24, compares_bare=True)
    yield Workload("llama_1.3b", "llama2_7b", llama("1.3b", 2048, 5504, 24, 2048, **small), 75, 30)
    middle = {"batch_size": 4, "activation_checkpointing": True, "end.max_steps": 30}
    yield Workload("llama_2.7b", "llama2_7b", llama("2.7b", 2560, 6912, 32, 2048, **middle), 100, 62)
    full = {**LLAMA, "batch_size": 1, "activation_checkpointing": True, "end.max_steps": 30}
    yield Workload("llama_7b", "llama2_7b", full, about_s=210, memory_gib=128)
    yield Workload(
        "llama_1.3b_compiled", "llama2_7b", llama("1.3b", 2048, 5504, 24, 2048, **small, compile="default"), 110, 30
    )
    yield Workload("resnet50_compiled", "resnet50", {**resnet, "compile": "default"}, about_s=110, memory_gib=24)


def tiny_workloads() -> Iterator[Workload]:
    """Yield toy sizes that a CPU gets through in seconds."""
    blocks = {f"model.stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)}
    resnet = {**RESNET, **blocks, "model.image_size": 32, "batch_size": 4, "end.max_steps": 9, "log_every_steps": 3}
    yield Workload("resnet50", "resnet50", resnet, about_s=20)
    toy = {"model.vocab_size": 100, "batch_size": 2, "end.max_steps": 9, "log_every_steps": 3}
    yield Workload("llama", "llama2_7b", llama("toy", 128, 256, 2, 32, **toy), about_s=20, compares_bare=True)
    yield Workload("llama_giant", "llama2_7b", llama("toy", 128, 256, 2, 32), about_s=20, memory_gib=1e6)


@dataclass
class Device:
    """The accelerator under test, as its vendor's telemetry sees it."""

    detected: Detected
    name: str
    memory_gib: float
    is_accelerator: bool
    """False for what every machine has."""


def device_here() -> Device:
    """Find the accelerator, or the CPU where there is none."""
    vendor = default_vendor()
    found = next(found for found in detect([vendor]) if found.vendor == vendor)
    first = found.devices[0] if found.devices else None
    chip = found.chips[0] if found.chips else None
    detected = Detected(vendor, found.hardware or "unknown", chip, len(found.devices) or None)
    return Device(
        detected, first.name if first else vendor, (first.memory_gib or 0.0) if first else 0.0, not found.fallback
    )


@dataclass
class Report:
    """The JSON that is written, filled as the workloads end."""

    device: Device
    measured: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write what is there so far, so that an interruption keeps it."""
        chip = self.device.detected.chip
        content = {
            "schema_version": 1,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "accelmark_version": accelmark.__version__,
            "device": self.device.name,
            "device_memory_gib": self.device.memory_gib,
            "bf16_peak_tflops": chip.peaks.of("bf16") if chip else None,
            "peak_source": chip.source if chip else None,
            "workloads": self.measured,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plan_of(workload: Workload, device: Device, timeout_s: float) -> Plan:
    """Plan the run: open, since most of these sizes are no standard case's, and on made-up data."""
    request = RunSpec(
        name=f"gpu-{workload.name}",
        open=True,
        timeout_s=timeout_s,
        telemetry_interval_s=0.5,
        cases=(CaseRequest(key=workload.case, settings={**workload.settings, "loader.synthetic": True}),),
    )
    return build_plan(
        request,
        cluster=ClusterSpec(),
        detected=device.detected,
        data_dirs=lambda case, path: {},
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        where="benchmarks/gpu.py",
    )


def bare_step_ms(round_dir: Path, num_steps: int, timeout_s: float) -> float:
    """Time the bare loop in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("bare_loop.py")), str(round_dir / "job.json")]
    ended = subprocess.run([*command, str(num_steps)], capture_output=True, text=True, timeout=timeout_s, check=True)
    return float(json.loads(ended.stdout.splitlines()[-1])["step_ms"])


def steady(result: RoundResult, round_dir: Path) -> dict[str, float | None]:
    """Return step time, throughput and MFU once a third of the steps (tuning, compiling) is over."""
    timeline = read_timeline([(0, path) for path in round_dir.glob("*/rank0.out.log")])
    job = read_job(round_dir)
    if timeline is None or not isinstance(job.work, TrainJob):
        return {"step_ms": None, "throughput": None, "tflops_per_device": None, "mfu": None}
    windows = list(zip(timeline.window_steps, timeline.window_lengths, timeline.window_wall_s, strict=True))
    late = [(length, wall_s) for steps, length, wall_s in windows if steps > timeline.num_steps / 3 + length]
    num_steps, wall_s = sum(length for length, _ in late), sum(wall for _, wall in late)
    if not num_steps:
        return {"step_ms": None, "throughput": None, "tflops_per_device": None, "mfu": None}
    settings = job.work.settings
    samples_s = num_steps * settings.batch_size * settings.gradient_accumulation_steps / wall_s
    flops = result.figures[FigureName.FLOPS_PER_SAMPLE].value
    tflops = None if flops is None else flops * samples_s / 1e12
    peak = result.chip.peaks.of(settings.precision) if result.chip else None
    return {
        "step_ms": wall_s / num_steps * 1000,
        "throughput": samples_s * job.work.units_per_sample,
        "tflops_per_device": tflops,
        "mfu": tflops / peak if tflops is not None and peak else None,
    }


def measure(workload: Workload, device: Device, runs: Path, left_s: float) -> dict[str, Any]:
    """Carry one workload out, and return its entry in the report."""
    begun = time.monotonic()
    plan = plan_of(workload, device, timeout_s=max(30.0, min(left_s, 180.0 + workload.about_s)))
    directory = runs / workload.name
    start(plan, directory, no_data, as_json=False)
    round_dir = directory / plan.jobs[0].directory
    result = round_result(round_dir)
    figures = {name.value: figure.model_dump(exclude_none=True) for name, figure in result.figures.items()}
    entry: dict[str, Any] = {"name": workload.name, "case": workload.case, "state": result.state, "unit": result.unit}
    entry |= {"reason": result.reason} if result.reason else {}
    entry |= {"settings": dict(workload.settings), "steady": steady(result, round_dir), "figures": figures}
    if workload.compares_bare and result.state == "succeeded":
        entry["overhead"] = overhead(result, round_dir, entry["steady"]["step_ms"], left_s - (time.monotonic() - begun))
    return entry | {"took_s": round(time.monotonic() - begun, 1)}


def no_data(*_: object) -> None:
    """Fetch nothing: made-up data needs none."""


def overhead(result: RoundResult, round_dir: Path, step_ms: float | None, left_s: float) -> dict[str, Any]:
    """Return the driver's step time over that of the bare loop, less one; null with a reason where that failed."""
    try:
        bare = bare_step_ms(round_dir, result.num_steps, timeout_s=max(30.0, left_s))
    except (subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
        return {"ratio": None, "reason": f"the bare loop failed: {getattr(error, 'stderr', None) or error}"[-500:]}
    if step_ms is None:
        return {"ratio": None, "bare_step_ms": bare, "reason": "too few steps"}
    return {"ratio": step_ms / bare - 1, "bare_step_ms": bare, "driver_step_ms": step_ms}


def show(report: Report, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"{report.device.name}, bf16, made-up data", box=None, header_style="bold", pad_edge=False)
    for heading in (
        "workload",
        "steady rate",
        "step ms",
        "TFLOP/s",
        "MFU",
        "memory GiB",
        "power W",
        "energy J",
        "driver",
    ):
        table.add_column(heading, justify="left" if heading == "workload" else "right", no_wrap=True)
    for entry in report.measured:
        if "figures" not in entry:
            table.add_row(entry["name"], entry["reason"])
            continue
        late, figures = entry["steady"], entry["figures"]
        value = {name: figures.get(name, {}).get("value") for name in FigureName}
        memory = value[FigureName.PEAK_DEVICE_MEMORY]
        table.add_row(
            entry["name"],
            number(late["throughput"], "{:,.0f} " + entry["unit"] + "/s"),
            number(late["step_ms"], "{:.1f}"),
            number(late["tflops_per_device"], "{:.2f}"),
            number(late["mfu"], "{:.1%}"),
            number(None if memory is None else memory * MIB, "{:.1f}"),
            number(value[FigureName.MEAN_POWER], "{:.0f}"),
            number(value[FigureName.ENERGY], "{:.0f}"),
            number(entry.get("overhead", {}).get("ratio"), "{:+.1%}"),
        )
    console.print(table)


def number(value: float | None, form: str) -> str:
    """Format a figure; a dash where there is none."""
    return "-" if value is None else form.format(value)


def main() -> int:
    """Run the workloads that fit into memory and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs") / f"gpu-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds that all of it may take")
    parser.add_argument("--only", nargs="*", help="names of workloads to run")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script on any machine")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    console = Console(width=None if sys.stdout.isatty() else 160)
    device = device_here()
    if not device.is_accelerator and not options.tiny:
        console.print("No accelerator was found here. `--tiny` tries the script on the CPU.")
        return 2
    report = Report(device)
    options.output.mkdir(parents=True)
    for workload in tiny_workloads() if options.tiny else workloads(device.memory_gib):
        left_s = deadline - time.monotonic()
        if options.only and workload.name not in options.only:
            continue
        if workload.memory_gib > device.memory_gib:
            reason = f"needs {workload.memory_gib:g} GiB, the device has {device.memory_gib:.0f}"
            entry: dict[str, Any] = {"name": workload.name, "state": "skipped", "reason": reason}
        elif left_s < workload.about_s:
            reason = f"takes about {workload.about_s:.0f} s, {left_s:.0f} are left"
            entry = {"name": workload.name, "state": "skipped", "reason": reason}
        else:
            try:
                entry = measure(workload, device, options.output, left_s)
            except AccelmarkError as error:
                entry = {"name": workload.name, "state": "failed", "reason": str(error)}
        report.measured.append(entry)
        report.write(options.output / "gpu.json")
    show(report, console)
    console.print(f"Written to {options.output / 'gpu.json'}")
    return 0 if all(entry["state"] in ("succeeded", "skipped") for entry in report.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
