"""Run the seven steps of an inference run; measurements are kept when a later step fails."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from accelmark.infer import setup
from accelmark.infer.batches import FirstBatches, not_empty
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest
from accelmark.infer.engines import eager
from accelmark.infer.failures import Context, classify, end_reason_of
from accelmark.infer.hashes import engine_hashes, file_hash, model_hashes
from accelmark.infer.measure import Emit, Forward, Measured, measure, warm_up
from accelmark.infer.repeat_check import repeat_check
from accelmark.infer.scenarios import Scenarios
from accelmark.results.figures.inference import invalid_reasons, phase_figures
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.events import Event, InferEndReason, InferFinished, Phase, RepeatCheck, StageBegin, StageEnd
from accelmark.spec.inference import InferPrecision, InferStep, why_skipped
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.settings import Scalar
from accelmark.train.loop.cpu_wait import CpuWait

_FRESH_BATCHES: Final = 12
"""Largest number of batches for the repeat check."""


@final
@dataclass(slots=True)
class _Results:
    """Results of the steps so far."""

    case: InferCase | None = None
    batches: InferBatches | None = None
    partial: bool = False
    """Whether the data is a subset or a substitute, whose accuracy is not comparable with a published one."""
    model: nn.Module | None = None
    validation: Measured | None = None
    onnx_path: Path | None = None
    engine: Engine | None = None
    unhashed: Engine | None = None
    """An engine whose hashes are not yet computed."""
    compile_s: float | None = None
    check: RepeatCheck | None = None
    inference: Measured | None = None
    finished: InferFinished | None = None
    details: dict[str, Scalar] = field(default_factory=dict)
    """Details of the current step."""


@final
@dataclass(frozen=True, slots=True)
class _Failure:
    """The step that failed, and its error."""

    step: InferStep
    error: AccelmarkError


@final
class SevenSteps:
    """One inference run in this process."""

    def __init__(self, job: JobSpec, infer: InferJob, node_dir: Path, emit: Emit, started: float) -> None:
        """Prepare the steps of a job.

        Args:
            job: the job.
            infer: its work.
            node_dir: directory for files.
            emit: writes an event.
            started: start of the process on the clock of ``time.monotonic``.
        """
        self.job = job
        self.infer = infer
        self.settings = infer.settings
        self.node_dir = node_dir
        self.work_dir = node_dir / "engine"
        self.emit = emit
        self.started = started
        self.cpu_wait = CpuWait()
        self.results = _Results()
        self.device = setup.ComputeDevice.of(job, infer.settings)
        self.step = InferStep.INITIALISE
        self.failure: _Failure | None = None
        self._actions: dict[InferStep, Callable[[], None]] = {
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
                skipped = f"step {self.failure.step} failed"
            self._run_step(step, skipped)
        return self.results.finished or self.summary("error", "the summary failed; see the log of rank 0")

    def _run_step(self, step: InferStep, skipped: str | None) -> None:
        self.step = step
        if skipped is not None:
            self._end(step, "skipped", 0.0, skipped)
            return
        self.emit(Event.STAGE_BEGIN, StageBegin(step=step, number=step.number))
        self.results.details = {}
        began = time.perf_counter()
        try:
            self._actions[step]()
        except Exception as error:  # noqa: BLE001 - a case or an engine may raise anything
            classified = classify(error, self._context(f"step {step.number} ({step})"))
            if classified is not error:
                traceback.print_exception(error, file=sys.stderr)
            self._end(step, "failed", time.perf_counter() - began, str(classified))
            self.failure = _Failure(step, classified)
            return
        took = time.perf_counter() - began
        if self.results.unhashed is not None:  # excluded from the duration
            self.results.details |= engine_hashes(self.results.unhashed)
            self.results.unhashed = None
        if step is InferStep.COMPILE:
            self.results.compile_s = took
        self._end(step, "done", took, None)

    def _end(self, step: InferStep, state: str, duration_s: float, reason: str | None) -> None:
        details = {} if state == "skipped" else self.results.details
        value = StageEnd.model_validate(
            {"step": step, "number": step.number, "state": state, "duration_s": duration_s, "reason": reason,
             "details": details}
        )  # fmt: skip
        self.emit(Event.STAGE_END, value)

    def _context(self, doing: str) -> Context:
        engine = self.settings.compiler if self.step in (InferStep.COMPILE, InferStep.INFER) else "pytorch"
        return Context(doing, engine or "pytorch", self.settings.batch_size, self.device.device_type)

    def _initialise(self) -> None:
        for note in self.infer.notes:
            self.emit(Event.WARNING, note)
        setup.check_paths(self.job, self.settings)
        self.device.prepare()
        self.emit(Event.INIT_END, self.device.describe(self.settings))

    def _create(self) -> None:
        case = setup.build_case(self.job, self.infer)
        self.results.case = case
        batches = setup.batches_of(case, pinned=self.device.device.type != "cpu")
        self.results.batches = not_empty(batches, f"case {self.job.case.name}")
        self.results.details["items"] = self.results.batches.num_items
        self.results.partial = case.partial or isinstance(self.results.batches, FirstBatches)
        self.results.details["partial"] = self.results.partial
        if not self.settings.no_validation:
            self.results.model = case.create_model().eval()
            self.results.details["parameters"] = setup.num_parameters(self.results.model)
            self.results.details["trained"] = case.trained
            self.results.details |= model_hashes(self.results.model)

    def _validate(self) -> None:
        case, batches = self._case_and_batches()
        engine = eager.Engine(self._request(batches, setup.validation_precision(self.settings)), case.model_forward)
        try:
            self.results.validation = self._measure("validation", engine, engine)
        finally:
            engine.close()

    def _export(self) -> None:
        case, batches = self._case_and_batches()
        model = self.results.model
        assert model is not None  # noqa: S101 - no_validation needs exist_onnx_path, which skips this step
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "model.onnx"
        case.export_model(model, next(iter(batches)).inputs, path)
        self.results.onnx_path = path
        self.results.details["onnx_mib"] = round(path.stat().st_size / 2**20, 3)
        self.results.details["onnx_sha256"] = file_hash(path)

    def _compile(self) -> None:
        _, batches = self._case_and_batches()
        compiler = self.settings.compiler
        assert compiler is not None  # noqa: S101 - without a compiler this step is skipped
        engine = setup.engine_class(self.job, compiler)
        for note in setup.unknown_options(engine, self.settings):
            self.emit(Event.WARNING, note)
        self.results.engine = engine(self._request(batches, self.settings.precision))
        self.results.details |= self.results.engine.describe()
        self.results.unhashed = self.results.engine
        if self.results.engine.file is not None:
            self.results.details["engine_file"] = str(self.results.engine.file)

    def _infer(self) -> None:
        if self.results.engine is None:
            began = time.perf_counter()
            self._compile()
            self.results.details["load_s"] = time.perf_counter() - began
        engine = self.results.engine
        assert engine is not None  # noqa: S101 - _compile sets it or raises
        case, batches = self._case_and_batches()

        forward = partial(case.engine_forward, engine)
        try:
            self.results.inference = self._measure("inference", forward, engine)
            if self.settings.scenarios:
                Scenarios(
                    forward,
                    batches,
                    self.settings,
                    fixed_batch=engine.fixed_batch,
                    node_dir=self.node_dir,
                    context=self._context("scenarios"),
                    emit=self.emit,
                ).run()
        finally:
            engine.close()

    def _request(self, batches: InferBatches, precision: InferPrecision) -> EngineRequest:
        example = next(iter(batches))
        return setup.engine_request(
            self.device, self.settings, self.results.model, example, self.results.onnx_path, self.work_dir, precision
        )

    def _measure(self, phase: Phase, forward: Forward, engine: Engine) -> Measured:
        with torch.inference_mode():  # entered once, not in each call
            return self._measured(phase, forward, engine)

    def _measured(self, phase: Phase, forward: Forward, engine: Engine) -> Measured:
        case, batches = self._case_and_batches()
        context = self._context(phase)
        iterator = iter(batches)
        first = next(iterator)
        last_items = batches.num_items % self.settings.batch_size if batches.num_items > first.num_items else 0
        warmed = warm_up(forward, first, self.settings.warmup_batches, phase, context, self.emit, last_items=last_items)
        if phase == "inference" and self.settings.repeat_check:
            fresh = _full_batches(iterator, self.settings.batch_size)
            self.results.check = repeat_check(forward, first, fresh, context.engine)
            self.emit(Event.REPEAT_CHECK, self.results.check)
        evaluated = case.trained and not self.settings.synthetic
        measured = measure(forward, batches, case, warmed=warmed, context=context, evaluated=evaluated, emit=self.emit)
        self.results.details["peak_device_memory_mib"] = engine.device_memory_mib()
        self.results.details["peak_host_memory_mib"] = setup.peak_host_memory_mib()
        return measured

    def _case_and_batches(self) -> tuple[InferCase, InferBatches]:
        case, batches = self.results.case, self.results.batches
        assert case is not None and batches is not None  # noqa: S101, PT018 - set by the second step, or the run has ended
        return case, batches

    def _summarise(self) -> None:
        if self.failure is None:
            self.results.finished = self.summary("completed", None)
        else:
            error = self.failure.error
            self.results.finished = self.summary(end_reason_of(error), str(error), self.failure.step)

    def summary(
        self, end_reason: InferEndReason, message: str | None, failed_step: InferStep | None = None
    ) -> InferFinished:
        """Return the value of FINISHED from the results so far."""
        results, settings = self.results, self.settings
        speed = {
            name: phase_figures(phase.windows if phase else (), settings.batch_size, "not measured")
            for name, phase in (("validation", results.validation), ("inference", results.inference))
        }
        metric = self.infer.metric
        validation = results.validation.metrics.get(metric) if results.validation else None
        inference = results.inference.metrics.get(metric) if results.inference else None
        measured = [phase for phase in (results.validation, results.inference) if phase is not None]
        reasons = invalid_reasons(
            metric=metric,
            validation=validation,
            inference=inference,
            tolerance=self.infer.tolerance,
            reference=None if results.partial else self.infer.reference,
            nonfinite_batches=sum(phase.nonfinite_batches for phase in measured),
            repeat_check=results.check,
        )
        if end_reason != "completed":
            reasons = (message or end_reason, *reasons)
        state = "completed" if end_reason == "completed" else "cancelled" if end_reason == "cancelled" else "failed"
        return InferFinished.model_validate(
            {
                "state": state,
                "end_reason": end_reason,
                "message": message,
                "failed_step": failed_step,
                "vendor": self.job.vendor,
                "compiler": settings.compiler,
                "precision": settings.precision,
                "batch_size": settings.batch_size,
                "flops": settings.flops,
                "e2e_time": time.monotonic() - self.started,
                "p_validation_whole": speed["validation"].whole.value,
                "p_validation_core": speed["validation"].core.value,
                "p_inference_whole": speed["inference"].whole.value,
                "p_inference_core": speed["inference"].core.value,
                "val_average_acc": validation,
                "infer_average_acc": inference,
                "compile_time": results.compile_s,
                "valid": not reasons,
                "invalid_reasons": reasons,
                "core_wait_s": self.cpu_wait.longest_s(),
            }
        )


def _full_batches(iterator: Iterator[InferBatch], batch_size: int) -> list[InferBatch]:
    full: list[InferBatch] = []
    for batch in iterator:
        if batch.num_items == batch_size:
            full.append(batch)
        if len(full) == _FRESH_BATCHES:
            break
    return full
