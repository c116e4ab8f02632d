"""Rules about inference: the case's contract, the model, what was compiled, accuracy gates, precision, LoadGen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from accelmark.audit.evidence import Evidence, RoundEvidence, breach, finding
from accelmark.results.figures.definitions import FigureName
from accelmark.results.schema import Finding, InferenceRound
from accelmark.spec.inference import InferStep
from accelmark.spec.settings import TYPE_OF_PRECISION, Scalar
from accelmark.spec.work import InferJob

MIN_INFER_S: Final = {"mini": 2.0, "standard": 10.0}
"""Least time of the measured pass for its rates to be steady, by the size of a case."""
MOST_DECLARED: Final = 0.01
"""Largest share of the measured calls' time that an engine may declare as not inference and nobody has to look."""

_SPELT: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_TYPE: Final = re.compile(r"\b(bfloat16|float16|float32|bf16|f16|f32)\b")
_HASHES: Final = {"parameter_hash": "parameters", "module_hash": "modules", "weights_hash": "weights"}


def _infer_rounds(evidence: Evidence) -> Iterator[tuple[RoundEvidence, InferenceRound, InferJob]]:
    for entry in evidence.good:
        if entry.result.inference is not None and entry.job is not None and isinstance(entry.job.work, InferJob):
            yield entry, entry.result.inference, entry.job.work


def details(inference: InferenceRound, step: InferStep) -> dict[str, Scalar]:
    """Return what a step told of itself."""
    return next((stage.details for stage in inference.stages if stage.step is step), {})


def engine_details(inference: InferenceRound) -> dict[str, Scalar]:
    """Return what is known of the engine, whether it was compiled or loaded."""
    return details(inference, InferStep.COMPILE) | details(inference, InferStep.INFER)


def case_contract(evidence: Evidence) -> Iterator[Finding]:
    """Check that what an inference case fixes (its numbers, metric, tolerance, reference) is what the job had."""
    case = evidence.standard.spec.infer if evidence.standard is not None else None
    if case is None:
        return
    for entry, _, infer in _infer_rounds(evidence):
        for name in ("unit", "metric", "tolerance", "reference"):
            expected, actual = getattr(case, name), getattr(infer, name)
            if expected != actual:
                yield finding("error", "target", f"{name} {expected}", f"the job had {actual}", entry)
        changed = [
            f"{name} is {infer.parameters.get(name)} instead of {value}"
            for name, value in case.parameters.items()
            if infer.parameters.get(name) != value
        ]
        changed += [f"{name} is none of the case's" for name in sorted(set(infer.parameters) - set(case.parameters))]
        if changed:
            yield breach("settings-fixed", "the parameters of case.yaml", "; ".join(changed), entry)


def model_structure(evidence: Evidence) -> Iterator[Finding]:
    """Check that all rounds built one and the same model with the same weights."""
    seen: dict[str, tuple[Scalar, int]] = {}
    for entry, inference, _ in _infer_rounds(evidence):
        told = details(inference, InferStep.CREATE)
        for name, what in _HASHES.items():
            value = told.get(name)
            if value is None:
                continue
            first, number = seen.setdefault(name, (value, entry.number))
            if first != value:
                actual = f"its {what} have hash {str(value)[:12]}, those of round {number} {str(first)[:12]}"
                yield finding("error", "model-structure", "one model in all rounds", actual, entry)


def engine_source(evidence: Evidence) -> Iterator[Finding]:
    """Check that the engine was compiled from what this run exported; tell whose code the engine is."""
    for entry, inference, infer in _infer_rounds(evidence):
        if infer.settings.compiler is None:
            continue
        engine = engine_details(inference)
        exported = details(inference, InferStep.EXPORT).get("onnx_sha256")
        compiled, given = engine.get("onnx_sha256"), engine.get("engine_given_sha256")
        if given is not None:
            actual = f"an engine file was given, hash {str(given)[:12]}: what it was compiled from cannot be seen"
            yield finding("warning", "engine-source", "an engine that this run compiled", actual, entry)
        elif exported is not None and compiled is not None and exported != compiled:
            actual = f"the engine compiled a file of hash {str(compiled)[:12]}"
            yield breach("engine-source", f"the ONNX file that was exported, hash {str(exported)[:12]}", actual, entry)
        elif exported is None and compiled is not None:
            actual = f"an ONNX file was given, hash {str(compiled)[:12]}"
            yield finding("warning", "engine-source", "an ONNX file that this run exported", actual, entry)
        if "engine_code" in engine:
            actual = (
                f"{infer.settings.compiler} is the code of {engine['engine_code']}, "
                f"{engine.get('engine_code_lines')} lines, hash {str(engine.get('engine_code_sha256'))[:12]}"
            )
            yield finding("info", "engine-code", "an engine that AccelMark ships", actual, entry)


def accuracy_gate(evidence: Evidence) -> Iterator[Finding]:
    """Check that the engine's accuracy was measured, and there was something to hold it against."""
    for entry, _, infer in _infer_rounds(evidence):
        if infer.settings.compiler is None or "synthetic" in entry.result.marks:
            continue
        figures = entry.result.figures
        inference, validation = figures[FigureName.INFERENCE_METRIC], figures[FigureName.VALIDATION_METRIC]
        if inference.value is None:
            actual = f"it was not measured: {inference.reason}"
            yield finding("error", "accuracy-gate", f"{infer.metric} of the engine", actual, entry)
        elif validation.value is None and infer.reference is None:
            actual = f"the framework's was not measured ({validation.reason}), and the case states no reference"
            yield finding("error", "accuracy-gate", f"a {infer.metric} to compare the engine's with", actual, entry)


def precision(evidence: Evidence) -> Iterator[Finding]:
    """Check that the engine computes in the precision that was declared, where it tells."""
    for entry, inference, infer in _infer_rounds(evidence):
        declared = infer.settings.precision
        if infer.settings.compiler is None or declared == "int8":
            continue  # an engine tells the type between its layers, which is no integer for a quantised model
        engine = engine_details(inference)
        told = str(engine.get("precision") or engine.get("dtype") or "")
        found = {_SPELT.get(word, word) for word in _TYPE.findall(told)}
        if not found:
            actual = f"{infer.settings.compiler} does not tell what it computes in"
            yield finding("info", "precision", declared, actual, entry)
        elif found != {TYPE_OF_PRECISION[declared]}:
            actual = f"the engine computes in {', '.join(sorted(found))}"
            yield breach("precision", f"{declared} ({TYPE_OF_PRECISION[declared]})", actual, entry)


def enough_measured(evidence: Evidence) -> Iterator[Finding]:
    """Check that the measured pass took long enough, and that a cache was looked for."""
    size = evidence.standard.spec.size if evidence.standard is not None else "mini"
    for entry, inference, infer in _infer_rounds(evidence):
        rate = entry.result.figures[FigureName.INFERENCE_WHOLE].value
        if rate:
            took_s = entry.result.num_samples / rate
            if took_s < MIN_INFER_S[size]:
                expected = f"at least {MIN_INFER_S[size]:g} s for a {size} case (setting repeat)"
                yield finding("warning", "enough-duration", expected, f"it inferred for {took_s:.1f} s", entry)
        if infer.settings.compiler is None:
            continue
        if not infer.settings.repeat_check:
            actual = "repeat_check was switched off: outputs that come from a cache would not be seen"
            yield finding("open", "cache-check", "the same items compared with fresh ones", actual, entry)
        elif inference.repeat_check is not None and inference.repeat_check.reason:
            actual = f"no cache was looked for: {inference.repeat_check.reason}"
            yield finding("warning", "cache-check", "the same items compared with fresh ones", actual, entry)


def declared_time(evidence: Evidence) -> Iterator[Finding]:
    """Have a person look where an engine leaves more than a little of its calls' time out of every figure."""
    for entry, _, infer in _infer_rounds(evidence):
        share = entry.result.figures[FigureName.DECLARED_SHARE].value
        if share is not None and share > MOST_DECLARED:
            actual = (
                f"{infer.settings.compiler} declares {share:.1%} of its calls' time as not inference: "
                "a person has to look at what it leaves out"
            )
            yield finding("open", "declared-time", f"at most {MOST_DECLARED:.0%} after warming up", actual, entry)


def loadgen(evidence: Evidence) -> Iterator[Finding]:
    """Check that LoadGen itself calls each scenario that gave a figure valid."""
    for entry, inference, infer in _infer_rounds(evidence):
        for result in inference.scenarios:
            said = f"scenario {result.scenario}"
            if result.figure is not None and not result.valid:
                actual = f"{said}: LoadGen calls the run invalid ({result.reason or 'see its log'})"
                yield finding("error", "loadgen-valid", "a run that LoadGen calls valid", actual, entry)
            elif result.figure is None:
                actual = f"{said} has no figure: {result.reason or 'LoadGen gave none'}"
                yield finding("warning", "loadgen-valid", "a figure for every scenario asked for", actual, entry)
            elif result.functional:
                actual = f"{said} ran for less than MLPerf asks: it shows function, no figure for a submission"
                yield finding("warning", "loadgen-duration", "600 s a scenario", actual, entry)
        missing = set(infer.settings.scenarios) - {result.scenario for result in inference.scenarios}
        if missing:
            actual = f"no result of {', '.join(sorted(missing))}"
            yield finding("error", "loadgen-valid", "a result for every scenario asked for", actual, entry)
