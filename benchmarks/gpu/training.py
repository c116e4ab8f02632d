"""Training items: a run file, ``accelmark run``, and the steady figures from the rank's events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.spec.log.perflog import PerfLogReader
from benchmarks.gpu.session import ItemError, Session

_FIGURES: Final = ("throughput_whole", "mfu", "mfu_measured", "peak_device_memory_mib", "mean_power_w", "energy_j")
_FIGURES_OF_STEPS: Final = (
    "step_p50_ms",
    "step_p99_ms",
    "data_wait_share",
    "final_loss",
    "final_metric",
    "init_time_s",
)

RESNET: Final = {"end.max_epochs": None, "end.max_steps": 300, "log_every_steps": 20, "checkpoint.every_steps": None}
LLAMA: Final = {"log_every_steps": 5, "schedule.warmup_steps": 5}
TINY_RESNET: Final = {f"model.stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)} | {
    "model.image_size": 32,
    "batch_size": 4,
    "end.max_steps": 9,
    "log_every_steps": 3,
}
TINY_LLAMA: Final = {
    "model.vocab_size": 100,
    "model.hidden_size": 128,
    "model.intermediate_size": 256,
    "model.num_layers": 2,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.seq_length": 32,
    "batch_size": 2,
    "end.max_steps": 9,
    "log_every_steps": 3,
}


def llama(hidden: int, intermediate: int, layers: int, length: int) -> dict[str, Any]:
    """Return the settings of a Llama of this size, its heads 128 wide."""
    heads = hidden // 128
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers, "seq_length": length}
    return {f"model.{name}": value for name, value in (sizes | {"num_heads": heads, "num_kv_heads": heads}).items()}


LLAMA_1B: Final = {**LLAMA, **llama(2048, 5504, 24, 2048), "end.max_steps": 60}
"""1.3 billion parameters."""
LLAMA_3B: Final = {**LLAMA, **llama(2560, 6912, 32, 2048), "end.max_steps": 40}
"""2.7 billion parameters."""


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """A training run, on made-up data unless ``data`` names a part of the data directory."""

    case: str
    settings: Mapping[str, Any]
    rounds: int = 1
    data: str | None = None
    is_open: bool = True
    framework: str = "pytorch"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are not replaced with ``--tiny``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks; they take precedence over the vendor's."""

    def settings_for(self, session: Session) -> dict[str, Any]:
        """Return the settings, at toy size with ``--tiny``."""
        settings = dict(self.settings)
        if session.tiny and self.is_open:
            settings |= {"resnet50": TINY_RESNET, "llama2_7b": TINY_LLAMA}.get(self.case, {})
            if settings.get("precision") == "fp8":
                settings["precision"] = "bf16"  # planning refuses FP8 on a CPU
        settings |= self.fixed
        return settings if self.data is not None else {"loader.synthetic": True, **settings}


def train(session: Session, name: str, workload: Workload, *, data: Path | None = None) -> dict[str, Any]:
    """Carry out a workload under full telemetry and return its figures.

    Raises:
        ItemError: the run failed.
    """
    if workload.data is not None and data is None:
        data = session.data / workload.data if session.data is not None else None
    directory = session.work / name
    run_file = session.work / f"{name}.run.json"
    key = f"{workload.case}:{workload.framework}:{session.device.hardware}:1:1:{workload.rounds}"
    case: dict[str, Any] = {"key": key, "settings": workload.settings_for(session)}
    case |= {} if data is None else {"data": str(data.absolute())}
    request = {"name": f"gpu-{name}", "open": workload.is_open, "telemetry_interval_s": 0.5, "cases": [case]}
    if workload.environment:
        request["cluster"] = {"environment": dict(workload.environment)}
    run_file.write_text(json.dumps(request, indent=1), encoding="utf-8")
    arguments = ["accelmark", "run", str(run_file), "--out", str(directory)]
    # A run whose verdict is INVALID ends with 1 and still has figures.
    session.python(name, *arguments, "--timeout", f"{max(20.0, session.left_s() - 30):.0f}", expect=(0, 1))
    if not (directory / "summary.json").is_file():
        raise ItemError(f"accelmark run wrote no summary.json: {session.errors(name)}")
    return read_run(directory)


def read_run(directory: Path) -> dict[str, Any]:
    """Return the verdict of a run directory with its rounds' figures.

    Raises:
        ItemError: it was not completed.
    """
    path = directory / "summary.json"
    if not path.is_file():
        raise ItemError(f"{directory} has no summary.json")
    case = json.loads(path.read_text(encoding="utf-8"))["cases"][0]
    rounds = [read_round(path.parent) for path in sorted(directory.glob("*/round*/result.json"))]
    if case["state"] != "succeeded":
        raise ItemError("; ".join([*case["reasons"], *(entry["reason"] or "" for entry in rounds)])[:1000])
    return {"verdict": case["verdict"], "reasons": case["reasons"], "unit": case["unit"], "rounds": rounds}


def read_round(directory: Path) -> dict[str, Any]:
    """Return the figures of a round, null ones with their reasons, and its steady figures."""
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    figures = {name: result["figures"].get(name) for name in (*_FIGURES, *_FIGURES_OF_STEPS)}
    entry = {"state": result["state"], "reason": result["reason"], "precision": result["precision"]}
    return {**entry, "steady": steady(directory, result), "figures": figures}


def events_of(directory: Path, name: str) -> list[Mapping[str, Any]]:
    """Return the values of all such events of rank 0."""
    logs = sorted(directory.glob("*/rank0.out.log"))
    return [record.value for path in logs for record in PerfLogReader(path) if record.event == name]


def steady(directory: Path, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return step time, rate and MFU of the last two thirds of the steps; None where there are too few.

    Times are those of the device's own events from the first step of each window to its last, so that they do not
    depend on how far the host runs ahead.
    """
    windows = events_of(directory, "STEP_END")
    if not windows:
        return None
    late = [one for one in windows if one["global_steps"] - len(one["step_ms"]) >= windows[-1]["global_steps"] / 3]
    num_steps = sum(len(one["step_ms"]) for one in late)
    if not num_steps:
        return None
    step_ms = sum(one["span_ms"] for one in late) / num_steps
    job = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    work = job["work"]
    samples = work["settings"]["batch_size"] * work["settings"]["gradient_accumulation_steps"]
    flops = result["figures"]["flops_per_sample"].get("value")
    tflops = None if flops is None else flops * samples / step_ms / 1e9
    peak = ((result["chip"] or {}).get("peaks") or {}).get(result["precision"])
    return {
        "step_ms": step_ms,
        "units_per_s": samples * work["units_per_sample"] / step_ms * 1000,
        "tflops": tflops,
        "mfu": tflops / peak if tflops is not None and peak else None,
    }
