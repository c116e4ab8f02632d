"""Run the seven steps of an inference run; measurements are kept when a later step fails."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, final

import torch
from torch import nn

from accelmark.frameworks.pytorch.model.identity import num_parameters
from accelmark.infer import setup
from accelmark.infer.batches import DerivedBatches
from accelmark.infer.case import InferBatches, InferCase
from accelmark.infer.checks.checked_pass import CheckedPass
from accelmark.infer.engine import EngineRequest
from accelmark.infer.engines import eager
from accelmark.infer.failures import Context, EngineExceptionError, classify, end_reason_of
from accelmark.infer.generation.run import generate
from accelmark.infer.hashes import file_hash, model_hashes
from accelmark.infer.language_model.case import LanguageModelCase
from accelmark.infer.language_model.model import CausalModel
from accelmark.infer.measure import Emit, Forward, Measured, measure
from accelmark.infer.onnx.export import import_exporter
from accelmark.infer.process.engine_process import EngineProcess
from accelmark.infer.scenarios import Scenarios
from accelmark.results.rounds.inference import invalid_reasons, phase_figures
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, DataError, RequestError
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import (
    AnswerCheck,
    InferEndReason,
    InferFinished,
    RepeatCheck,
    StageBegin,
    StageEnd,
)
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.settings.inference import InferPrecision, InferStep, Note, file_at, why_skipped
from accelmark.spec.settings.training import Scalar
from accelmark.train.cpu_wait import CpuWait
from accelmark.train.loop.process import Cancelled, StopRequest


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
    process: EngineProcess | None = None
    """The process of the engine, from the first step on."""
    facts: setup.EngineFacts | None = None
    validation: Measured | None = None
    inference: Measured | None = None
    check: RepeatCheck | None = None
    answers: AnswerCheck | None = None
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
        self.cpu_waits = [CpuWait()]
        self.device = setup.ComputeDevice.of(job, infer.settings)
        self.step = InferStep.INITIALISE
        self.details: dict[str, Scalar] = {}
        """Details of the current step."""
        self.unhashed = False
        """Whether the engine's hashes are not yet computed."""
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
        try:
            for step in InferStep:
                skipped = why_skipped(step, self.settings)
                if self.failure is not None and step is not InferStep.SUMMARISE:
                    skipped = f"step {self.failure[0]} failed"
                elif step is InferStep.EXPORT and skipped is None and self._engine_reads() == "model":
                    skipped = f"{self.settings.compiler} compiles the PyTorch model"
                self._run_step(step, skipped)
        finally:
            if self.process is not None:
                self.process.close()
        return self.finished or self.summary("error", "the summary failed; see the log of rank 0")

    def _run_step(self, step: InferStep, skipped: str | None) -> None:
        self.step, self.details = step, {}
        if skipped is not None:
            self._end("skipped", 0.0, skipped)
            return
        context = self._context(f"step {step.number} ({step})")
        if self.process is not None:
            self.process.activity = context.activity
        self.emit(Event.STAGE_BEGIN, StageBegin(step=step, number=step.number, engine=context.engine))
        began = time.perf_counter()
        try:
            self._actions[step]()
        except Exception as error:  # noqa: BLE001 - a case or an engine may raise anything
            classified = classify(error, context)
            if classified is not error:
                traceback.print_exception(error, file=sys.stderr)
            self._end("failed", time.perf_counter() - began, str(classified))
            self.failure = step, classified
            return
        took = time.perf_counter() - began
        if self.unhashed and self.process is not None:  # excluded from the duration
            self.details |= self.process.ask("hashes")
            self.unhashed = False
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
        self.device.prepare()
        if self.settings.compiler is not None:
            self.process = EngineProcess(
                self.settings.compiler, self.node_dir, self.settings.engine_timeout_s, num_devices=self.job.key.nproc
            )
            self.cpu_waits += [CpuWait(Path(f"/proc/{pid}/task")) for pid in self.process.pids]
            self._check_engine()
        self.emit(Event.INIT_END, self.device.describe(self.settings))

    def _check_engine(self) -> None:
        """Check what the engine cannot do, where it can be opened; else the compile step reports why."""
        named = self.settings.exist_onnx_path or self.settings.exist_compiler_path
        if (named is not None or self.infer.iterative) and self._engine_reads() is not None:
            setup.check_paths(self._facts(), self.settings)
            setup.check_iterative(self._facts(), self.settings, iterative=self.infer.iterative)

    def _engine_reads(self) -> str | None:
        """Return what the engine compiles; None where it cannot be opened, which the compile step reports."""
        try:
            return self._facts().reads
        except (AccelmarkError, EngineExceptionError):
            return None

    def _facts(self) -> setup.EngineFacts:
        """Import the engine's class in its process."""
        process = self._engine_process()
        process.wait_until_ready()
        if self.facts is None:
            vendor = setup.vendor_folder(self.job)
            found = process.ask(
                "open", engine=process.engine, vendor=str(vendor) if vendor else None, device=self.device.values()
            )
            self.facts = setup.EngineFacts(**found)
        return self.facts

    def _engine_process(self) -> EngineProcess:
        assert self.process is not None  # noqa: S101 - without a compiler these steps are skipped
        return self.process

    def _create(self) -> None:
        case = self.case = setup.build_case(self.job, self.infer, self.node_dir)
        batches = self.batches = setup.batches_of(case, pinned=self.device.device.type != "cpu")
        if batches.num_items < 1:
            name = self.job.case.name
            raise DataError(f"case {name}: the data has no item; check the data directory of the run")
        if batches.num_items < self.settings.batch_size:
            what = f"larger than the data, so that every call has {batches.num_items} items"
            self.emit(Event.WARNING, Note(severity="warning", where="settings", key="batch_size", what=what))
        self.partial = case.partial or (isinstance(batches, DerivedBatches) and batches.is_part)
        self.details |= {"items": batches.num_items, "partial": self.partial}
        if not self.settings.no_validation:
            self.model = case.create_model().eval()
            self.details |= {"parameters": num_parameters(self.model), "trained": case.trained}
            self.details |= model_hashes(self.model)
            if isinstance(self.model, CausalModel):
                self.details |= self.model.costs()._asdict()

    def _validate(self) -> None:
        if self.process is not None:
            if why_skipped(InferStep.EXPORT, self.settings) is None and setup.declares_onnx(self.job, self.settings):
                import_exporter()  # on this core, while the process starts on another
            self.process.wait_until_ready()
        precision: InferPrecision = "fp32" if self.settings.precision == "int8" else self.settings.precision
        engine = self._framework(precision)
        try:
            with torch.inference_mode():  # entered once, not in each call
                self.validation = measure(engine.call, self.batches, self.case, self.emit)
            self.details["peak_device_memory_mib"] = engine.device_memory_mib()
            self.details["peak_host_memory_mib"] = setup.peak_host_memory_mib()
        finally:
            engine.close()

    def _export(self) -> None:
        assert self.model is not None  # noqa: S101 - no_validation needs exist_onnx_path, which skips this step
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "model.onnx"
        self.case.export_model(self.model, next(iter(self.batches)).inputs, path)
        self.onnx_path = path
        self.details |= {"onnx_mib": round(path.stat().st_size / 2**20, 3), "onnx_sha256": file_hash(path)}

    def _compile(self) -> None:
        process, settings = self._engine_process(), self.settings
        facts = self._facts()
        setup.check_generation(facts, self.case, settings)
        setup.check_devices(facts, settings, self.job.key.nproc)
        for note in setup.unknown_options(facts, settings):
            self.emit(Event.WARNING, note)
        request = self._request(settings.precision)
        takes_model = facts.reads == "model" or (facts.reads == "either" and request.onnx_path is None)
        if not takes_model or self.job.key.nproc > 1:
            request = replace(request, model=None)
        self.details |= process.compile(request, [(self.job.case, f"infer_{self.job.key.framework}")])
        self.unhashed = True

    def _infer(self) -> None:
        process, settings = self._engine_process(), self.settings
        if settings.exist_compiler_path is not None:
            began = time.perf_counter()
            self._compile()
            self.details["load_s"] = time.perf_counter() - began
        engine = None
        if self.model is not None:
            engine = self._framework("fp32")
        reference: Forward | None = engine.call if engine is not None else None
        try:
            with torch.inference_mode():
                checked = CheckedPass(
                    self.case, self.batches, process, reference, self.emit, iterative=self.infer.iterative
                )
                self.inference, self.check, self.answers = checked.run()
                self.details |= process.usage()
                if settings.generate_batches and isinstance(self.case, LanguageModelCase):
                    self._generate(self.case)
                if settings.scenarios:
                    scenarios = Scenarios(checked, self._facts().fixed_batch, self.node_dir, self._context("scenarios"))
                    for result in scenarios.run():
                        self.emit(Event.SCENARIO, result)
        finally:
            if engine is not None:
                engine.close()

    def _generate(self, case: LanguageModelCase) -> None:
        with torch.inference_mode(False):
            generate(
                self.settings,
                case.served,
                self._engine_process(),
                self.job.data_dirs,
                self.device.device_type,
                self.node_dir,
                self.emit,
            )
        self.details |= self._engine_process().usage()

    def _framework(self, precision: InferPrecision) -> eager.Engine:
        """Return the framework's computation, without the options of the engine."""
        return eager.Engine(replace(self._request(precision), options={}), self.case.model_forward)

    def _request(self, precision: InferPrecision) -> EngineRequest:
        settings, device = self.settings, self.device
        self.work_dir.mkdir(parents=True, exist_ok=True)
        calibration = setup.calibration_inputs(self.case, settings, precision)
        example = tuple(each[: settings.batch_size] for each in calibration) or next(iter(self.batches)).inputs
        return EngineRequest(
            model=self.model,
            onnx_path=self.onnx_path or file_at(settings.exist_onnx_path),
            engine_path=Path(settings.exist_compiler_path).expanduser() if settings.exist_compiler_path else None,
            example=example,
            calibration=calibration,
            precision=precision,
            device=device.device,
            device_type=device.device_type,
            threads=device.threads,
            optimize_for=settings.optimized_for,
            options=settings.engine_options,
            work_dir=self.work_dir,
            input_names=self.case.input_names,
            output_names=self.case.output_names,
            model_dir=self.case.directory if isinstance(self.case, LanguageModelCase) else None,
        )

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
            answers=self.answers,
            precision=settings.precision,
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
            core_wait_s=max((wait for each in self.cpu_waits if (wait := each.longest_s()) is not None), default=None),
        )
