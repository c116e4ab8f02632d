"""Export finished rounds: as MLCommons log lines, FlagPerf's events, TensorBoard event files and MLflow runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from accelmark.results.read.rank_log import logs_of_attempts
from accelmark.results.read.round_dir import rank_logs, read_job
from accelmark.results.schema import RoundResult
from accelmark.results.store.bundle import update_manifest
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.results.store.loaded_run import RESULT_FILE, SUMMARY_FILE, LoadedRun
from accelmark.spec.errors import RequestError, RunError, nearest, raising
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PerfLogReader, PerfLogRecord, encode_line
from accelmark.spec.plugins.requirements import require
from accelmark.spec.secret import secrets_in, without

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


def write_mllog(run_dir: Path, *, benchmark: str | None = None) -> list[Path]:
    """Write ``mllog.log`` into the directory of every training round that trained to its end; return the files.

    ``benchmark`` is MLPerf's name of the benchmark; default: the case's entry in :data:`BENCHMARKS`, or its name.
    Raises RunError if no training round of the run did, RequestError if MLPerf has no such benchmark, or it would be
    the name of several cases.
    """
    if benchmark is not None and benchmark not in KNOWN_BENCHMARKS:
        known = nearest(benchmark, KNOWN_BENCHMARKS)
        raise RequestError(f"MLPerf Training {RULESET} has no benchmark {benchmark!r} ({known})")
    exported: dict[Path, tuple[JobSpec, TrainingWork, list[PerfLogRecord]]] = {}
    for job_file in sorted(run_dir.glob("*/round*/job.json")):
        job, logs = read_job(job_file.parent), rank_logs(job_file.parent)
        if isinstance(job.work, TrainingWork) and 0 in logs:
            events = _events(logs[0])
            if any(event.event == Event.FINISHED and event.value.get("state") == "completed" for event in events):
                exported[job_file.with_name("mllog.log")] = job, job.work, events
    if not exported:
        raise RunError(f"{run_dir}: no training round was completed, so there is nothing to export as MLLOG")
    models = sorted({job.key.model for job, _, _ in exported.values()})
    if benchmark is not None and len(models) > 1:
        raise RequestError(
            f"{run_dir}: has {' and '.join(models)}, and not all are {benchmark!r}; name the benchmark of one case only"
        )
    for path, (job, work, events) in exported.items():
        write_atomic(path, "".join(f"{line}\n" for line in mllog_lines(job, work, events, benchmark)))
    update_manifest(run_dir, *(path.relative_to(run_dir).as_posix() for path in exported))
    return list(exported)


def _events(log: Path) -> list[PerfLogRecord]:
    kept: list[PerfLogRecord] = []
    for attempt in logs_of_attempts(log):
        events = list(PerfLogReader(attempt))
        start = next((event.value for event in events if event.event == Event.TRAIN_START), {})
        before = kept if start.get("resumed") else []
        kept = [event for event in before if event.event not in (Event.TRAIN_END, Event.FINISHED)] + events
    return kept


def mllog_lines(job: JobSpec, work: TrainingWork, events: list[PerfLogRecord], benchmark: str | None) -> Iterator[str]:
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
    metric, epoch_samples = work.target.metric if work.target else None, started.get("train_samples")
    samples, reached, began_training = 0, False, False
    block: tuple[int, int] | None = None  # between evaluations: first sample and begin
    for event in events:
        name, value, time_ms = event.event, event.value, int(event.time_ms)
        if name == Event.TRAIN_START and not began_training:  # a resumed run has several, the first counts
            began_training = True
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
            yield _line("run_stop", None, time_ms, kind=_END, status="success" if reached else "aborted")


def _block(first: int, begin_ms: int, samples: int, end_ms: int, epoch_samples: int | None) -> Iterator[str]:
    count = samples - first
    if count > 0:
        where: dict[str, Any] = {"first_epoch_num": _epochs(first, epoch_samples, 0) + 1, "samples_count": count}
        where["epoch_count"] = _epochs(count, epoch_samples, 1)
        yield _line("block_start", None, begin_ms, kind=_BEGIN, **where)
        yield _line("block_stop", None, end_ms, kind=_END, **where)


def _epochs(samples: int, epoch_samples: int | None, otherwise: int) -> float:
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


def write_flagperf_logs(run_dir: Path) -> list[Path]:
    """Write ``rank<R>.flagperf.log``, with FlagPerf's names in addition, next to the log of each training rank."""
    written: list[Path] = []
    for job_file in sorted(run_dir.glob("*/round*/job.json")):
        work = read_job(job_file.parent).work
        for rank, log in rank_logs(job_file.parent).items() if isinstance(work, TrainingWork) else ():
            path = log.with_name(f"rank{rank}.flagperf.log")
            write_atomic(path, "".join(f"{line}\n" for line in _flagperf_lines(_events(log), work.unit)))
            written.append(path)
    if not written:
        raise RunError(f"{run_dir}: has no training round, so there are no events of FlagPerf's")
    update_manifest(run_dir, *(path.relative_to(run_dir).as_posix() for path in written))
    return written


def _flagperf_lines(events: Sequence[PerfLogRecord], unit: str) -> Iterator[str]:
    last = max((number for number, event in enumerate(events) if event.event == Event.STEP_END), default=None)
    samples = 0
    for number, event in enumerate(events):
        value = dict(event.value)
        if event.event == Event.STEP_END:
            trained, wall_ms = value["num_trained_samples"] - samples, value["wall_ms"]
            value |= {"seq/s": trained / wall_ms * 1000 if wall_ms else None, "end_training": number == last}
            samples += trained
        elif event.event == Event.FINISHED:
            value[f"training_{unit}s_per_second"] = value.get("throughput_raw")
            value |= {f"final_{name}": metric for name, metric in value.get("final_metrics", {}).items()}
        where = {"file": "accelmark", "lineno": 0, "time_ms": event.time_ms, "mono_ms": event.mono_ms}
        yield encode_line(event.event, value, where | {"rank": event.rank})


def _rounds(run: LoadedRun) -> Iterator[tuple[str, RoundResult, dict[str, str], dict[str, str]]]:
    """Yield the directory of every readable round of a run, its result, its settings and its tags."""
    named = ((case, name) for case in run.summary.cases for name in case.rounds if name in run.rounds)
    for case, name in named:
        result = run.rounds[name]
        tags = {
            "accelmark.run": run.summary.run, "accelmark.key": str(result.key), "accelmark.round": str(result.round),
            "accelmark.verdict": case.verdict, "accelmark.state": result.state, "accelmark.vendor": result.vendor,
            "accelmark.case_version": str(result.case_version), "accelmark.marks": ", ".join(result.marks),
            "accelmark.version": run.summary.accelmark_version,
        }  # fmt: skip
        yield name, result, {setting: str(found.value) for setting, found in sorted(result.settings.items())}, tags


def _figures(result: RoundResult) -> dict[str, float]:
    return {f"figures/{name}": found.value for name, found in result.figures.items() if found.value is not None}


def _points(result: RoundResult) -> list[tuple[str, int, float, float]]:
    """Return (curve, step, Unix time in seconds, value) of the points of all curves."""
    begin = datetime.fromisoformat(result.started_at).timestamp() if result.started_at else 0.0
    curves = ((name, at) for name, points in result.curves.items() for at in points)
    return [(name, at.step, begin + at.time_s, at.value) for name, at in curves if at.value is not None]


def to_tensorboard(run: LoadedRun, directory: Path) -> list[Path]:
    """Write the rounds of a run below ``directory``; return the directory of each. Raises RequestError or RunError."""
    require("the TensorBoard export", "accelmark[tensorboard]")
    from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    written: list[Path] = []
    for name, result, parameters, tags in _rounds(run):
        place = directory / run.summary.run / name
        if place.is_dir() and any(place.iterdir()):
            raise RequestError(f"{place}: already exists, and its points would be duplicated: choose another directory")
        points = _points(result)
        begin = min((at for _, _, at, _ in points), default=0.0)
        points += [(figure, 0, begin, value) for figure, value in _figures(result).items()]
        rows = "\n".join(f"| {name} | {value} |" for name, value in (tags | parameters).items())
        settings = text_pb("settings/text_summary", f"| setting | value |\n| --- | --- |\n{rows}")
        with write_errors(place):
            writer = EventFileWriter(str(place))
            for curve, step, at, value in points:
                summary = Summary(value=[Summary.Value(tag=curve, simple_value=value)])
                writer.add_event(TensorBoardEvent(step=step, wall_time=at, summary=summary))
            writer.add_event(TensorBoardEvent(step=0, wall_time=begin, summary=settings))
            writer.close()
        written.append(place)
    return written


_MAX_PARAMETERS: Final = 100
_MAX_METRICS: Final = 1000
_MAX_LENGTH: Final = 6000
"""Limits of an MLflow server."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_\-. /]")
_ARTEFACTS: Final = (SUMMARY_FILE, "report.html", "plan.json", "report.json", "automl.json")


def to_mlflow(run: LoadedRun, tracking_uri: str, experiment: str = "accelmark") -> list[str]:
    """Log every round of a run as an MLflow run at a server or store (``http://…``, ``file:…``, path); return ids."""
    if "://" not in tracking_uri and not tracking_uri.startswith("file:"):
        tracking_uri = Path(tracking_uri).resolve().as_uri()
    if tracking_uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses directories otherwise
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the default is to retry silently for minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    require("the MLflow export", "accelmark[mlflow]")
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    ids: list[str] = []
    secrets = set(secrets_in(run.files.json("plan.json")))
    with raising(RunError, f"MLflow at {tracking_uri.rpartition('@')[2]}", MlflowException, OSError):
        client = MlflowClient(tracking_uri=tracking_uri)
        known = client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else client.create_experiment(experiment)
        for place, result, settings, tags in _rounds(run):
            made = client.create_run(experiment_id, run_name=f"{run.summary.run}/{place}", tags=tags)
            run_id = str(made.info.run_id)
            parameters = [Param(_UNSAFE.sub("_", key), value[:_MAX_LENGTH]) for key, value in settings.items()]
            points = [(figure, 0, made.info.start_time, value) for figure, value in _figures(result).items()]
            points += [(curve, step, int(at * 1000), value) for curve, step, at, value in _points(result)]
            metrics = [Metric(_UNSAFE.sub("_", name), value, at_ms, step) for name, step, at_ms, value in points]
            for begin in range(0, len(parameters), _MAX_PARAMETERS):
                client.log_batch(run_id, params=parameters[begin : begin + _MAX_PARAMETERS])
            for begin in range(0, len(metrics), _MAX_METRICS):
                client.log_batch(run_id, metrics=metrics[begin : begin + _MAX_METRICS])
            for name in (f"{place}/{RESULT_FILE}", *_ARTEFACTS):
                if run.files.has(name):
                    text = without(run.files.read(name).decode("utf-8", errors="replace"), secrets)
                    client.log_text(run_id, text, name.rpartition("/")[2])
            client.set_terminated(run_id, status="FINISHED" if result.state == "succeeded" else "FAILED")
            ids.append(run_id)
    return ids
