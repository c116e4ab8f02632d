"""Run the seven steps of an inference run; measurements are kept when a later step fails."""

from __future__ import annotations

import importlib
import os
import resource
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from accelmark.datasets.verify import DataReads
from accelmark.frameworks.pytorch.model.identity import module_hash, num_parameters, structure_hash, weights_hash
from accelmark.infer.case import DerivedBatches, InferBatch, InferBatches, InferCase
from accelmark.infer.engine import (
    CALIBRATION_ITEMS,
    ComputeDevice,
    Context,
    EngineExceptionError,
    EngineRequest,
    InferenceError,
    Source,
    classify,
    end_reason_of,
    file_hash,
)
from accelmark.infer.engine_process import EngineProcess
from accelmark.infer.engines import eager
from accelmark.infer.generation import generate
from accelmark.infer.language_model import CausalModel, LanguageModelCase
from accelmark.infer.measure import CheckedPass, Emit, Measured, measure
from accelmark.infer.scenarios import Scenarios
from accelmark.results.rounds.inference import invalid_reasons, phase_figures
from accelmark.serving.load import ServedModel
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, DataError, RequestError, nearest
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.events import DataRead, Event
from accelmark.spec.log.inference import AnswerCheck, InferEndReason, InferFinished, RepeatCheck, StageBegin, StageEnd
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.catalog import FolderRef, engine_specs, folder_module, folders
from accelmark.spec.settings.inference import InferPrecision, InferStep, Note, file_at, why_skipped
from accelmark.spec.settings.training import Scalar
from accelmark.train.case import declared_class
from accelmark.train.loop.process import Cancelled, CpuWait, StopRequest


class EngineFacts(NamedTuple):
    """The properties that an engine's class states."""

    reads: Source
    loads: bool
    fixed_batch: bool
    generates: bool
    iterates: bool
    has_logits: bool
    max_devices: int | None
    known_options: Sequence[str] | None


def run_inference(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run an inference job; every run ends with the event FINISHED. Returns the exit code."""
    if not isinstance(job.work, InferJob):
        raise RequestError(f"job.json: not an inference job but one of kind {job.work.kind!r}")
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or Path.cwd())
    run = InferenceRun(job, job.work, node_dir, log.event, process_start)

    def overdue(signal_name: str) -> None:
        message = f"{signal_name}, and step {run.step} did not finish in time"
        log.event(Event.FINISHED, run.summary("cancelled", message, run.step))
        os._exit(EXIT_CANCELLED)

    stop.install(overdue)
    reads = DataReads(job.data_dirs)
    try:
        finished = run.run()
        log.event(Event.DATA_READ, DataRead(sample=reads.sample(secrets.token_hex())))
    except Cancelled as signal_name:
        finished = run.summary("cancelled", f"stopped by {signal_name}", run.step)
    if finished.message is not None:
        log.event(Event.ERROR, {"message": finished.message, "step": finished.failed_step})
    log.event(Event.FINISHED, finished)
    return {"completed": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}[finished.state]


class InferenceRun:
    """One inference run in this process; ``started`` is its start on the clock of ``time.monotonic``."""

    case: InferCase
    """Like ``batches``, set by the second step, without which no later step runs."""
    batches: InferBatches
    model: nn.Module | None = None
    onnx_path: Path | None = None
    process: EngineProcess | None = None
    facts: EngineFacts | None = None
    validation: Measured | None = None
    inference: Measured | None = None
    check: RepeatCheck | None = None
    answers: AnswerCheck | None = None
    compile_s: float | None = None
    partial: bool = False
    """Whether the data is a subset or a substitute: its accuracy does not compare with published accuracy."""
    failure: tuple[InferStep, AccelmarkError] | None = None
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
        self.device = ComputeDevice(
            device_type=job.device_type,
            module=job.framework_module,
            threads=infer.settings.threads or len(os.sched_getaffinity(0)),
            required=not infer.settings.no_validation,
            collectives=job.collective_backend,
        )
        self.step = InferStep.INITIALISE
        self.details: dict[str, Scalar] = {}
        self.unhashed = False
        """Whether the engine's hashes are not yet computed."""

    def run(self) -> InferFinished:
        """Run the steps up to one that fails, and the summary; return the value of the last event."""
        try:
            for step in InferStep:
                skipped = why_skipped(step, self.settings)
                if self.failure is not None and step is not InferStep.SUMMARISE:
                    skipped = f"step {self.failure[0]} failed"
                elif step is InferStep.EXPORT and skipped is None:
                    facts = self._facts_if_importable()
                    if facts is not None and facts.reads == "model":
                        skipped = f"{self.settings.compiler} compiles the PyTorch model"
                self._run_step(step, skipped)
        finally:
            if self.process is not None:
                self.process.close()
        return self.finished or self.summary("error", "the summary failed; see the log of rank 0")

    def _run_step(self, step: InferStep, skipped: str | None) -> None:
        self.step, self.details = step, {}
        state: Literal["done", "skipped", "failed"] = "skipped"
        took_s, reason = 0.0, skipped
        if skipped is None:
            context = self._context(f"step {step.number} ({step})")
            if self.process is not None:
                self.process.activity = context.activity
            self.emit(Event.STAGE_BEGIN, StageBegin(step=step, number=step.number, engine=context.engine))
            began = time.perf_counter()
            try:
                getattr(self, f"_{step}")()
            except Exception as error:  # noqa: BLE001 - a case or an engine may raise anything
                classified = classify(error, context)
                if classified is not error:
                    traceback.print_exception(error, file=sys.stderr)
                state, took_s, reason = "failed", time.perf_counter() - began, str(classified)
                self.failure = step, classified
            else:
                state, took_s = "done", time.perf_counter() - began
                if self.unhashed and self.process is not None:  # excluded from the duration
                    self.details |= self.process.call("hashes")
                    self.unhashed = False
                if step is InferStep.COMPILE:
                    self.compile_s = took_s
        ended = StageEnd(
            step=step, number=step.number, state=state, duration_s=took_s, reason=reason, details=self.details
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
            files = self.settings.exist_onnx_path or self.settings.exist_compiler_path
            if files is not None or self.infer.iterative:  # a request that may be refused before any work
                facts = self._facts_if_importable()
                if facts is not None:
                    check_engine(facts, self.infer, self.job.key.nproc)
        self.emit(Event.INIT_END, self.device.describe(self.settings))

    def _engine_facts(self) -> EngineFacts:
        process = self._engine_process()
        process.wait_until_ready()
        if self.facts is None:
            self.facts = EngineFacts(**process.call("open", process.engine, vendor_folder(self.job), self.device))
        return self.facts

    def _facts_if_importable(self) -> EngineFacts | None:
        """Return the engine's facts; None where the compile step reports why it cannot be imported."""
        with suppress(AccelmarkError, EngineExceptionError):
            return self._engine_facts()
        return None

    def _engine_process(self) -> EngineProcess:
        assert self.process is not None  # noqa: S101 - without a compiler these steps are skipped
        return self.process

    def _create(self) -> None:
        case = self.case = build_case(self.job, self.infer, self.node_dir)
        batches = self.batches = batches_of(case, pinned=self.device.device.type != "cpu")
        if batches.num_items < 1:
            raise DataError(f"case {self.job.case.name}: the data has no item; check the data directory of the run")
        if batches.num_items < self.settings.batch_size:
            problem = f"larger than the data, so that every call has {batches.num_items} items"
            self.emit(Event.WARNING, Note(severity="warning", where="settings", key="batch_size", what=problem))
        self.partial = case.partial
        self.details |= {"items": batches.num_items, "partial": self.partial}
        if not self.settings.no_validation:
            self.model = case.create_model().eval()
            self.details |= {
                "parameters": num_parameters(self.model),
                "trained": case.trained,
                "parameter_hash": structure_hash(self.model),
                "module_hash": module_hash(self.model),
                "weights_hash": weights_hash(self.model),
            }
            if isinstance(self.model, CausalModel):
                self.details |= self.model.costs()

    def _validate(self) -> None:
        if self.process is not None:
            spec = engine_specs(vendor_folder(self.job)).get(self.process.engine)
            if why_skipped(InferStep.EXPORT, self.settings) is None and any(
                each.startswith("onnxscript") for each in (spec.requires if spec is not None else ())
            ):
                # Imported on this core, while the process starts on another; the export reports missing modules.
                with suppress(ImportError):
                    for name in ("onnx", "onnxscript", "torch._dynamo"):
                        importlib.import_module(name)
            self.process.wait_until_ready()
        engine = self._framework("fp32" if self.settings.precision == "int8" else self.settings.precision)
        try:
            with torch.inference_mode():  # entered once, not in each call
                self.validation = measure(engine.call, self.batches, self.case, self.emit)
            self.details["peak_device_memory_mib"] = engine.device_memory_mib()
            self.details["peak_host_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        finally:
            engine.close()

    def _export(self) -> None:
        assert self.model is not None  # noqa: S101 - no_validation needs exist_onnx_path, which skips this step
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "model.onnx"
        self.case.export_model(self.model, self.example, path)
        self.onnx_path = path
        self.details |= {"onnx_mib": round(path.stat().st_size / 2**20, 3), "onnx_sha256": file_hash(path)}

    def _compile(self) -> None:
        process, settings = self._engine_process(), self.settings
        facts = self._engine_facts()
        check_engine(facts, self.infer, self.job.key.nproc)
        if settings.generate_batches and not isinstance(self.case, LanguageModelCase):
            raise RequestError("generate_batches: the case is not a language model; remove the setting")
        known = settings.engine_options if facts.known_options is None else facts.known_options
        for name in sorted(set(settings.engine_options).difference(known)):
            problem = f"unknown option of the engine {settings.compiler} ({nearest(name, known)})"
            key = f"engine_options.{name}"
            self.emit(Event.WARNING, Note(severity="warning", where="settings", key=key, what=problem))
        request = self._request(settings.precision)
        # The process reads a language model from its files, as several processes do.
        if self.job.key.nproc > 1 or request.model_dir is not None or not request.gives_model(facts.reads):
            request = replace(request, model=None)
        module = f"infer_{self.job.key.framework}"
        has_own = not self.infer.generates and (self.job.case.path / f"{module}.py").is_file()
        modules = [(self.job.case, module)] if has_own else []
        self.details |= process.compile(request, modules)
        self.unhashed = True

    def _infer(self) -> None:
        process, settings = self._engine_process(), self.settings
        if settings.exist_compiler_path is not None:
            began = time.perf_counter()
            self._compile()
            self.details["load_s"] = time.perf_counter() - began
        self._measure(process)
        self.model = None  # generation uses the memory of the host and of the device
        if settings.generate_batches and isinstance(self.case, LanguageModelCase):
            served = self.case.served
            self.details["prompts_seed"] = generate(settings, served, process, self.job, self.node_dir, self.emit)
            self.details |= process.usage()

    def _measure(self, process: EngineProcess) -> None:
        """Run the measured passes and the scenarios, next to the framework's model in fp32, which is freed after."""
        engine = self._framework("fp32") if self.model is not None else None
        reference = None if engine is None else engine.call
        try:
            with torch.inference_mode():
                checked = CheckedPass(self.case, self.batches, process, reference, self.emit, self.infer.iterative)
                self.inference, self.check, self.answers = checked.run()
                self.details |= process.usage()
                if self.settings.scenarios:
                    fixed = self._engine_facts().fixed_batch
                    for result in Scenarios(checked, fixed, self.node_dir, self._context("scenarios")).run():
                        self.emit(Event.SCENARIO, result)
        finally:
            if engine is not None:
                engine.close()

    @cached_property
    def example(self) -> tuple[Tensor, ...]:
        """Inputs of the first batch: workers read several batches at the start of a pass, whatever is taken of it."""
        return next(iter(self.batches)).inputs

    def _framework(self, precision: InferPrecision) -> eager.Engine:
        """Return the framework's computation, without the options of the engine."""
        return eager.Engine(replace(self._request(precision), options={}), self.case.model_forward)

    def _request(self, precision: InferPrecision) -> EngineRequest:
        settings, device = self.settings, self.device
        self.work_dir.mkdir(parents=True, exist_ok=True)
        calibration: tuple[Tensor, ...] = ()
        if precision == "int8" and settings.exist_compiler_path is None:  # synthetic data that is not measured
            make = self.case.synthetic_batch if settings.synthetic else self.case.calibration_batch
            calibration = make(max(settings.batch_size, CALIBRATION_ITEMS)).inputs
        return EngineRequest(
            model=self.model,
            onnx_path=self.onnx_path or file_at(settings.exist_onnx_path),
            engine_path=Path(settings.exist_compiler_path).expanduser() if settings.exist_compiler_path else None,
            example=tuple(tensor[: settings.batch_size] for tensor in calibration) or self.example,
            calibration=calibration,
            precision=precision,
            device=device.device,
            device_type=device.device_type,
            threads=device.threads,
            optimize_for=settings.optimized_for,
            options=dict(settings.engine_options),
            work_dir=self.work_dir,
            input_names=self.case.input_names,
            output_names=self.case.output_names,
            model_dir=self.case.directory if isinstance(self.case, LanguageModelCase) else None,
        )

    def _summarise(self) -> None:
        self.finished = self.summary("completed", None)
        if self.failure is not None:
            step, error = self.failure
            self.finished = self.summary(end_reason_of(error), str(error), step)

    def summary(
        self, end_reason: InferEndReason, message: str | None, failed_step: InferStep | None = None
    ) -> InferFinished:
        """Return the value of FINISHED from the results so far."""
        settings, metric = self.settings, self.infer.metric
        phases = [phase or Measured((), {}) for phase in (self.validation, self.inference)]
        validation, inference = (phase_figures(phase.windows, settings.batch_size, "not measured") for phase in phases)
        val_acc, infer_acc = (phase.metrics.get(metric) for phase in phases)
        reasons = invalid_reasons(
            self.infer,
            validation=val_acc,
            inference=infer_acc,
            is_partial=self.partial,
            nonfinite_batches=sum(window.nonfinite_batches for phase in phases for window in phase.windows),
            repeat_check=self.check,
            answers=self.answers,
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


def build_case(job: JobSpec, infer: InferJob, node_dir: Path) -> InferCase:
    """Create the case of a language model, or else that of :func:`inference_class`.

    A language model that the case packages is written below ``node_dir``. Raises InferenceError: there is no ``Case``.
    """
    if infer.generates:
        return LanguageModelCase(infer.settings, infer.parameters, job.data_dirs, ServedModel(job, node_dir))
    return inference_class(job.case, job.key.framework)(infer.settings, infer.parameters, job.data_dirs)


def inference_class(folder: FolderRef, framework: str) -> type[InferCase]:
    """Return the class that ``case.yaml`` declares, else ``Case`` of the folder's ``infer_<framework>.py``."""
    case, where = declared_class(folder.path, "infer", framework, "accelmark.infer")
    if case is None:
        path = folder.path / f"infer_{framework}.py"
        if not path.is_file():
            raise InferenceError(f"{path}: does not exist; the case has no inference in {framework}")
        case, where = getattr(folder_module(folder, path.stem), "Case", None), str(path)
    if not (isinstance(case, type) and issubclass(case, InferCase)):
        raise InferenceError(f"{where}: defines no class Case derived from accelmark.infer.case.InferCase")
    return case


def batches_of(case: InferCase, *, pinned: bool) -> InferBatches:
    """Return the case's data, synthetic or shortened according to the settings, in page-locked memory if ``pinned``."""
    settings = case.settings
    most = settings.max_batches
    if settings.synthetic:
        made = [case.synthetic_batch(settings.batch_size) for _ in range(most or 32)]
        batches = [batch.pinned() for batch in made] if pinned else made
        return DerivedBatches(settings.batch_size * len(batches), lambda: batches)
    whole = case.build_dataloader()
    num_items = whole.num_items if most is None else min(most * settings.batch_size, whole.num_items)
    case.partial = case.partial or num_items < whole.num_items

    def passed() -> Iterator[InferBatch]:
        for batch in islice(whole, most):
            yield batch.pinned() if pinned else batch  # outside of calls

    return DerivedBatches(num_items, passed)


def vendor_folder(job: JobSpec) -> Path | None:
    """Return the folder of the job's vendor, whose engines take precedence; None where there is none."""
    vendor = folders("vendors").get(job.vendor)
    return vendor.path if vendor is not None else None


def check_engine(engine: EngineFacts, infer: InferJob, num_devices: int) -> None:
    """Check that the engine supports the job. Raises AccelmarkError: it does not, or its compiled engine is missing."""
    settings = infer.settings
    existing, onnx, most = settings.exist_compiler_path, settings.exist_onnx_path, engine.max_devices
    problem = None
    if existing is not None and not engine.loads:
        problem = "cannot load a compiled engine (exist_compiler_path)"
    elif existing is None and engine.reads == "onnx" and onnx is not None and file_at(onnx) is None:
        problem = f"compiles an ONNX file, and exist_onnx_path is none: {onnx}"
    elif infer.iterative and not engine.iterates:
        problem = "compiles one static graph, and the case's answers take dependent steps"
    elif settings.generate_batches and not engine.generates:
        problem = "generates no text (generate_batches)"
    elif settings.generate_batches and settings.benchmarks and not engine.has_logits:
        problem = "returns no logits (benchmarks)"
    elif most is not None and num_devices > most:
        problem = f"computes on {most} of {num_devices} devices"
    if problem is not None:
        advice = "change the setting, or choose another engine (--compiler eager)"
        raise RequestError(f"the engine {settings.compiler} {problem}; {advice}")
    if existing is not None and not Path(existing).expanduser().exists():
        raise InferenceError(f"{existing}: exist_compiler_path does not exist", "incompatible_engine")
