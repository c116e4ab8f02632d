"""A case's job at reduced size, run in this process, or where it has several ranks or loader processes in forks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.job import CompareJob, EvaluateJob, JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.plugins.catalog import FolderRef, find, load_case
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import run_rank
from tests.fork_server import Forked
from tests.train.jobs import read_events

TIMEOUT_S = 500


def job_on_cpu(name: str, data_dirs: Mapping[str, Path], checkpoint_dir: Path, **side: Any) -> JobSpec:
    """Return the job; ``side`` is its task and that task's part."""
    return JobSpec(
        key=CaseKey.parse(name, hardware="CPU"),
        round=1,
        case=find("cases", name).ref("train"),
        case_version=load_case(name).version,
        vendor="cpu",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        data_dirs=dict(data_dirs),
        checkpoint_dir=checkpoint_dir,
        **side,
    )


def job_of(name: str, directory: Path, data_dirs: Mapping[str, Path], over: Mapping[str, Any], **head: Any) -> Path:
    """Write ``job.json`` of an open run with the settings ``over`` and the job's own ``head``, and return its path."""
    case = load_case(name)
    assert case.train is not None
    train = case.train
    layers = [Layer("test", dict(over))]
    base = Layer.of("case.yaml", train.settings)
    settings = resolve(TrainSettings, base, layers, mutable=train.mutable, is_open=True).settings
    key = train.units_per_sample_key
    job = job_on_cpu(
        name,
        data_dirs,
        directory / "checkpoints",
        open=True,
        **head,
        work=TrainJob(
            unit=train.unit,
            units_per_sample=train.units_per_sample if key is None else int(str(settings.model[key])),
            target=train.target,
            reference_loss=train.reference_loss,
            settings=settings,
        ),
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "job.json"
    path.write_text(job.model_dump_json())
    return path


def run(job: Path, num_ranks: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Train, and return rank 0's events as (name, value)."""
    spec = JobSpec.model_validate_json(job.read_bytes())
    work = spec.work.train if isinstance(spec.work, CompareJob | EvaluateJob) else spec.work
    assert isinstance(work, TrainJob)
    started = num_ranks > 1 or work.settings.loader.num_workers
    code, output = _started(job, spec.case, num_ranks) if started else _here(spec, job.parent)
    log = job.parent / "rank0.out.log"
    assert code == 0, log.read_text(encoding="utf-8") + output
    return events_of(log)


def trained(
    name: str, directory: Path, data_dirs: Mapping[str, Path], over: Mapping[str, Any]
) -> tuple[dict[str, Any], list[float]]:
    """Train a case, and return how it ended and the loss of every step."""
    events = run(job_of(name, directory / "run", data_dirs, over))
    return value_of(events, Event.FINISHED), losses_of(events)


def events_of(log: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return a rank's events as (name, value)."""
    return [(event["event"], event["value"]) for event in read_events(log)]


def _here(job: JobSpec, node_dir: Path) -> tuple[int, str]:
    with (node_dir / "rank0.out.log").open("ab") as log:
        return run_rank(job, PerfLogWriter(0, log.fileno()), time.monotonic(), StopRequest(wanted=False)), ""


def _started(job: Path, case: FolderRef, num_ranks: int) -> tuple[int, str]:
    """Fork the ranks; where one fails, the others are killed."""
    command = [sys.executable, "-m", "accelmark.train.loop.rank", str(job)]
    modules = ("accelmark.frameworks.pytorch.backend", f"accelmark.cases.{case.name}.pytorch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, COORDINATOR: meeting, "ACCELMARK_NODE_DIR": str(job.parent)}
    output = job.parent / "output.log"
    with output.open("wb") as log:
        places = [RankPlace(rank, rank, num_ranks, num_ranks) for rank in range(num_ranks)]
        ranks = [Forked(command, environment | place.variables(), log, imports=modules) for place in places]
    deadline = time.monotonic() + TIMEOUT_S
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes) or time.monotonic() > deadline:
            time.sleep(1)  # a rank that sees that another has failed says so
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return next(filter(None, codes), 0), output.read_text(encoding="utf-8")


def value_of(events: list[tuple[str, dict[str, Any]]], event: Event) -> dict[str, Any]:
    """Return the value of the last such event."""
    return [value for name, value in events if name == event][-1]


def losses_of(events: list[tuple[str, dict[str, Any]]]) -> list[float]:
    """Return every step's loss."""
    return [loss for name, value in events if name == Event.STEP_END for loss in value["losses"]]
