"""Run the seven steps of an inference run; measurements are kept when a later step fails."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Literal, final

import torch
from torch import nn

from accelmark.frameworks.pytorch.model.identity import num_parameters
from accelmark.infer import setup
from accelmark.infer.batches import DerivedBatches
from accelmark.infer.case import InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest
from accelmark.infer.engines import eager
from accelmark.infer.failures import Context, classify, end_reason_of
from accelmark.infer.hashes import engine_hashes, file_hash, model_hashes
from accelmark.infer.measure import Emit, Forward, Measured, measure, warm_up
from accelmark.infer.repeat_check import repeat_check
from accelmark.infer.scenarios import Scenarios
from accelmark.results.figures.inference import invalid_reasons, phase_figures
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, DataError, RequestError
from accelmark.spec.events import Event, InferEndReason, InferFinished, Phase, RepeatCheck, StageBegin, StageEnd
from accelmark.spec.inference import InferPrecision, InferStep, file_at, why_skipped
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.perflog import EventLog
from accelmark.spec.settings import Scalar
from accelmark.train.loop.cpu_wait import CpuWait
from accelmark.train.loop.process import Cancelled, StopRequest

_FRESH_BATCHES: Final = 12
"""Largest number of batches for the repeat check."""


def run_inference(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run an inference job; every run ends with the event FINISHED. Returns the exit code."""
    if not isinstance(job.work, InferJob):
        raise RequestError(f"job.json: not an inference job but one of kind {job.work.kind!r}")
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or Path.cwd())
    steps = SevenSteps(job, job.work, node_dir, log.event, process_start)

    def overdue(signal_name: str) -> None:
        message = f"{signal_name}, and step {steps.step} did not finish in time"
        log.event(Event.FINISHED, steps.summary("cancelled", message, steps.step))
        os._exit(EXIT_CANCELLED)

    stop.install(overdue)
    try:
        finished = steps.run()
    except Cancelled as signal_name:
        finished = steps.summary("cancelled", f"stopped by {signal_name}", steps.step)
    if finished.message is not None:
        log.event(Event.ERROR, {"message": finished.message, "step": finished.failed_step})
    log.event(Event.FINISHED, finished)
    return {"completed": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}[finished.state]


@final
class SevenSteps:
    """One inference run in this process; ``started`` is its start on the clock of ``time.monotonic``."""

    case: InferCase
    """Like ``batches``, set by the second step, without which no later step runs."""
    batches: InferBatches
    model: nn.Module | None = None
    onnx_path: Path | None = None
    engine: Engine | None = None
    validation: Measured | None = None
    inference: Measured | None = None
    check: RepeatCheck | None = None
    compile_s: float | None = None
    partial: bool = False
    """Whether the data is a subset or a substitute, whose accuracy is not comparable with a published one."""
    failure: tuple[InferStep, AccelmarkError] | None = None
    """The step that failed, and its error."""
    finished: InferFinished | None = None

    def __init__(self, job: JobSpec, infer: InferJob, node_dir: Path, emit: Emit, started: float) -> None:
        self.job = job
        self.infer = infer
        self.settings = infer.settings
        self.node_dir = node_dir
        self.work_dir = node_dir / "engine"
        self.emit = emit
        self.started = started
        self.cpu_wait = CpuWait()
        self.device = setup.ComputeDevice(job, infer.settings)
        self.step = InferStep.INITIALISE
        self.details: dict[str, Scalar] = {}
        """Details of the current step."""
        self.unhashed: Engine | None = None
        """An engine whose hashes are not yet computed."""
        self._actions: dict[InferStep, Callable[[], object]] = {
            InferStep.INITIALISE: self._initialise,
            InferStep.CREATE: self._create,
            InferStep.VALIDATE: self._validate,
            InferStep.EXPORT: self._export,
            InferStep.COMPILE: self._compile,
            InferStep.INFER: self._infer,
            InferStep.SUMMARISE: self._summarise,
        }

    def run(self) -> InferFinished:
        """Run the steps and return the value of the last event.

        A step that fails ends the run: later steps are reported as skipped, except the summary.
        """
        for step in InferStep:
            skipped = why_skipped(step, self.settings)
            if self.failure is not None and step is not InferStep.SUMMARISE:
                skipped = f"step {self.failure[0]} failed"
            self._run_step(step, skipped)
        return self.finished or self.summary("error", "the summary failed; see the log of rank 0")

    def _run_step(self, step: InferStep, skipped: str | None) -> None:
        self.step, self.details = step, {}
        if skipped is not None:
            self._end("skipped", 0.0, skipped)
            return
        self.emit(Event.STAGE_BEGIN, StageBegin(step=step, number=step.number))
        began = time.perf_counter()
        try:
            self._actions[step]()
        except Exception as error:  # noqa: BLE001 - a case or an engine may raise anything
            classified = classify(error, self._context(f"step {step.number} ({step})"))
            if classified is not error:
                traceback.print_exception(error, file=sys.stderr)
            self._end("failed", time.perf_counter() - began, str(classified))
            self.failure = step, classified
            return
        took = time.perf_counter() - began
        if self.unhashed is not None:  # excluded from the duration
            self.details |= engine_hashes(self.unhashed)
            self.unhashed = None
        if step is InferStep.COMPILE:
            self.compile_s = took
        self._end("done", took, None)

    def _end(self, state: Literal["done", "skipped", "failed"], duration_s: float, reason: str | None) -> None:
        step = self.step
        ended = StageEnd(
            step=step, number=step.number, state=state, duration_s=duration_s, reason=reason, details=self.details
        )
        self.emit(Event.STAGE_END, ended)

    def _context(self, activity: str) -> Context:
        engine = self.settings.compiler if self.step in (InferStep.COMPILE, InferStep.INFER) else "pytorch"
        return Context(activity, engine or "pytorch", self.settings.batch_size, self.device.device_type)

    def _initialise(self) -> None:
        for note in self.infer.notes:
            self.emit(Event.WARNING, note)
        setup.check_paths(self.job, self.settings)
        self.device.prepare()
        self.emit(Event.INIT_END, self.device.describe())

    def _create(self) -> None:
        case = self.case = setup.build_case(self.job, self.infer)
        batches = self.batches = setup.batches_of(case, pinned=self.device.device.type != "cpu")
        if batches.num_items < 1:
            name = self.job.case.name
            raise DataError(f"case {name}: the data has no item; check the data directory of the run")
        self.partial = case.partial or (isinstance(batches, DerivedBatches) and batches.is_part)
        self.details |= {"items": batches.num_items, "partial": self.partial}
        if not self.settings.no_validation:
            self.model = case.create_model().eval()
            self.details |= {"parameters": num_parameters(self.model), "trained": case.trained}
            self.details |= model_hashes(self.model)

    def _validate(self) -> None:
        precision: InferPrecision = "fp32" if self.settings.precision == "int8" else self.settings.precision
        engine = eager.Engine(self._request(precision), self.case.model_forward)
        try:
            self.validation = self._measure("validation", engine, engine)
        finally:
            engine.close()

    def _export(self) -> None:
        assert self.model is not None  # noqa: S101 - no_validation needs exist_onnx_path, which skips this step
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "model.onnx"
        self.case.export_model(self.model, next(iter(self.batches)).inputs, path)
        self.onnx_path = path
        self.details |= {"onnx_mib": round(path.stat().st_size / 2**20, 3), "onnx_sha256": file_hash(path)}

    def _compile(self) -> Engine:
        compiler = self.settings.compiler
        assert compiler is not None  # noqa: S101 - without a compiler this step is skipped
        engine_class = setup.engine_class(self.job, compiler)
        for note in setup.unknown_options(engine_class, self.settings):
            self.emit(Event.WARNING, note)
        engine = self.engine = self.unhashed = engine_class(self._request(self.settings.precision))
        self.details |= engine.describe()
        if engine.file is not None:
            self.details["engine_file"] = str(engine.file)
        return engine

    def _infer(self) -> None:
        began = time.perf_counter()
        engine = self.engine
        if engine is None:
            engine = self._compile()
            self.details["load_s"] = time.perf_counter() - began
        forward = partial(self.case.engine_forward, engine)
        try:
            self.inference = self._measure("inference", forward, engine)
            if self.settings.scenarios:
                context = self._context("scenarios")
                scenarios = Scenarios(forward, self.batches, self.settings, engine.fixed_batch, self.node_dir, context)
                for result in scenarios.run():
                    self.emit(Event.SCENARIO, result)
        finally:
            engine.close()

    def _request(self, precision: InferPrecision) -> EngineRequest:
        settings, device = self.settings, self.device
        self.work_dir.mkdir(parents=True, exist_ok=True)
        return EngineRequest(
            model=self.model,
            onnx_path=self.onnx_path or file_at(settings.exist_onnx_path),
            engine_path=Path(settings.exist_compiler_path).expanduser() if settings.exist_compiler_path else None,
            example=next(iter(self.batches)).inputs,
            precision=precision,
            device=device.device,
            device_type=device.device_type,
            threads=device.threads,
            options=settings.engine_options,
            work_dir=self.work_dir,
        )

    @torch.inference_mode()  # entered once, not in each call
    def _measure(self, phase: Phase, forward: Forward, engine: Engine) -> Measured:
        case, batches, settings = self.case, self.batches, self.settings
        name = self._context(phase).engine
        iterator = iter(batches)
        first = next(iterator)
        last_items = batches.num_items % settings.batch_size if batches.num_items > first.num_items else 0
        warm_up(forward, first, settings.warmup_batches, phase, name, self.emit, last_items=last_items)
        if phase == "inference" and settings.repeat_check:
            full = (batch for batch in iterator if batch.num_items == settings.batch_size)
            self.check = repeat_check(forward, first, list(islice(full, _FRESH_BATCHES)), name)
            self.emit(Event.REPEAT_CHECK, self.check)
        evaluated = case.trained and not settings.synthetic
        measured = measure(forward, batches, case, phase=phase, engine=name, evaluated=evaluated, emit=self.emit)
        self.details["peak_device_memory_mib"] = engine.device_memory_mib()
        self.details["peak_host_memory_mib"] = setup.peak_host_memory_mib()
        return measured

    def _summarise(self) -> None:
        if self.failure is None:
            self.finished = self.summary("completed", None)
        else:
            step, error = self.failure
            self.finished = self.summary(end_reason_of(error), str(error), step)

    def summary(
        self, end_reason: InferEndReason, message: str | None, failed_step: InferStep | None = None
    ) -> InferFinished:
        """Return the value of FINISHED from the results so far."""
        settings, metric = self.settings, self.infer.metric
        measured = [phase for phase in (self.validation, self.inference) if phase is not None]
        validation, inference = (
            phase_figures(phase.windows if phase else (), settings.batch_size, "not measured")
            for phase in (self.validation, self.inference)
        )
        val_acc, infer_acc = (
            phase.metrics.get(metric) if phase else None for phase in (self.validation, self.inference)
        )
        reasons = invalid_reasons(
            metric=metric,
            validation=val_acc,
            inference=infer_acc,
            tolerance=self.infer.tolerance,
            reference=None if self.partial else self.infer.reference,
            nonfinite_batches=sum(phase.nonfinite_batches for phase in measured),
            repeat_check=self.check,
        )
        if end_reason != "completed":
            reasons = (message or end_reason, *reasons)
        return InferFinished(
            state=end_reason if end_reason in ("completed", "cancelled") else "failed",
            end_reason=end_reason,
            message=message,
            failed_step=failed_step,
            vendor=self.job.vendor,
            compiler=settings.compiler,
            precision=settings.precision,
            batch_size=settings.batch_size,
            flops=settings.flops,
            e2e_time=time.monotonic() - self.started,
            p_validation_whole=validation.whole.value,
            p_validation_core=validation.core.value,
            p_inference_whole=inference.whole.value,
            p_inference_core=inference.core.value,
            val_average_acc=val_acc,
            infer_average_acc=infer_acc,
            compile_time=self.compile_s,
            valid=not reasons,
            invalid_reasons=reasons,
            core_wait_s=self.cpu_wait.longest_s(),
        )
