from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.infer.engine import EngineRequest
from accelmark.infer.run import InferenceRun, build_case
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import InferFinished
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, FolderRef
from accelmark.spec.settings.inference import InferSettings, InferStep
from tests.fork_server import Forked

_ENGINE = """
import gc, os, signal, sys, threading, time
import torch
from accelmark.infer.engines.eager import Engine as Eager

class Engine(Eager):
"""
TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True)
class Ran:
    finished: InferFinished
    events: list[tuple[Event, Spec | Mapping[str, Any] | None]]
    node_dir: Path

    def of(self, event: Event) -> list[Any]:
        return [value for name, value in self.events if name is event]

    def windows(self) -> list[Any]:
        """Return those of the engine."""
        return [window for window in self.of(Event.FORWARD) if window.phase == "inference"]

    def details(self, step: InferStep) -> dict[str, Any]:
        return next(dict(end.details) for end in self.of(Event.STAGE_END) if end.step is step)

    def states(self) -> dict[InferStep, str]:
        return {end.step: end.state for end in self.of(Event.STAGE_END)}


def job_of(tmp_path: Path, parameters: dict[str, Any] | None = None, **settings: Any) -> JobSpec:
    given = {
        "batch_size": 16,
        "log_freq": 2,
        "warmup_batches": 1,
        "threads": 1,
        "inference_duration_s": 0,
        "server_queries": 20,
    } | settings
    infer = InferJob(
        unit="image",
        metric="top1",
        tolerance=0.02,
        reference=None,
        settings=InferSettings.model_validate(given),
        parameters={"items": 100} | (parameters or {}),
    )
    return JobSpec(
        key=CaseKey(model="tiny", framework="pytorch", hardware="cpu"),
        round=1,
        case=FolderRef(name="tiny", path=TINY, sha256="0"),
        case_version=1,
        vendor="none",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        data_dirs={},
        checkpoint_dir=tmp_path,
        work=infer,
    )


def steps_of(job: JobSpec, node_dir: Path) -> Ran:
    """Take the seven steps of a job in this process."""
    events: list[tuple[Event, Spec | Mapping[str, Any] | None]] = []
    assert isinstance(job.work, InferJob)
    run = InferenceRun(job, job.work, node_dir, lambda event, value: events.append((event, value)), 0.0)
    return Ran(run.run(), events, node_dir)


def fork_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engine processes be forks of a process that has imported PyTorch."""

    def fork(command: list[str], **options: Any) -> Forked:
        return Forked(command, options["env"], options["stdout"], options["pass_fds"])

    monkeypatch.setattr("accelmark.infer.engine_process.Popen", fork)


@pytest.fixture(autouse=True)
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork engine processes; a test file that is about the process itself overrides this fixture to start them."""
    fork_engines(monkeypatch)


MakeJob = Callable[..., JobSpec]
Start = Callable[[JobSpec], tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Return a function that makes a job of the tiny case from settings (and ``parameters=``)."""
    return partial(job_of, tmp_path)


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., Ran]:
    """Return a function that takes the seven steps of the tiny case in this process."""

    def steps(job: JobSpec | None = None, **settings: Any) -> Ran:
        node_dir = tmp_path / "node"
        node_dir.mkdir(exist_ok=True)
        return steps_of(job or job_of(tmp_path, **settings), node_dir)

    return steps


@pytest.fixture
def acme(make_job: MakeJob, tiny_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """Return a function that makes a job of a vendor whose engine ``acme_rt`` has the given methods.

    Its runtime is played by PyTorch's eager mode; the model is not exported again.
    """
    vendor = tmp_path / "plugins" / "vendors" / "acme"
    (vendor / "engines").mkdir(parents=True)
    framework = {"pytorch": {"device_type": "cpu", "collective_backend": "gloo"}}
    described = {"name": "acme", "title": "Acme", "frameworks": framework, "visible_devices_env": "ACME", "chips": []}
    (vendor / "vendor.yaml").write_text(json.dumps(described))
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path / "plugins"))

    def make(methods: str, **settings: Any) -> JobSpec:
        source = textwrap.dedent(methods).strip()
        (vendor / "engines" / "acme_rt.py").write_text(_ENGINE + textwrap.indent(source, "    ") + "\n")
        given = {"compiler": "acme_rt", "exist_onnx_path": str(tiny_onnx)} | settings
        return make_job(**given).model_copy(update={"vendor": "acme"})

    return make


@pytest.fixture(scope="session")
def tiny_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as ONNX, exported once."""
    directory = tmp_path_factory.mktemp("onnx")
    job = job_of(directory)
    assert isinstance(job.work, InferJob)
    case = build_case(job, job.work, directory)
    path = directory / "tiny.onnx"
    case.export_model(case.create_model(), case.synthetic_batch(2).inputs, path)
    return path


@pytest.fixture
def request_of(make_job: MakeJob, tiny_onnx: Path, tmp_path: Path) -> Callable[..., EngineRequest]:
    """Return a function that makes the request of an engine for the tiny case, with changes."""

    def make(**changed: Any) -> EngineRequest:
        job = make_job()
        assert isinstance(job.work, InferJob)
        case = build_case(job, job.work, tmp_path)
        given: dict[str, Any] = {
            "model": case.create_model(),
            "onnx_path": tiny_onnx,
            "engine_path": None,
            "example": case.synthetic_batch(4).inputs,
            "calibration": case.calibration_batch(32).inputs,
            "precision": "fp32",
            "device": torch.device("cpu"),
            "device_type": "cpu",
            "threads": 1,
            "optimize_for": "latency",
            "options": {},
            "work_dir": tmp_path,
        }
        return EngineRequest(**(given | changed))

    return make


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that starts the rank of a job as the node agent does; it returns the process and its log."""

    def process(job: JobSpec) -> tuple[subprocess.Popen[bytes], Path]:
        node_dir = tmp_path / "node"
        node_dir.mkdir(exist_ok=True)
        (tmp_path / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "accelmark.infer", str(tmp_path / "job.json")]
        rank = subprocess.Popen(command, env=os.environ | {"ACCELMARK_NODE_DIR": str(node_dir), "RANK": "0"})
        return rank, node_dir / "rank0.out.log"

    return process


@pytest.fixture
def in_a_process(start: Start) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """Return a function that runs a job in a process of its own: exit code, events, the rank's log."""

    def process(job: JobSpec) -> tuple[int, list[dict[str, Any]], str]:
        rank, log = start(job)
        code, text = rank.wait(timeout=500), log.read_text(encoding="utf-8")
        lines = [line.removeprefix(PERFLOG_PREFIX) for line in text.splitlines() if line.startswith(PERFLOG_PREFIX)]
        return code, [json.loads(line) for line in lines], text

    return process
