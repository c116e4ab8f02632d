"""Export finished training rounds as MLCommons log lines (``:::MLLOG``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from accelmark.results.read.rank_log import logs_of_attempts
from accelmark.results.read.round_dir import node_dirs, read_job
from accelmark.results.store.bundle import update_manifest
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PerfLogReader, PerfLogRecord

MLLOG_FILE: Final = "mllog.log"
_BEGIN: Final = "INTERVAL_START"
_END: Final = "INTERVAL_END"
_POINT: Final = "POINT_IN_TIME"
RULESET: Final = "4.0.0"
"""The last MLPerf Training rules with ResNet and BERT."""
BENCHMARKS: Final = {"resnet50": "resnet", "bert": "bert", "bert_large": "bert"}
"""Case -> MLPerf benchmark; other cases keep their name, which the MLPerf checker rejects."""
KNOWN_BENCHMARKS: Final = (
    "bert", "dlrm_dcnv2", "gnn", "gpt3", "llama2_70b_lora", "resnet", "ssd", "stable_diffusion", "unet3d",
)  # fmt: skip
"""MLPerf's benchmarks under :data:`RULESET`."""


def write_mllog(run_dir: Path, *, benchmark: str | None = None) -> list[Path]:
    """Write ``mllog.log`` into the directory of every training round that trained to its end; return the files.

    ``benchmark`` is MLPerf's name of the benchmark, by default that of the case in :data:`BENCHMARKS`, or its name.
    Raises RunError if no training round of the run did, RequestError if MLPerf has no such benchmark, or it would be
    the name of several cases.
    """
    if benchmark is not None and benchmark not in KNOWN_BENCHMARKS:
        known = nearest(benchmark, KNOWN_BENCHMARKS)
        raise RequestError(f"MLPerf Training {RULESET} has no benchmark {benchmark!r} ({known})")
    found: dict[Path, tuple[JobSpec, TrainingWork, list[PerfLogRecord]]] = {}
    for job_file in sorted(run_dir.glob("*/round*/job.json")):
        round_dir = job_file.parent
        job = read_job(round_dir)
        logs = [path for node in node_dirs(round_dir) for rank, path in node.rank_logs() if rank == 0]
        if not isinstance(job.work, TrainingWork) or not logs:
            continue
        events = _events(logs[0])
        if not any(event.event == Event.FINISHED and event.value.get("state") == "completed" for event in events):
            continue
        found[round_dir / MLLOG_FILE] = job, job.work, events
    if not found:
        raise RunError(f"{run_dir}: no training round was completed, so there is nothing to export as MLLOG")
    models = sorted({job.key.model for job, _, _ in found.values()})
    if benchmark is not None and len(models) > 1:
        cases = " and ".join(models)
        raise RequestError(
            f"{run_dir}: has {cases}, and not all are {benchmark!r}; name the benchmark of one case only"
        )
    for path, (job, work, events) in found.items():
        write_atomic(path, "".join(f"{line}\n" for line in mllog_lines(job, work, events, benchmark)))
    update_manifest(run_dir, *(path.relative_to(run_dir).as_posix() for path in found))
    return list(found)


def _events(log: Path) -> list[PerfLogRecord]:
    """Return the events of a rank, with those of earlier attempts that it continued up to their end."""
    found: list[PerfLogRecord] = []
    for attempt in logs_of_attempts(log):
        events = list(PerfLogReader(attempt))
        start = next((event.value for event in events if event.event == Event.TRAIN_START), {})
        before = found if start.get("resumed") else []
        found = [event for event in before if event.event not in (Event.TRAIN_END, Event.FINISHED)] + events
    return found


def mllog_lines(
    job: JobSpec, work: TrainingWork, events: Sequence[PerfLogRecord], benchmark: str | None = None
) -> Iterator[str]:
    """Yield the lines of one rank's events; the division is always open, since the run was not reviewed."""
    settings, model, first = work.settings, job.key.model, int(events[0].time_ms)
    started = next((event.value for event in events if event.event == Event.INIT_END), None) or {}
    submission = {
        "cache_clear": False,  # AccelMark does not clear the host's caches, which needs root
        "submission_benchmark": benchmark or BENCHMARKS.get(model, model),
        "submission_org": job.vendor,
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": f"{job.key.nnodes}x{job.key.nproc}x{job.key.hardware}",
        "seed": settings.seed,
        "global_batch_size": settings.samples_per_step(job.key.world_size),
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "opt_name": settings.optimizer.name,
        "opt_base_learning_rate": settings.optimizer.lr,
    }
    yield from (_line(key, value, first) for key, value in submission.items())
    yield _line("init_start", None, first, kind=_BEGIN)
    yield from (_line(key, started.get(key), first) for key in ("train_samples", "eval_samples"))
    yield from _training(events, work.target.metric if work.target else None, started.get("train_samples"))


def _training(events: Sequence[PerfLogRecord], metric: str | None, epoch_samples: int | None) -> Iterator[str]:
    """Yield the lines after initialisation, with a block between evaluations."""
    samples, reached, started = 0, False, False
    block: tuple[int, int] | None = None  # first sample and begin of the block
    for event in events:
        name, value, time_ms = event.event, event.value, int(event.time_ms)
        if name == Event.TRAIN_START and not started:  # a resumed run has several, the first counts
            started = True
            yield _line("init_stop", None, time_ms, kind=_END)
            yield _line("run_start", None, time_ms, kind=_BEGIN)
            block = 0, time_ms
        elif name == Event.STEP_END:
            samples = int(value["num_trained_samples"])
        elif name == Event.EVALUATE:
            began = time_ms - round(float(value["duration_s"]) * 1000)
            samples = int(value["num_trained_samples"])
            if block is not None:
                yield from _block(*block, samples, began, epoch_samples)
            epoch = _epochs(samples, epoch_samples, int(value["epoch"]) + 1)
            where: dict[str, Any] = {"samples_count": samples, "epoch_num": epoch}
            yield _line("eval_start", None, began, kind=_BEGIN, **where)
            yield _line("eval_accuracy", (value["metrics"] or {}).get(metric), time_ms, **where)
            yield _line("eval_stop", None, time_ms, kind=_END, **where)
            reached = reached or bool(value["reached"])
            block = samples, time_ms
        elif name == Event.TRAIN_END and block is not None:
            yield from _block(*block, samples, time_ms, epoch_samples)
            status = "success" if reached else "aborted"
            yield _line("run_stop", None, time_ms, kind=_END, status=status)


def _block(first: int, begin_ms: int, samples: int, end_ms: int, epoch_samples: int | None) -> Iterator[str]:
    """Yield the two lines of training from sample ``first`` to ``samples``; none where nothing was trained."""
    count = samples - first
    if count > 0:
        where: dict[str, Any] = {
            "first_epoch_num": _epochs(first, epoch_samples, 0) + 1,
            "samples_count": count,
            "epoch_count": _epochs(count, epoch_samples, 1),
        }
        yield _line("block_start", None, begin_ms, kind=_BEGIN, **where)
        yield _line("block_stop", None, end_ms, kind=_END, **where)


def _epochs(samples: int, epoch_samples: int | None, otherwise: int) -> float:
    """Return samples in epochs, as a fraction for a partial epoch."""
    if not epoch_samples:
        return otherwise
    epochs = samples / epoch_samples
    return int(epochs) if epochs == int(epochs) else round(epochs, 6)


def _line(key: str, value: Any, time_ms: int, *, kind: str = _POINT, **metadata: Any) -> str:
    record = {
        "namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
        "metadata": {"file": "accelmark", "lineno": 0, **metadata},
    }  # fmt: skip
    return f":::MLLOG {json.dumps(record)}"
