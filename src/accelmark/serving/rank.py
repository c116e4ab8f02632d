"""The rank of a serving job: start the server, run the stages of the load, stop the server, compare answers."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Final

from accelmark.serving.answers import AnswerSample, compare_answers, run_benchmarks
from accelmark.serving.client.client import Client
from accelmark.serving.load import LoadPlan, ServedModel
from accelmark.serving.request import Endpoint, ServeError
from accelmark.serving.server_process import Cores, ServerProcess
from accelmark.serving.stages import LoadReporter, Stages, TokenScenarios
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, DataError, RequestError
from accelmark.spec.job import JobSpec, ServeJob
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import REQUESTS_FILE, ServeEndReason, ServeFinished, ServeStarted, StartTimes
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.requirements import installed_version, installed_versions
from accelmark.spec.settings.training import Scalar
from accelmark.train.loop.process import Cancelled, CpuWait, StopRequest

_LIBRARIES: Final = ("httptools", "tokenizers", "torch")


def run_serving(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run a serving job in this process; return its exit code."""
    if not isinstance(job.work, ServeJob):
        raise RequestError(f"job.json: a serving rank cannot do work of kind {job.work.kind!r}")
    run = _ServingRun(job, job.work, Path(os.environ.get("ACCELMARK_NODE_DIR", ".")), log)

    def finish(reason: ServeEndReason, message: str | None) -> None:
        if message is not None:
            log.event(Event.ERROR, {"message": message})
        finished = ServeFinished(
            state="completed" if reason == "completed" else "cancelled" if reason == "cancelled" else "failed",
            end_reason=reason,
            message=message,
            e2e_time=time.monotonic() - process_start,
            num_requests=run.progress.num_requests,
            seed=run.seed,
            peak_memory_mib=run.server.peak_memory_mib if run.server is not None else None,
            load=run.load_times,
            core_wait_s=run.cpu_wait.longest_s(),
        )
        log.event(Event.FINISHED, finished)

    def overdue(signal_name: str) -> None:
        finish("cancelled", f"stopped by {signal_name}; the server did not end in time")
        os._exit(EXIT_CANCELLED)

    stop.install(overdue)
    reason: ServeEndReason = "error"
    message: str | None = None
    try:
        run.run()
        reason = "completed"
    except Cancelled as signal_name:
        reason, message = "cancelled", f"stopped by {signal_name}"
    except AccelmarkError as error:
        message = str(error)
        if isinstance(error, ServeError):
            reason = error.end_reason
        elif isinstance(error, (RequestError, DataError)):
            reason = "bad_request"
    except Exception as error:  # noqa: BLE001 - every error must end in FINISHED
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
    stop.finish()
    finish(reason, message)
    return {"completed": EXIT_OK, "cancelled": EXIT_CANCELLED}.get(reason, EXIT_FAILED)


@dataclass
class _ServingRun:
    job: JobSpec
    work: ServeJob
    node_dir: Path
    log: EventLog
    server: ServerProcess | None = None
    cores: Cores | None = None
    """Cores of the server and of the client; None with an endpoint."""
    cpu_wait: CpuWait = field(default_factory=CpuWait)
    seed: int | None = None
    load_times: StartTimes | None = None
    """Of the framework that compares answers."""

    def __post_init__(self) -> None:
        self.progress = LoadReporter(self.log.event)

    def run(self) -> None:
        settings, spec = self.work.settings, self.work.server
        model = ServedModel(self.job, self.node_dir)
        plan = LoadPlan(settings, model)
        self.seed = plan.seed
        sample = AnswerSample(settings.num_compared, SystemRandom())
        with self._server(model) as (server, started):
            self.log.event(Event.INIT_END, started)
            fields = spec.request | (spec.pinned if settings.is_pinned else {}) if spec is not None else {}
            target = Endpoint(started.endpoint, started.served_model, settings.api, fields)
            if server is None:
                target.require_reachable()
            with (
                (self.node_dir / REQUESTS_FILE).open("w", encoding="utf-8") as stream,
                Client(target, settings.load.processes, self.cores.client if self.cores else None) as client,
            ):
                check = server.check if server is not None else lambda: None
                stages = Stages(client, model, self.log.event, stream, sample, check)
                self.progress = stages.progress
                plan.run(stages.run)
                TokenScenarios(settings, plan, stages, self.node_dir, self.log.event).run()
            if settings.benchmarks:

                def watch() -> None:
                    check()
                    self.progress.report()

                self.progress.begin("answering benchmarks")
                arguments = {
                    "url": target.url("completions"),
                    "model": target.model,
                    "tokenizer": str(model.directory) if model.directory is not None else None,
                    "num_concurrent": max(settings.load.concurrency, default=1),
                }
                run_benchmarks(settings, arguments, self.job.data_dirs, self.node_dir, watch)
        if model.directory is not None and sample.answers:
            self.progress.begin("comparing answers")
            self.load_times = compare_answers(settings, self.job, model, sample, self.node_dir, self.progress.report)

    @contextmanager
    def _server(self, model: ServedModel) -> Iterator[tuple[ServerProcess | None, ServeStarted]]:
        settings, spec = self.work.settings, self.work.server
        if spec is None:
            yield None, self._started(model, None, None)
            return
        if model.directory is None:
            raise DataError(f"the case {self.job.case.name} has no weights: name their directory with --data")
        options: dict[str, Scalar] = {"precision": settings.precision, "threads": settings.threads}
        options |= {f"server_options.{name}": value for name, value in settings.server_options.items()}
        self.cores = Cores.divided(settings.load.processes)
        self.progress.begin("starting server")
        server = self.server = ServerProcess(
            spec,
            model.directory,
            self.node_dir,
            device=self.job.device_type,
            num_devices=self.job.key.nproc,
            settings=options,
            cores=self.cores.server,
            report=self.progress.report,
        )
        try:
            start_s = server.wait_until_healthy(settings.start_timeout_s, self.progress.report)
            yield server, self._started(model, server, start_s)
        finally:
            server.stop()

    def _started(self, model: ServedModel, server: ServerProcess | None, start_s: float | None) -> ServeStarted:
        settings = self.work.settings
        spec = self.work.server
        divided = self.cores if self.cores is not None and self.cores.server != self.cores.client else None
        version = None
        if spec is not None and spec.distribution is not None:
            version = installed_version(spec.distribution)
        elif spec is not None and spec.version_command:
            done = subprocess.run(spec.version_command, capture_output=True, text=True, check=False, timeout=60)
            version = done.stdout.strip()
        return ServeStarted(
            framework=spec.name if spec is not None else "endpoint",
            framework_version=version or "unknown",
            device_type=self.job.device_type,
            device_name=self.job.chip.name if self.job.chip is not None else None,
            hostname=socket.gethostname(),
            threads=settings.threads or (len(self.cores.server) if self.cores else os.cpu_count() or 1),
            precision=settings.precision,
            library_versions={"python": platform.python_version()} | installed_versions(_LIBRARIES),
            server=spec.name if spec is not None else None,
            endpoint=server.endpoint if server is not None else str(settings.endpoint),
            command=server.command if server is not None else (),
            served_model=settings.served_model
            or (spec.served_model if spec is not None else "").replace("{model_dir}", str(model.directory)),
            start_s=start_s,
            start=server.times(start_s) if server is not None and start_s is not None else None,
            num_devices=self.job.key.nproc,
            weights_sha256=model.sha256(self.progress.report) if server is not None else None,
            has_tokenizer=model.tokens is not None,
            server_cores=divided.server if divided else (),
            client_cores=divided.client if divided else (),
        )
