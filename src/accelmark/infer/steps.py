"""The seven steps of an inference run, each timed and shown; what an earlier one measured survives a later one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from accelmark.infer import setup
from accelmark.infer.batches import FirstBatches, checked
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest
from accelmark.infer.engines import eager
from accelmark.infer.failures import Situation, end_reason_of, explained
from accelmark.infer.measure import Emit, Forward, Measured, measure, warm_up
from accelmark.infer.repeat_check import repeat_check
from accelmark.infer.scenarios import Scenarios
from accelmark.infer.traces import engine_traces, file_hash, model_traces
from accelmark.results.figures.inference import invalid_reasons, phase_figures
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.events import Event
from accelmark.spec.inference import InferPrecision, InferStep, planned_steps
from accelmark.spec.inference.events import InferEndReason, InferFinished, Phase, RepeatCheck, StageBegin, StageEnd
from accelmark.spec.job import JobSpec
from accelmark.spec.settings import Scalar
from accelmark.spec.work import InferJob
from accelmark.train.loop.cpu_wait import CpuWait

_FRESH_BATCHES: Final = 12
"""Batches that the repeat check may use."""


@final
@dataclass(slots=True)
class _Findings:
    """What the steps have come to so far."""

    case: InferCase | None = None
    batches: InferBatches | None = None
    partial: bool = False
    """Whether the data is a part or a stand-in, whose accuracy no published one can be held against."""
    model: nn.Module | None = None
    validation: Measured | None = None
    onnx_path: Path | None = None
    engine: Engine | None = None
    traced: Engine | None = None
    """An engine whose hashes are still to be taken."""
    compile_s: float | None = None
    check: RepeatCheck | None = None
    inference: Measured | None = None
    finished: InferFinished | None = None
    details: dict[str, Scalar] = field(default_factory=dict)
    """Of the step in hand."""


@final
@dataclass(frozen=True, slots=True)
class _Ended:
    """The step that ended the run, and how."""

    step: InferStep
    error: AccelmarkError


@final
class SevenSteps:
    """One inference run in this process."""

    def __init__(self, job: JobSpec, infer: InferJob, node_dir: Path, emit: Emit, started: float) -> None:
        """Take the job.

        Args:
            job: the whole job.
            infer: its inference side.
            node_dir: where files go.
            emit: writes an event.
            started: when the process began, on the clock of ``time.monotonic``.
        """
        self.job = job
        self.infer = infer
        self.settings = infer.settings
        self.node_dir = node_dir
        self.work_dir = node_dir / "engine"
        self.emit = emit
        self.started = started
        self.cpu_wait = CpuWait()
        self.found = _Findings()
        self.place = setup.Place.of(job, infer.settings)
        self.step = InferStep.INITIALISE
        self.ended: _Ended | None = None
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
        """Go through the steps and return what is to be written as the last event.

        A step that fails ends the run; those after it are shown as left out, and the summary still comes.
        """
        for planned in planned_steps(self.settings):
            skipped = planned.skipped
            if self.ended is not None and planned.step is not InferStep.SUMMARISE:
                skipped = f"step {self.ended.step} failed"
            self._take(planned.step, skipped)
        return self.found.finished or self.summary("error", "the summary failed; see the rank's log")

    def _take(self, step: InferStep, skipped: str | None) -> None:
        self.step = step
        if skipped is not None:
            self._end(step, "skipped", 0.0, skipped)
            return
        self.emit(Event.STAGE_BEGIN, StageBegin(step=step, number=step.number))
        self.found.details = {}
        began = time.perf_counter()
        try:
            self._actions[step]()
        except Exception as error:  # noqa: BLE001 - whatever a case or an engine raises becomes a typed end
            typed = explained(error, self._situation(f"step {step.number} ({step})"))
            if typed is not error:
                setup.show_traceback(error)
            self._end(step, "failed", time.perf_counter() - began, str(typed))
            self.ended = _Ended(step, typed)
            return
        took = time.perf_counter() - began
        if self.found.traced is not None:  # outside the step's own time
            self.found.details |= engine_traces(self.found.traced)
            self.found.traced = None
        if step is InferStep.COMPILE:
            self.found.compile_s = took
        self._end(step, "done", took, None)

    def _end(self, step: InferStep, state: str, duration_s: float, reason: str | None) -> None:
        details = {} if state == "skipped" else self.found.details
        value = StageEnd.model_validate(
            {"step": step, "number": step.number, "state": state, "duration_s": duration_s, "reason": reason,
             "details": details}
        )  # fmt: skip
        self.emit(Event.STAGE_END, value)

    def _situation(self, doing: str) -> Situation:
        engine = self.settings.compiler if self.step in (InferStep.COMPILE, InferStep.INFER) else "pytorch"
        return Situation(doing, engine or "pytorch", self.settings.batch_size, self.place.device_type)

    def _initialise(self) -> None:
        for note in self.infer.notes:
            self.emit(Event.WARNING, note)
        setup.check_paths(self.job, self.settings)
        self.place.prepare()
        self.emit(Event.INIT_END, self.place.describe(self.settings))

    def _create(self) -> None:
        case = setup.build_case(self.job, self.infer)
        self.found.case = case
        self.found.batches = checked(setup.batches_of(case), f"case {self.job.case.name}")
        self.found.details["items"] = self.found.batches.num_items
        self.found.partial = case.partial or isinstance(self.found.batches, FirstBatches)
        self.found.details["partial"] = self.found.partial
        if not self.settings.no_validation:
            self.found.model = case.create_model().eval()
            self.found.details["parameters"] = setup.num_parameters(self.found.model)
            self.found.details["trained"] = case.trained
            self.found.details |= model_traces(self.found.model)

    def _validate(self) -> None:
        case, batches = self._case_and_batches()
        engine = eager.Engine(self._request(batches, setup.plain(self.settings)), case.model_forward)
        try:
            self.found.validation = self._measure("validation", engine, engine)
        finally:
            engine.close()

    def _export(self) -> None:
        case, batches = self._case_and_batches()
        model = self.found.model
        assert model is not None  # noqa: S101 - no_validation needs exist_onnx_path, which leaves the export out
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "model.onnx"
        case.export_model(model, next(iter(batches)).inputs, path)
        self.found.onnx_path = path
        self.found.details["onnx_mib"] = round(path.stat().st_size / 2**20, 3)
        self.found.details["onnx_sha256"] = file_hash(path)

    def _compile(self) -> None:
        _, batches = self._case_and_batches()
        compiler = self.settings.compiler
        assert compiler is not None  # noqa: S101 - the plan leaves these steps out without a compiler
        engine = setup.engine_class(self.job, compiler)
        for note in setup.unknown_options(engine, self.settings):
            self.emit(Event.WARNING, note)
        self.found.engine = engine(self._request(batches, self.settings.precision))
        self.found.details |= self.found.engine.describe()
        self.found.traced = self.found.engine
        if self.found.engine.file is not None:
            self.found.details["engine_file"] = str(self.found.engine.file)

    def _infer(self) -> None:
        if self.found.engine is None:
            began = time.perf_counter()
            self._compile()
            self.found.details["load_s"] = time.perf_counter() - began
        engine = self.found.engine
        assert engine is not None  # noqa: S101 - _compile sets it or raises
        case, batches = self._case_and_batches()

        forward = partial(case.engine_forward, engine)
        try:
            self.found.inference = self._measure("inference", forward, engine)
            if self.settings.scenarios:
                Scenarios(
                    forward,
                    batches,
                    self.settings,
                    fixed_batch=engine.fixed_batch,
                    node_dir=self.node_dir,
                    situation=self._situation("scenarios"),
                    emit=self.emit,
                ).run()
        finally:
            engine.close()

    def _request(self, batches: InferBatches, precision: InferPrecision) -> EngineRequest:
        example = next(iter(batches))
        return setup.engine_request(
            self.place, self.settings, self.found.model, example, self.found.onnx_path, self.work_dir, precision
        )

    def _measure(self, phase: Phase, forward: Forward, engine: Engine) -> Measured:
        with torch.inference_mode():  # once around all, as a loop of one's own would have it, and not in each call
            return self._measured(phase, forward, engine)

    def _measured(self, phase: Phase, forward: Forward, engine: Engine) -> Measured:
        case, batches = self._case_and_batches()
        situation = self._situation(phase)
        iterator = iter(batches)
        first = next(iterator)
        last_items = batches.num_items % self.settings.batch_size if batches.num_items > first.num_items else 0
        warmed = warm_up(
            forward, first, self.settings.warmup_batches, phase, situation, self.emit, last_items=last_items
        )
        if phase == "inference" and self.settings.repeat_check:
            fresh = _full_batches(iterator, self.settings.batch_size)
            self.found.check = repeat_check(forward, first, fresh, situation.engine)
            self.emit(Event.REPEAT_CHECK, self.found.check)
        evaluated = case.trained and not self.settings.synthetic
        measured = measure(
            forward, batches, case, warmed=warmed, situation=situation, evaluated=evaluated, emit=self.emit
        )
        self.found.details["peak_device_memory_mib"] = engine.device_memory_mib()
        self.found.details["peak_host_memory_mib"] = setup.peak_host_memory_mib()
        return measured

    def _case_and_batches(self) -> tuple[InferCase, InferBatches]:
        case, batches = self.found.case, self.found.batches
        assert case is not None and batches is not None  # noqa: S101, PT018 - the second step sets both or ends the run
        return case, batches

    def _summarise(self) -> None:
        if self.ended is None:
            self.found.finished = self.summary("completed", None)
        else:
            error = self.ended.error
            self.found.finished = self.summary(end_reason_of(error), str(error), self.ended.step)

    def summary(
        self, end_reason: InferEndReason, message: str | None, failed_step: InferStep | None = None
    ) -> InferFinished:
        """Return the value of FINISHED for what was measured so far."""
        found, settings = self.found, self.settings
        speed = {
            name: phase_figures(phase.windows if phase else (), settings.batch_size, "not measured")
            for name, phase in (("validation", found.validation), ("inference", found.inference))
        }
        metric = self.infer.metric
        validation = found.validation.metrics.get(metric) if found.validation else None
        inference = found.inference.metrics.get(metric) if found.inference else None
        measured = [phase for phase in (found.validation, found.inference) if phase is not None]
        reasons = invalid_reasons(
            metric=metric,
            validation=validation,
            inference=inference,
            tolerance=self.infer.tolerance,
            reference=None if found.partial else self.infer.reference,
            nonfinite_batches=sum(phase.nonfinite_batches for phase in measured),
            repeat_check=found.check,
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
                "compile_time": found.compile_s,
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
