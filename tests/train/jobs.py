"""Making jobs over the tiny case, running them for real, and reading what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.run.agent.rank_exit import classify_ranks, read_log_end
from accelmark.spec.job import CompareJob, EvaluateJob, JobSpec, RankExit, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import nest
from accelmark.spec.log.events import Event, Finished
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from accelmark.spec.plugins.case import ReferenceLoss, Target
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.framework import RANK_VARIABLES, LaunchRecord
from accelmark.spec.settings.training import TrainSettings

TINY = Path(__file__).parent / "tiny"
SOURCE = Path(__file__).parents[2] / "src"

DEFAULTS: dict[str, Any] = {
    "batch_size": 16, "eval_batch_size": 32, "log_every_steps": 4, "threads": 1, "end.max_steps": 12,
    "optimizer.lr": 0.05, "model.samples": 512, "model.eval_samples": 101, "model.features": 8, "model.width": 16,
    "model.dropout": 0.0, "model.sleep_ms": 0, "model.fault": "", "model.fault_at": 0, "model.fault_rank": 0,
}  # fmt: skip

TARGET = Target(metric="accuracy", direction="at_least", value=0.8, why="made up for a test")


def make_job(
    directory: Path,
    settings: dict[str, Any] | None = None,
    *,
    nproc: int = 1,
    target: Target | None = TARGET,
    reference_loss: ReferenceLoss | None = None,
    extern: Path | None = None,
    **more: Any,
) -> JobSpec:
    """Return a job over the tiny case; ``settings`` are dotted."""
    values = {key: value for key, value in {**DEFAULTS, **(settings or {})}.items() if value is not ...}
    return JobSpec(
        key=CaseKey(model="tiny", framework="pytorch", hardware="test", nproc=nproc),
        round=1,
        case=FolderRef(name="tiny", path=TINY, sha256="0" * 64),
        case_version=1,
        vendor="cpu",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        extern=None if extern is None else FolderRef(name="tiny-pytorch", path=extern, sha256="0" * 64),
        data_dirs={},
        checkpoint_dir=directory / "checkpoints",
        work=TrainJob(
            unit="sample",
            units_per_sample=1,
            target=target,
            reference_loss=reference_loss,
            settings=TrainSettings.model_validate(nest(values)),
        ),
        **more,
    )


def with_work(job: JobSpec, **changes: Any) -> JobSpec:
    return job.model_copy(update={"work": job.work.model_copy(update=changes)})


def evaluating(job: JobSpec, **fields: Any) -> JobSpec:
    """Return the job that evaluates what ``job`` trains."""
    values: dict[str, Any] = {"train": job.work, **fields}
    return job.model_copy(update={"work": EvaluateJob(**values)})


def comparing(job: JobSpec, directory: Path, reference: Path, **fields: Any) -> JobSpec:
    """Return the job that takes the first steps of ``job`` in ``directory``, compared with those in ``reference``."""
    results = None if directory == reference else reference / "results"
    places = {"inputs": reference / "inputs", "results": directory / "results", "reference": results}
    values: dict[str, Any] = {"train": job.work, **places, **fields}
    return job.model_copy(update={"work": CompareJob(**values)})


class Events(list[tuple[Event, Any]]):
    """An event log in memory."""

    def event(self, event: Event, value: Any = None, *, at_ns: int | None = None) -> None:
        self.append((event, value))

    def values(self, event: Event) -> list[Any]:
        return [value for name, value in self if name == event]


@dataclass(frozen=True)
class Ran:
    node_dir: Path
    exit_code: int
    output: str

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        return read_events(self.node_dir / f"rank{rank}.out.log")

    def values(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        return [item["value"] for item in self.events(rank) if item["event"] == event]

    def losses(self, rank: int = 0) -> list[float | None]:
        return [loss for window in self.values("STEP_END", rank) for loss in window["losses"]]

    def finished(self, rank: int = 0) -> Finished:
        last = self.events(rank)[-1]
        assert last["event"] == "FINISHED", last
        return Finished.model_validate({key: item for key, item in last["value"].items() if key != "nonfinite"})

    def ranks(self) -> list[RankExit]:
        record = LaunchRecord.model_validate_json((self.node_dir / "ranks.json").read_text())
        logs = {rank: read_log_end(self.node_dir / f"rank{rank}.out.log") for rank in record.exit_codes}
        return list(classify_ranks(logs, self.exit_code, record, None))

    def log(self, rank: int = 0) -> str:
        return (self.node_dir / f"rank{rank}.out.log").read_text()


def read_events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line.removeprefix(PERFLOG_PREFIX)) for line in lines if line.startswith(PERFLOG_PREFIX)]


def node_dir_of(directory: Path, name: str = "localhost_noderank0") -> Path:
    node_dir = directory / name
    node_dir.mkdir(parents=True, exist_ok=True)
    return node_dir


def write_job(job: JobSpec, directory: Path) -> Path:
    path = directory / "job.json"
    path.write_text(job.model_dump_json(indent=2))
    return path


def environment(node_dir: Path) -> dict[str, str]:
    names = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    added = {"PYTHONPATH": path, "ACCELMARK_NODE_DIR": str(node_dir), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**kept, **added, "OMP_NUM_THREADS": "1"}


def command(job_file: Path, nproc: int) -> list[str]:
    rank = [sys.executable, "-m", "accelmark.train.loop.rank", str(job_file)]
    if nproc == 1:
        return rank
    launcher = [sys.executable, "-m", "accelmark.frameworks.process_launcher", "--nproc", str(nproc)]
    return [*launcher, "--free-port", COORDINATOR, "--", *rank]


def start(job: JobSpec, directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a job's only host as its node agent would, without waiting."""
    node_dir = node_dir_of(directory)
    process = subprocess.Popen(
        command(write_job(job, directory), job.key.nproc),
        env=environment(node_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, node_dir


def run(job: JobSpec, directory: Path, timeout_s: float = 400) -> Ran:
    process, node_dir = start(job, directory)
    output, _ = process.communicate(timeout=timeout_s)
    return Ran(node_dir, process.returncode, output)
