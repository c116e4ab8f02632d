"""Read a running job's progress from the log of rank 0 and from telemetry."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

from pydantic import ValidationError

from accelmark.results.read.rank_log import warning_text
from accelmark.spec.job import InferJob, TrainingWork, Work
from accelmark.spec.log.events import Evaluation, Event, StepWindow
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, InferEvaluation, LoadProgress, Phase
from accelmark.spec.log.perflog import PerfLogRecord, decode_line
from accelmark.spec.model import json_objects
from accelmark.spec.number_format import digits, subtracted
from accelmark.spec.settings.inference import InferStep

_PHASES: Final[Mapping[str, str]] = {
    Event.INIT_START: "initialising",
    Event.INIT_EVALUATION: "evaluating",
    Event.FINISHED: "finished",
}
_STEPS: Final[Mapping[str, str]] = {
    InferStep.INITIALISE: "initialising",
    InferStep.CREATE: "creating",
    InferStep.VALIDATE: "validating",
    InferStep.EXPORT: "exporting",
    InferStep.COMPILE: "compiling",
    InferStep.INFER: "inferring",
    InferStep.SUMMARISE: "summarising",
}
_INPUTS: Final[Mapping[Phase, str]] = {
    "validation": " (framework, data as published)",
    "inference": " (engine, all passes)",
}
"""What computes a metric of inference, and over which inputs, in the words of the figures' titles."""
_BEGUN: Final[Mapping[str, Any]] = {"samples": 0, "throughput": None, "share": None, "eta_s": None}
"""Progress at the beginning of a step of inference, and after its passes."""
_WINDOWS_OF_RATE: Final = 10
_MOST_BYTES: Final = 4 * 2**20
"""Bytes read at once; a longer backlog takes several reads."""


@final
@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The last telemetry sample of rank 0's host; null where a value cannot be read."""

    utilisation: float | None = None
    """Mean over the devices, 0 to 1; null where these are the host's processors."""
    power_w: float | None = None
    """Sum over the devices, or of the host where devices have none."""
    memory_used_mib: float | None = None
    cpu: float | None = None
    """Utilisation of the host's processors, 0 to 1."""
    rank_memory_mib: float | None = None
    """Resident memory of the host's ranks."""


@final
@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job at one time."""

    phase: str = "starting"
    step: int = 0
    total_steps: int | None = None
    """null while the settings imply no limit in steps."""
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    metric: tuple[str, float] | None = None
    """The metric of the target or of the inference at the last evaluation, or the first metric of that evaluation. The
    names of inference say what computed it, over which inputs, except where ``framework_metric`` is known."""
    framework_metric: float | None = None
    """The same metric of the framework over the same inputs as the engine's."""
    throughput: float | None = None
    """Units per second over the last windows, all ranks."""
    elapsed_s: float = 0.0
    """Raw training time as of the last event."""
    eta_s: float | None = None
    """Time to the limit (steps, samples or time) reached first at this rate, or to the end of the engine's passes or
    of the load; a target may be reached earlier."""
    share: float | None = None
    """Completed share of that limit, 0 to 1."""
    devices: DeviceLoad = DeviceLoad()
    warnings: tuple[str, ...] = ()

    @property
    def metric_text(self) -> str:
        """The value of ``metric``, with the framework's where that is over the same inputs; empty without a metric."""
        return "" if self.metric is None else metric_text(self.metric[1], self.framework_metric)


def metric_text(metric: float, framework: float | None) -> str:
    """Return a metric and, where it is known, the framework's over the same inputs, so that they can be subtracted."""
    if framework is None:
        return digits(metric)
    engine, other, _ = subtracted(metric, framework)
    return f"{engine}, framework {other} on the same inputs"


@final
class Tail:
    """Reads complete lines appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def lines(self) -> list[str]:
        """Return the lines completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [line.decode("utf-8", errors="backslashreplace") for line in whole]


@final
class ProgressReader:
    """Follows one job; each :meth:`read` reads only what was appended.

    Args:
        node_dir: where the files of rank 0's host are.
    """

    def __init__(self, node_dir: Path, work: Work) -> None:
        self._work = work
        self._rank_log = Tail(node_dir / "rank0.out.log")
        self._telemetry = Tail(node_dir / "telemetry.jsonl")
        self._devices_are_cpus = False
        self._now = JobProgress()
        self._total_steps: int | None = None
        """As rank 0 reports it when training starts."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOWS_OF_RATE)
        """Samples or items of the last windows, and their durations in seconds."""

    def read(self) -> JobProgress:
        """Return the current progress."""
        for event in chain.from_iterable(map(decode_line, self._rank_log.lines())):
            with contextlib.suppress(ValidationError):
                self._now = replace(self._now, **self._changes(event))
        devices = self._now.devices
        for line in json_objects(self._telemetry.lines()):
            if isinstance(line.get("header"), dict):
                self._devices_are_cpus = bool(line["header"].get("devices_are_cpus"))
            elif isinstance(line.get("host"), dict):
                devices = _devices(line, are_cpus=self._devices_are_cpus)
        self._now = replace(self._now, devices=devices, **self._estimates())
        return self._now

    def _changes(self, event: PerfLogRecord) -> dict[str, Any]:
        """Return what an event changes. Raises ValidationError where it is not as AccelMark writes it."""
        now, value, work = self._now, event.value, self._work

        def metric_of(metrics: Mapping[str, float | None], inputs: str = "") -> dict[str, Any]:
            target = work.target if isinstance(work, TrainingWork) else None
            wanted = work.metric if isinstance(work, InferJob) else target.metric if target is not None else None
            numbers = {name: number for name, number in metrics.items() if number is not None}
            name = wanted if wanted in numbers else next(iter(numbers), None)
            return {"metric": (f"{name}{inputs}", numbers[name]), "framework_metric": None} if name is not None else {}

        match event.event:
            case Event.STEP_END:
                window = event.value_as(StepWindow)
                num_steps = len(window.losses) if window.num_steps is None else window.num_steps
                # A resumed round has a new log, in which samples before its checkpoint are counted, too.
                rate = self._rate(window.num_trained_samples * num_steps / window.global_steps, window.wall_ms)
                return {
                    "phase": "training",
                    "step": window.global_steps,
                    "epoch": window.epoch,
                    "samples": window.num_trained_samples,
                    "loss": window.loss,
                    "throughput": rate * work.units_per_sample if rate is not None else None,
                    "elapsed_s": now.elapsed_s + window.wall_ms / 1000,
                }
            case Event.TRAIN_START:
                total = value.get("total_steps")
                self._total_steps = total if isinstance(total, int) else None
                return {"phase": "first steps"}  # a framework that compiles does so in them
            case Event.EVALUATE if "phase" in value:
                evaluated = event.value_as(InferEvaluation)
                return {**_BEGUN, **metric_of(evaluated.metrics, _INPUTS[evaluated.phase])}
            case Event.ANSWER_CHECK:
                answers = event.value_as(AnswerCheck)
                shown = metric_of(answers.engine_metrics)
                if shown:
                    shown["framework_metric"] = answers.framework_metrics.get(shown["metric"][0])
                return shown
            case Event.EVALUATE:
                evaluation = event.value_as(Evaluation)
                return {"phase": "training", "elapsed_s": evaluation.elapsed_s, **metric_of(evaluation.metrics)}
            case Event.STAGE_BEGIN if str(value.get("step")) in _STEPS:
                self._recent.clear()
                return {**_BEGUN, "phase": _STEPS[str(value["step"])]}
            case Event.FORWARD:
                forward = event.value_as(ForwardWindow)
                items, rate = sum(forward.items), self._rate(sum(forward.items), forward.wall_ms)
                changes: dict[str, Any] = {"samples": now.samples + items, "throughput": rate}
                if forward.planned_items and rate:
                    left = max(0, forward.planned_items - now.samples - items)
                    changes |= {"share": 1 - left / forward.planned_items, "eta_s": left / rate}
                return changes
            case Event.HEARTBEAT if "phase" in value:
                load = event.value_as(LoadProgress)
                return {"phase": load.phase, "samples": load.num_requests, "share": load.share, "eta_s": load.eta_s}
            case Event.WARNING | Event.BAD_SAMPLE:
                return {"warnings": (*now.warnings, warning_text(value))}
            case name if name in _PHASES:
                return {"phase": _PHASES[name]}
        return {}

    def _rate(self, num_items: float, wall_ms: float) -> float | None:
        """Add a window, and return the samples or items per second over the last windows."""
        self._recent.append((num_items, wall_ms / 1000))
        seconds = sum(wall_s for _, wall_s in self._recent)
        return sum(count for count, _ in self._recent) / seconds if seconds > 0 else None

    def _estimates(self) -> dict[str, Any]:
        """Return completed share and remaining time, from the limit that is reached first at this rate."""
        now = self._now
        if now.phase == "finished":
            return {"eta_s": None, "share": None}
        if not isinstance(self._work, TrainingWork) or now.step == 0:
            return {}
        end = self._work.settings.end
        total = self._total_steps if self._total_steps is not None else end.max_steps
        left: list[tuple[float, float]] = []
        rate = now.throughput / self._work.units_per_sample if now.throughput else None
        if total is not None and rate:
            samples_left = max(0, total - now.step) * now.samples / now.step
            left.append((samples_left / rate, min(1.0, now.step / total)))
        if end.max_duration_s is not None:
            left.append((max(0.0, end.max_duration_s - now.elapsed_s), min(1.0, now.elapsed_s / end.max_duration_s)))
        eta_s, share = min(left, default=(None, None))
        return {"total_steps": total, "eta_s": eta_s, "share": share}


def _devices(sample: dict[str, Any], *, are_cpus: bool) -> DeviceLoad:
    devices = [device for device in sample.get("devices") or [] if isinstance(device, dict)]
    utilisation, power, memory = (
        [float(device[name]) for device in devices if isinstance(device.get(name), (int, float))]
        for name in ("utilisation", "power_w", "memory_used_mib")
    )
    host = {name: value for name, value in sample["host"].items() if isinstance(value, (int, float))}
    return DeviceLoad(
        utilisation=sum(utilisation) / len(utilisation) if utilisation and not are_cpus else None,
        power_w=sum(power) if power else host.get("power_w"),
        memory_used_mib=sum(memory) if memory else None,
        cpu=host.get("cpu"),
        rank_memory_mib=host.get("rank_rss_mib"),
    )
