"""Rules about inference: the case's fixed values, model, engine, accuracy, precision, duration and LoadGen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, deviation
from accelmark.results.figures import FigureName
from accelmark.results.rounds.inference import answer_reasons
from accelmark.results.schema import InferenceRound, finding
from accelmark.spec.job import InferJob
from accelmark.spec.log.inference import ScenarioResult, TokenScenarioResult
from accelmark.spec.number_format import limit_percent, percent
from accelmark.spec.settings.inference import InferSettings, InferStep
from accelmark.spec.settings.training import TYPE_OF_PRECISION, Scalar

MIN_INFER_S: Final = {"mini": 2.0, "standard": 10.0}
"""Duration of the measured pass from which its rates are steady, by the size of a case."""
PUBLISHED_S: Final = (600.0, 86_400.0)
"""Limits of the total time of a round whose result FlagPerf publishes."""
MAX_DECLARED_SHARE: Final = 0.01
"""Share of the measured calls' time that an engine may declare as not inference without making the result OPEN."""

MAX_SHARE_OUTSIDE: Final = 0.1
"""Share of the windows outside of the calls, above which a warning is given."""

MAX_UNREAD_ERROR: Final = {"bf16": 0.012, "int8": 0.0}
"""Largest median error of answers that confirms a precision which only an engine outside AccelMark states.

Honest engines have 0.002 to 0.005 in bf16, and 0.017 and 0.023 in int8. No error distinguishes int8 from narrower
types."""

_WIDTHS: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
_HALF: Final = frozenset({"float16", "bfloat16"})
_RATES: Final = ("samples_per_second", "queries_per_second")
_SPELT: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_HASHES: Final = {"parameter_hash": "parameters", "module_hash": "modules", "weights_hash": "weights"}


def inferences(evidence: Evidence) -> Iterator[tuple[RoundEvidence, InferenceRound, InferJob]]:
    """Yield the inference rounds that succeeded, with their results and work."""
    for entry in evidence.succeeded:
        if entry.result.inference is not None and entry.job is not None and isinstance(entry.job.work, InferJob):
            yield entry, entry.result.inference, entry.job.work


def engines(evidence: Evidence) -> Iterator[tuple[RoundEvidence, InferenceRound, InferJob]]:
    """Yield those rounds that used an inference engine."""
    yield from (parts for parts in inferences(evidence) if parts[2].settings.compiler is not None)


def details(inference: InferenceRound, step: InferStep) -> dict[str, Scalar]:
    """Return the details that a step reported."""
    return next((stage.details for stage in inference.stages if stage.step is step), {})


def engine_details(inference: InferenceRound) -> dict[str, Scalar]:
    """Return the details of the engine, whether it was compiled or loaded."""
    return details(inference, InferStep.COMPILE) | details(inference, InferStep.INFER)


def case_contract(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the values that an inference case fixes are unchanged."""
    case = entry.standard.spec.infer if entry.standard is not None else None
    if case is None:
        return
    for name in ("unit", "metric", "tolerance", "reference", "benchmarks", "iterative"):
        expected, actual = getattr(case, name), getattr(infer, name)
        if expected != actual:
            yield finding("error", "target", f"{name} of case.yaml", f"{name} was changed from {expected} to {actual}")
    changed = [
        f"{name} is {infer.parameters.get(name)} instead of {value}"
        for name, value in case.parameters.items()
        if infer.parameters.get(name) != value
    ]
    changed += [f"{name} is not in case.yaml" for name in sorted(set(infer.parameters) - set(case.parameters))]
    if changed:
        yield deviation(entry, "settings-changed", "the parameters of case.yaml", "; ".join(changed))


def model_structure(evidence: Evidence) -> Findings:
    """Check that all rounds built the same model with the same weights."""
    first: dict[str, tuple[Scalar, int]] = {}
    for entry, inference, _ in inferences(evidence):
        created = details(inference, InferStep.CREATE)
        for name, what in _HASHES.items():
            value = created.get(name)
            if value is None:
                continue
            expected, number = first.setdefault(name, (value, entry.number))
            if expected != value:
                actual = f"the model's {what} have hash {str(value)[:12]}, in round {number} {str(expected)[:12]}"
                yield finding("error", "model-mismatch", "one model in all rounds", actual, entry.number)


def engine_source(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the engine was compiled from the model that this run exported; report engines of other authors."""
    engine = engine_details(inference)
    exported = details(inference, InferStep.EXPORT).get("onnx_sha256")
    compiled, engine_file = engine.get("onnx_sha256"), engine.get("engine_given_sha256")
    if engine_file is not None:
        actual = f"a compiled engine was supplied, hash {str(engine_file)[:12]}: its source cannot be checked"
        yield finding("warning", "engine-source", "an engine that this run compiled", actual)
    elif exported is not None and compiled is not None and exported != compiled:
        actual = f"the engine was compiled from a file with hash {str(compiled)[:12]}"
        yield deviation(entry, "engine-source", f"the exported ONNX file, hash {str(exported)[:12]}", actual)
    elif exported is None and compiled is not None:
        actual = f"an ONNX file was supplied, hash {str(compiled)[:12]}"
        yield finding("warning", "engine-source", "an ONNX file that this run exported", actual)
    if "engine_code" in engine:
        lines, sha256 = engine.get("engine_code_lines"), str(engine.get("engine_code_sha256"))
        code = f"{engine['engine_code']}, {lines} lines, hash {sha256[:12]}"
        actual = f"the engine {infer.settings.compiler} is not shipped with AccelMark: {code}"
        yield finding("info", "engine-code", "", actual)


def accuracy_gate(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the engine's accuracy was measured, and that there is a value to compare it with."""
    figures = entry.result.figures
    metric, validation = figures[FigureName.INFERENCE_METRIC], figures[FigureName.VALIDATION_METRIC]
    if "synthetic" in entry.result.marks:
        return
    if metric.value is None:
        yield finding("error", "accuracy-missed", "", f"{infer.metric} of the engine was not measured: {metric.reason}")
    elif validation.value is None and infer.reference is None:
        why = f"in the framework it was not measured ({validation.reason}), and the case states no reference"
        actual = f"nothing to compare the engine's {infer.metric} with: {why}"
        yield finding("open" if infer.settings.no_validation else "error", "accuracy-missed", "", actual)
    elif infer.reference is None and not infer.benchmarks and infer.settings.generate_batches:
        actual = f"the engine computes as the framework does, but no published {infer.metric} of the weights is known"
        yield finding("open", "accuracy-missed", "weights whose accuracy was reproduced", actual)


def answers(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the engine's answers were compared with the framework's, here for the scenarios of LoadGen."""
    if inference.answers is None or not inference.answers.num_items:
        actual = "the engine's answers were not compared with the framework's: the run had no model (no_validation)"
        yield finding("open", "answers", "every answer compared", actual)
    elif inference.answers.sensitivity is None:
        actual = "no input could be changed before the engine got it, so answers may be looked up"
        yield finding("warning", "answers", "inputs that the case's method perturbed() changes", actual)
    for result in inference.scenarios:
        for kind, compared in (("accuracy", result.accuracy_answers), ("performance", result.performance_answers)):
            where = f" in scenario {result.scenario} ({kind} mode)"
            for reason in answer_reasons(compared, infer.settings.precision, where) if compared is not None else ():
                yield finding("error", "answers", "", reason)


def precision(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the compiled graph computes in the declared precision; the answers bound it from below."""
    declared = infer.settings.precision
    expected = "int8" if declared == "int8" else TYPE_OF_PRECISION[declared]
    engine = engine_details(inference)
    counted = dict(entry_.rsplit(":", 1) for entry_ in str(engine.get("graph_types") or "").split())
    counts = {_SPELT.get(name, name): int(number) for name, number in counted.items()}
    narrower = sorted(name for name in counts if _WIDTHS.get(name, 0) < _WIDTHS[expected])
    if not counts:
        actual = f"the types in the graph of {infer.settings.compiler} cannot be read"
        yield finding("open", "precision", f"{declared} ({expected})", actual)
    elif narrower or (expected in _HALF and _HALF & counts.keys() - {expected}):
        actual = f"the engine computes in {', '.join(sorted(counts))}"
        yield deviation(entry, "precision", f"{declared} ({expected})", actual)
    elif counts.get(expected, 0) < sum(counts.values()) / 2:
        types = ", ".join(f"{name} ({number})" for name, number in sorted(counts.items()))
        actual = f"most matrix products have a wider type: {types}"
        yield finding("warning", "precision", f"{declared} ({expected})", actual)
    limit, error = MAX_UNREAD_ERROR.get(declared), inference.answers.median_error if inference.answers else None
    if counts and "engine_code" in engine and limit is not None and (error is None or error > limit):
        actual = f"only the engine {infer.settings.compiler} states its types, and its answers do not confirm them"
        yield finding("open", "precision", f"{declared} ({expected}), a median error of at most {limit:g}", actual)


def flops(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the FLOPs of an item are the case's, and that no scenario is faster than the chip's peak."""
    case, stated = entry.standard, infer.settings.flops
    if case is not None and case.spec.infer is not None:
        settings = InferSettings.model_validate({"batch_size": 1} | case.spec.infer.configurations)
        if settings.flops != stated:
            yield finding("open", "flops", f"{settings.flops} as in case.yaml", f"flops was changed to {stated}")
    peak = getattr(entry.result.chip.peaks, infer.settings.precision, None) if entry.result.chip is not None else None
    for result in inference.scenarios:
        if result.figure_name in _RATES and result.figure is not None and stated and peak:
            share = result.figure * stated / (peak * 1e12)
            if share > 1:
                actual = f"scenario {result.scenario} reaches {share:.2f} of the chip's peak"
                yield finding("error", "implausible-utilisation", "at most 1", actual)


def enough_measured(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that the measured pass took long enough."""
    rate, least_s = entry.result.value_of(FigureName.INFERENCE_WHOLE), MIN_INFER_S[entry.size]
    if rate and entry.result.num_samples / rate < least_s:
        expected = f"at least {least_s:g} s for a {entry.size} case: increase inference_duration_s"
        yield finding("warning", "too-short", expected, f"inference took {entry.result.num_samples / rate:.1f} s")
    total_s = entry.result.value_of(FigureName.E2E_TIME)
    if total_s and entry.size == "standard" and not PUBLISHED_S[0] < total_s < PUBLISHED_S[1]:
        expected = "more than 10 minutes and less than 24 hours, FlagPerf's rule: set repeat or inference_duration_s"
        yield finding("info", "published-duration", expected, f"the run took {total_s:,.0f} s")


def time_outside_engine(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Report windows that are longer by the rank's clock than the calls by the clock of the engine's process."""
    share = inference.crossing_share
    if share is not None and share > MAX_SHARE_OUTSIDE:
        actual = f"{percent(share)} of the windows' time is outside of the calls: a busy machine, or the engine's clock"
        yield finding("warning", "time-outside-engine", f"at most {limit_percent(MAX_SHARE_OUTSIDE)}", actual)


def cache_check(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that outputs were checked for caching."""
    if not infer.settings.repeat_check:
        yield finding("open", "answer-cache", "", "repeat_check is off: cached outputs would not be detected")
    elif inference.repeat_check is not None and inference.repeat_check.reason:
        actual = f"outputs were not checked for caching: {inference.repeat_check.reason}"
        yield finding("warning", "answer-cache", "", actual)
    for result in inference.scenarios:
        if result.repeat_check is not None and result.repeat_check.suspicious:
            speedup = f"{result.repeat_check.speedup:.2f} times as fast as new ones"
            actual = f"items of scenario {result.scenario} are {speedup}"
            yield finding("error", "answer-cache", f"at most {result.repeat_check.limit:g}", actual)


def declared_time(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Report engines that exclude more than a little of their calls' time from every figure."""
    share = entry.result.value_of(FigureName.DECLARED_SHARE)
    if share is not None and share > MAX_DECLARED_SHARE:
        what = f"{percent(share)} of its calls' time as not inference: review what it excludes"
        actual = f"{infer.settings.compiler} declares {what}"
        yield finding("open", "declared-time", f"at most {limit_percent(MAX_DECLARED_SHARE)} after warm-up", actual)


def loadgen(entry: RoundEvidence, inference: InferenceRound, infer: InferJob) -> Findings:
    """Check that LoadGen reports each scenario with a figure as valid."""
    yield from loadgen_findings([(one, one.figure) for one in inference.scenarios], infer.settings.scenarios)


def loadgen_findings(
    results: Sequence[tuple[ScenarioResult | TokenScenarioResult, float | None]], requested: Sequence[str]
) -> Findings:
    """Yield what LoadGen reports about scenarios, each with its figure, and the requested ones without a result."""
    for result, figure in results:
        scenario = f"scenario {result.scenario}"
        if figure is None:
            actual = f"{scenario} has no figure: {result.reason or 'LoadGen reported none'}"
            yield finding("warning", "loadgen-invalid", "", actual)
        elif not result.valid:
            actual = f"{scenario}: LoadGen reports the run as invalid ({result.reason or 'see its log'})"
            yield finding("error", "loadgen-invalid", "", actual)
        elif result.functional:
            actual = f"{scenario} was shorter than MLPerf requires: a functional test, not a submission"
            yield finding("warning", "loadgen-too-short", "600 s per scenario", actual)
    if missing := set(requested) - {result.scenario for result, _ in results}:
        yield finding("error", "loadgen-invalid", "", f"no result for scenario {', '.join(sorted(missing))}")
