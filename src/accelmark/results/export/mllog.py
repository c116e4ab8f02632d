"""Export finished training rounds as MLCommons log lines (``:::MLLOG``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.results.read.round_dir import node_dirs, read_job
from accelmark.results.store.files import write_atomic
from accelmark.results.store.manifest import update_manifest
from accelmark.spec.errors import RunError
from accelmark.spec.events import Event
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.perflog import PerfLogReader, PerfLogRecord

MLLOG_FILE: Final = "mllog.log"
_BEGIN: Final = "INTERVAL_START"
_END: Final = "INTERVAL_END"
_POINT: Final = "POINT_IN_TIME"
RULESET: Final = "4.0.0"
"""The last MLPerf Training rules with ResNet and BERT."""
BENCHMARKS: Final = {"resnet50": "resnet", "bert": "bert", "bert_large": "bert"}
"""Case -> MLPerf benchmark; other cases keep their name, which the MLPerf checker rejects."""


def write_mllog(run_dir: Path, *, benchmark: str | None = None) -> list[Path]:
    """Write ``mllog.log`` into the directory of every finished training round; return the files.

    Args:
        run_dir: the run.
        benchmark: MLPerf's name of the benchmark; None for the case's benchmark in :data:`BENCHMARKS`, or its name.

    Raises:
        RunError: no training round of the run finished.
    """
    written = []
    for job_file in sorted(run_dir.glob("*/round*/job.json")):
        round_dir = job_file.parent
        job = read_job(round_dir)
        logs = [path for node in node_dirs(round_dir) for rank, path in node.rank_logs() if rank == 0]
        if not isinstance(job.work, TrainingWork) or not logs:
            continue
        events = list(PerfLogReader(logs[0]))
        if not any(event.event == Event.FINISHED for event in events):
            continue
        path = round_dir / MLLOG_FILE
        write_atomic(path, "".join(f"{line}\n" for line in mllog_lines(job, job.work, events, benchmark)))
        written.append(path)
    if not written:
        raise RunError(f"{run_dir}: no training round finished, so there is nothing to export as MLLOG")
    update_manifest(run_dir, *(path.relative_to(run_dir).as_posix() for path in written))
    return written


def mllog_lines(
    job: JobSpec, work: TrainingWork, events: Sequence[PerfLogRecord], benchmark: str | None = None
) -> Iterator[str]:
    """Yield the lines of one rank's events; the division is always open, since the run was not reviewed."""
    settings = work.settings
    first, started = int(events[0].time_ms), _started(events)
    model = job.key.model
    # AccelMark does not clear the host's caches, which needs root.
    yield _line("cache_clear", False, first)
    yield _line("submission_benchmark", benchmark or BENCHMARKS.get(model, model), first)
    yield _line("submission_org", job.vendor, first)
    yield _line("submission_division", "open", first)
    yield _line("submission_status", "research", first)
    yield _line("submission_platform", f"{job.key.nnodes}x{job.key.nproc}x{job.key.hardware}", first)
    yield _line("seed", settings.seed, first)
    batch = settings.batch_size * settings.gradient_accumulation_steps * job.key.world_size
    yield _line("global_batch_size", batch, first)
    yield _line("gradient_accumulation_steps", settings.gradient_accumulation_steps, first)
    yield _line("opt_name", settings.optimizer.name, first)
    yield _line("opt_base_learning_rate", settings.optimizer.lr, first)
    yield _line("init_start", None, first, kind=_BEGIN)
    yield _line("train_samples", started.get("train_samples"), first)
    yield _line("eval_samples", started.get("eval_samples"), first)
    metric = work.target.metric if work.target else None
    yield from _training(events, metric, started.get("train_samples"))


def _training(events: Sequence[PerfLogRecord], metric: str | None, epoch_samples: int | None) -> Iterator[str]:
    """Yield the lines after initialisation, with a block between evaluations."""
    samples, reached, started = 0, False, False
    block: _Block | None = None
    for event in events:
        name, value, time_ms = event.event, event.value, int(event.time_ms)
        if name == Event.TRAIN_START and not started:  # a resumed run has several, the first counts
            started = True
            yield _line("init_stop", None, time_ms, kind=_END)
            yield _line("run_start", None, time_ms, kind=_BEGIN)
            block = _Block(0, time_ms)
        elif name == Event.STEP_END:
            samples = int(value["num_trained_samples"])
        elif name == Event.EVALUATE:
            began = time_ms - round(float(value["duration_s"]) * 1000)
            samples = int(value["num_trained_samples"])
            if block is not None:
                yield from block.lines(samples, began, epoch_samples)
            where: dict[str, Any] = {"samples_count": samples}
            where["epoch_num"] = _epochs(samples, epoch_samples, int(value["epoch"]) + 1)
            yield _line("eval_start", None, began, kind=_BEGIN, **where)
            yield _line("eval_accuracy", (value["metrics"] or {}).get(metric), time_ms, **where)
            yield _line("eval_stop", None, time_ms, kind=_END, **where)
            reached = reached or bool(value["reached"])
            block = _Block(samples, time_ms)
        elif name == Event.TRAIN_END and block is not None:
            yield from block.lines(samples, time_ms, epoch_samples)
            status = "success" if reached else "aborted"
            yield _line("run_stop", None, time_ms, kind=_END, status=status)


@final
@dataclass(frozen=True, slots=True)
class _Block:
    """Training between two evaluations."""

    first_sample: int
    begin_ms: int

    def lines(self, samples: int, end_ms: int, epoch_samples: int | None) -> Iterator[str]:
        """Yield its two lines; none where nothing was trained."""
        count = samples - self.first_sample
        if count <= 0:
            return
        where: dict[str, Any] = {
            "first_epoch_num": _epochs(self.first_sample, epoch_samples, 0) + 1,
            "samples_count": count,
        }
        where["epoch_count"] = _epochs(count, epoch_samples, 1)
        yield _line("block_start", None, self.begin_ms, kind=_BEGIN, **where)
        yield _line("block_stop", None, end_ms, kind=_END, **where)


def _epochs(samples: int, epoch_samples: int | None, otherwise: int) -> float:
    """Return samples in epochs, as a fraction for a partial epoch."""
    if not epoch_samples:
        return otherwise
    epochs = samples / epoch_samples
    return int(epochs) if epochs == int(epochs) else round(epochs, 6)


def _started(events: Sequence[PerfLogRecord]) -> Mapping[str, Any]:
    return next((event.value for event in events if event.event == Event.INIT_END), None) or {}


def _line(key: str, value: Any, time_ms: int, *, kind: str = _POINT, **metadata: Any) -> str:
    record = {
        "namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
        "metadata": {"file": "accelmark", "lineno": 0, **metadata},
    }  # fmt: skip
    return f":::MLLOG {json.dumps(record)}"
