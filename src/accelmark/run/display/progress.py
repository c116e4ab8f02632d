"""Read a running job's progress from the log of rank 0 and from telemetry."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, final

from accelmark.spec.events import Event
from accelmark.spec.inference import InferStep
from accelmark.spec.job import TrainingWork, Work
from accelmark.spec.perflog import PerfLogRecord, decode_line

Phase = Literal[
    "starting", "initialising", "training", "evaluating", "finished", "creating", "validating", "exporting",
    "compiling", "inferring", "summarising",
]  # fmt: skip
_STEPS: Final[dict[InferStep, Phase]] = {
    InferStep.INITIALISE: "initialising",
    InferStep.CREATE: "creating",
    InferStep.VALIDATE: "validating",
    InferStep.EXPORT: "exporting",
    InferStep.COMPILE: "compiling",
    InferStep.INFER: "inferring",
    InferStep.SUMMARISE: "summarising",
}

_WINDOWS_OF_RATE: Final = 10
_MOST_BYTES: Final = 4 * 2**20
"""Bytes read at once; a longer backlog takes several reads."""


@final
@dataclass(frozen=True, slots=True)
class Devices:
    """The last telemetry sample of rank 0's host; null where a value cannot be read."""

    utilisation: float | None = None
    """Mean over the devices, 0 to 1."""
    power_w: float | None = None
    """Sum over the devices, or of the host where devices have none."""
    memory_used_mib: float | None = None
    cpu: float | None = None
    """Utilisation of the host's processors, 0 to 1."""
    host_memory_used_mib: float | None = None


@final
@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job at one time."""

    phase: Phase = "starting"
    step: int = 0
    total_steps: int | None = None
    """null while the settings imply no limit in steps."""
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    metric: tuple[str, float] | None = None
    """The target's metric at the last evaluation, or the first metric of that evaluation."""
    throughput: float | None = None
    """Units per second over the last windows, all ranks."""
    elapsed_s: float = 0.0
    """Raw training time as of the last event."""
    eta_s: float | None = None
    """Time to the limit (steps, samples or time) reached first at this rate; a target may be reached earlier."""
    share: float | None = None
    """Completed share of that limit, 0 to 1."""
    devices: Devices = Devices()
    warnings: tuple[str, ...] = ()


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
@dataclass(slots=True)
class ProgressReader:
    """Follows one job; each :meth:`read` reads only what was appended."""

    node_dir: Path
    """Where the files of rank 0's host are."""
    work: Work
    rank_log: Tail = field(init=False)
    telemetry: Tail = field(init=False)
    now: JobProgress = field(init=False, default=JobProgress())
    _steps_of_epoch: int | None = field(init=False, default=None)
    _recent: deque[tuple[int, float]] = field(init=False, default_factory=lambda: deque(maxlen=_WINDOWS_OF_RATE))
    _samples_before: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rank_log = Tail(self.node_dir / "rank0.out.log")
        self.telemetry = Tail(self.node_dir / "telemetry.jsonl")

    def read(self) -> JobProgress:
        """Return the current progress."""
        for event in chain.from_iterable(map(decode_line, self.rank_log.lines())):
            self._take(event)
        devices = self.now.devices
        for sample in _samples(self.telemetry.lines()):
            devices = _devices(sample)
        self.now = self._estimated(replace(self.now, devices=devices))
        return self.now

    def _take(self, event: PerfLogRecord) -> None:
        value, now = event.value, self.now
        match event.event:
            case Event.INIT_START:
                self.now = replace(now, phase="initialising")
            case Event.TRAIN_START:
                self.now = replace(now, phase="training")
            case Event.INIT_EVALUATION:
                self.now = replace(now, phase="evaluating")
            case Event.STEP_END:
                self._take_window(value)
            case Event.STAGE_BEGIN if value.get("step") in list(InferStep):
                phase = _STEPS[InferStep(str(value["step"]))]
                self.now = replace(now, phase=phase, samples=0, throughput=None)
                self._recent.clear()
            case Event.FORWARD:
                self._take_forward(value)
            case Event.EVALUATE if "phase" in value:
                self.now = replace(now, metric=self._metric(value) or now.metric)
            case Event.EVALUATE:
                elapsed = _number(value.get("elapsed_s")) or now.elapsed_s
                self.now = replace(now, phase="training", metric=self._metric(value) or now.metric, elapsed_s=elapsed)
            case Event.EPOCH_END:
                epochs = now.epoch + 1
                self._steps_of_epoch = now.step // epochs if now.step else None
            case Event.WARNING:
                self.now = replace(now, warnings=(*now.warnings, str(value.get("message") or value)))
            case Event.FINISHED:
                self.now = replace(now, phase="finished", eta_s=None)

    def _take_window(self, value: Mapping[str, Any]) -> None:
        step, samples = _number(value.get("global_steps")), _number(value.get("num_trained_samples"))
        if step is None or samples is None:
            return
        wall_s = (_number(value.get("wall_ms")) or 0.0) / 1000
        self._recent.append((int(samples) - self._samples_before, wall_s))
        self._samples_before = int(samples)
        seconds = sum(wall for _, wall in self._recent)
        units = sum(count for count, _ in self._recent) * self.work.units_per_sample
        self.now = replace(
            self.now,
            phase="training",
            step=int(step),
            epoch=int(_number(value.get("epoch")) or 0),
            samples=int(samples),
            loss=_number(value.get("loss")),
            throughput=units / seconds if seconds > 0 else None,
            elapsed_s=self.now.elapsed_s + wall_s,
        )

    def _take_forward(self, value: Mapping[str, Any]) -> None:
        """Take a window of inference: items, and items per second."""
        items = value.get("items")
        wall_s = (_number(value.get("wall_ms")) or 0.0) / 1000
        if not isinstance(items, list) or not all(isinstance(count, int) for count in items):
            return
        self._recent.append((sum(items), wall_s))
        seconds = sum(wall for _, wall in self._recent)
        rate = sum(count for count, _ in self._recent) / seconds if seconds > 0 else None
        self.now = replace(self.now, samples=self.now.samples + sum(items), throughput=rate)

    def _metric(self, value: Mapping[str, Any]) -> tuple[str, float] | None:
        metrics = value.get("metrics")
        if not isinstance(metrics, dict):
            return None
        wanted = self.work.target.metric if isinstance(self.work, TrainingWork) and self.work.target else None
        numbers = {name: number for name, found in metrics.items() if (number := _number(found)) is not None}
        name = wanted if wanted in numbers else next(iter(numbers), None)
        return (name, numbers[name]) if name is not None else None

    def _estimated(self, now: JobProgress) -> JobProgress:
        """Fill in completed share and remaining time, from the limit that is reached first at this rate."""
        if not isinstance(self.work, TrainingWork) or now.phase == "finished" or now.step == 0:
            return now
        end = self.work.settings.end
        total = end.max_steps
        if end.max_epochs is not None and self._steps_of_epoch is not None:
            steps = end.max_epochs * self._steps_of_epoch
            total = steps if total is None else min(total, steps)
        if end.max_samples is not None:
            steps = -(-end.max_samples * now.step // max(1, now.samples))
            total = steps if total is None else min(total, steps)
        left: list[tuple[float, float]] = []
        rate = now.throughput / self.work.units_per_sample if now.throughput else None
        if total is not None and rate:
            samples_left = max(0, total - now.step) * now.samples / now.step
            left.append((samples_left / rate, min(1.0, now.step / total)))
        if end.max_duration_s is not None:
            left.append((max(0.0, end.max_duration_s - now.elapsed_s), min(1.0, now.elapsed_s / end.max_duration_s)))
        eta_s, share = min(left, default=(None, None))
        return replace(now, total_steps=total, eta_s=eta_s, share=share)


def _samples(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("host"), dict):
            yield found


def _devices(sample: dict[str, Any]) -> Devices:
    devices = [device for device in sample.get("devices") or [] if isinstance(device, dict)]
    utilisation = _numbers(devices, "utilisation")
    power = _numbers(devices, "power_w")
    memory = _numbers(devices, "memory_used_mib")
    host = sample["host"]
    return Devices(
        utilisation=sum(utilisation) / len(utilisation) if utilisation else None,
        power_w=sum(power) if power else _number(host.get("power_w")),
        memory_used_mib=sum(memory) if memory else None,
        cpu=_number(host.get("cpu")),
        host_memory_used_mib=_number(host.get("mem_used_mib")),
    )


def _numbers(devices: list[dict[str, Any]], name: str) -> list[float]:
    return [number for device in devices if (number := _number(device.get(name))) is not None]


def _number(found: object) -> float | None:
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
