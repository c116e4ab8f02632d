"""MLCommons' log lines (``:::MLLOG``) of a finished round, written from its PerfLog events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from accelmark.results.files import write_atomic
from accelmark.results.round_state import node_dirs
from accelmark.results.rounds import read_job
from accelmark.results.store import update_manifest
from accelmark.spec.errors import RunError
from accelmark.spec.events import PERFLOG_PREFIX
from accelmark.spec.job import JobSpec

MLLOG_FILE: Final = "mllog.log"
RULESET: Final = "4.0.0"
"""The last MLPerf Training rules that still have ResNet and BERT."""
BENCHMARKS: Final = {"resnet50": "resnet", "bert": "bert"}
"""Cases that are an MLPerf benchmark's model; others keep their own name, which the checker does not know."""


def write_mllog(run_dir: Path) -> list[Path]:
    """Write ``mllog.log`` beside the results of every finished training round; return the files.

    Raises:
        RunError: no training round of the run finished.
    """
    written = []
    for job_file in sorted(run_dir.glob("*/round*/job.json")):
        round_dir = job_file.parent
        job = read_job(round_dir)
        logs = [path for node in node_dirs(round_dir) for rank, path in node.rank_logs() if rank == 0]
        if job.train is None or not logs:
            continue
        events = list(_events(logs[0]))
        if not any(event["event"] == "FINISHED" for event in events):
            continue
        path = round_dir / MLLOG_FILE
        write_atomic(path, "".join(f"{line}\n" for line in mllog_lines(job, events)))
        written.append(path)
    if not written:
        raise RunError(f"{run_dir}: no training round of it finished, so there is nothing for MLLOG")
    update_manifest(run_dir, *(path.relative_to(run_dir).as_posix() for path in written))
    return written


def mllog_lines(job: JobSpec, events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of one rank's events; the division is always open, since no one has reviewed the run."""
    assert job.train is not None  # noqa: S101  the caller left inference out
    settings = job.train.settings
    metric = job.train.target.metric if job.train.target else None
    batch = settings.batch_size * settings.gradient_accumulation_steps * job.key.world_size
    first = _time(events[0])
    model = job.key.model
    yield _line("cache_clear", True, first)
    yield _line("submission_benchmark", BENCHMARKS.get(model, model), first)
    yield _line("submission_org", job.vendor, first)
    yield _line("submission_division", "open", first)
    yield _line("submission_status", "research", first)
    yield _line("submission_platform", f"{job.key.nnodes}x{job.key.nproc}x{job.key.hardware}", first)
    yield _line("seed", settings.seed, first)
    yield _line("global_batch_size", batch, first)
    yield _line("gradient_accumulation_steps", settings.gradient_accumulation_steps, first)
    yield _line("opt_name", settings.optimizer.name, first)
    yield _line("opt_base_learning_rate", settings.optimizer.lr, first)
    yield _line("init_start", None, first, kind="INTERVAL_START")
    # MLCommons means the sizes of the data sets here, which a rank does not tell.
    yield _line("train_samples", None, first)
    yield _line("eval_samples", None, first)
    samples, epoch, reached = 0, 1, False
    for event in events:
        name, value, time_ms = event["event"], event["value"], _time(event)
        if name == "TRAIN_START":
            yield _line("init_stop", None, time_ms, kind="INTERVAL_END")
            yield _line("run_start", None, time_ms, kind="INTERVAL_START")
            yield _line("block_start", None, time_ms, kind="INTERVAL_START", first_epoch_num=1, epoch_count=1)
        elif name == "STEP_END":
            samples = int(value["num_trained_samples"])
        elif name == "EVALUATE":
            epoch = int(value["epoch"]) + 1
            began = time_ms - round(float(value["duration_s"]) * 1000)
            where: dict[str, Any] = {"epoch_num": epoch, "samples_count": samples}
            yield _line("eval_start", None, began, kind="INTERVAL_START", **where)
            yield _line("eval_accuracy", (value["metrics"] or {}).get(metric), time_ms, **where)
            yield _line("eval_stop", None, time_ms, kind="INTERVAL_END", **where)
            reached = reached or bool(value["reached"])
        elif name == "TRAIN_END":
            yield _line("block_stop", None, time_ms, kind="INTERVAL_END", first_epoch_num=1, epoch_count=epoch)
            status = "success" if reached else "aborted"
            yield _line("run_stop", None, time_ms, kind="INTERVAL_END", status=status)


def _line(key: str, value: Any, time_ms: int, *, kind: str = "POINT_IN_TIME", **metadata: Any) -> str:
    record = {
        "namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
        "metadata": {"file": "accelmark", "lineno": 0, **metadata},
    }  # fmt: skip
    return f":::MLLOG {json.dumps(record)}"


def _time(event: dict[str, Any]) -> int:
    return int(event["metadata"]["time_ms"])


def _events(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a rank's log."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(PERFLOG_PREFIX):
                continue
            try:
                record = json.loads(line.removeprefix(PERFLOG_PREFIX))
            except ValueError:
                continue
            if isinstance(record, dict) and {"event", "value", "metadata"} <= set(record):
                yield record
