"""The inference side of a case: its settings, and which of the seven steps run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from accelmark.spec.backports import StrEnum
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.model import FiniteSpec
from accelmark.spec.settings.training import Scalar

InferPrecision = Literal["fp32", "tf32", "bf16", "fp16", "int8"]
ScenarioName = Literal["offline", "single_stream", "multi_stream", "server"]
EngineOption = Union[Scalar, tuple[Scalar, ...]]
OptimizeFor = Literal["latency", "throughput"]


class AnswerLimits(NamedTuple):
    """Limits of an engine's answers against the framework's in fp32 (``AnswerCheck``)."""

    median_error: float
    """Distinguishes precisions: the next narrower one has a larger error."""
    worst_error: float
    """Of any item; an answer of zeros has an error of 1."""
    top1_agreement: float
    sensitivity: float


ANSWER_LIMITS: Final[Mapping[InferPrecision, AnswerLimits]] = {
    "fp32": AnswerLimits(1e-4, 0.01, 0.999, 0.9),
    "tf32": AnswerLimits(2e-3, 0.1, 0.99, 0.8),
    "fp16": AnswerLimits(2e-3, 0.1, 0.99, 0.8),
    "bf16": AnswerLimits(0.03, 0.3, 0.97, 0.5),
    "int8": AnswerLimits(0.3, 0.9, 0.85, 0.2),
}
"""Measured over honest engines with a margin; benchmarks/inference.md has the figures."""

RUN_TIME_KEYS: Final = frozenset({"perf_dir", "data_dir", "log_dir", "vendor", "case", "framework"})
"""Names that AccelMark sets itself."""

ENGINE_ALIASES: Final = {"torchtrt": "torch_tensorrt"}
"""FlagPerf's name of an engine -> AccelMark's."""
_OPERATORS: Final = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_CHARACTERS: Final = 200


def calculate(text: str) -> float:
    """Return the value of arithmetic on numbers, parsed and never evaluated as code; raises ValueError for all else."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"is longer than {_MAX_CHARACTERS} characters")
    with raising(ValueError, "is not arithmetic on numbers", SyntaxError, ArithmeticError):
        value = _value(ast.parse(text.strip(), mode="eval").body)
    if not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"is not arithmetic on numbers: {ast.unparse(node)[:20]!r} (only numbers and + - * / ( ))")


Benchmark = Literal["mmlu", "gsm8k"]
"""Tasks of lm-evaluation-harness, by their names there."""


class BenchmarkData(NamedTuple):
    """The published data set of a task."""

    repository: str
    """On Hugging Face."""
    num_questions: int
    """Questions that are asked: the data set's split ``test``."""


BENCHMARK_DATA: Final[Mapping[Benchmark, BenchmarkData]] = {
    "mmlu": BenchmarkData("cais/mmlu", 14_042),
    "gsm8k": BenchmarkData("openai/gsm8k", 1_319),
}


class BenchmarkSettings(FiniteSpec):
    """Which tasks measure the accuracy of an engine or a server, in part of its settings."""

    benchmarks: tuple[Benchmark, ...] = ()
    """Tasks of lm-evaluation-harness that the engine or server answers; needs ``--data`` with their data."""
    benchmark_limit: PositiveInt | None = None
    """Questions of each task or subject; null: all; with a limit the result is OPEN."""
    benchmark_timeout_s: PositiveFloat = 14_400.0
    """Longest duration of a task."""


class InferStep(StrEnum):
    """The seven steps, in their order."""

    INITIALISE = "initialise"
    CREATE = "create"
    VALIDATE = "validate"
    EXPORT = "export"
    COMPILE = "compile"
    INFER = "infer"
    SUMMARISE = "summarise"

    @property
    def number(self) -> int:
        """1 to 7."""
        return tuple(InferStep).index(self) + 1


class InferSettings(BenchmarkSettings):
    """The configurations of an inference case, which a vendor may override; parameters are separate."""

    batch_size: PositiveInt
    """Items per call of the engine."""
    flops: Annotated[
        PositiveFloat | None,
        BeforeValidator(
            lambda given: calculate(given) if isinstance(given, str) else given,
            json_schema_input_type=PositiveFloat | str | None,
        ),
    ] = None
    """FLOPs of one item's forward pass: a number, or arithmetic on numbers such as ``2*512*0.33e9``."""
    precision: InferPrecision = "fp32"
    """Precision of the engine. FlagPerf's ``fp16: true`` is read as ``fp16``, ``fp16: false`` as ``fp32``."""
    compiler: Annotated[str | None, BeforeValidator(lambda given: ENGINE_ALIASES.get(given, given))] = None
    """Name of the engine (``torchtrt`` is ``torch_tensorrt``); null ends the run after the framework's validation."""
    num_workers: int = Field(default=0, ge=0)
    """Worker processes that read data; 0: the main process reads it."""
    log_freq: PositiveInt = 30
    """Batches per window; latencies are written at the end of a window."""
    repeat: PositiveInt = 1
    """Passes over the data; the engine makes more where these are shorter than ``inference_duration_s``."""
    inference_duration_s: float = Field(default=40.0, ge=0)
    """Least time of computation in all passes: whole passes are added until then. 0: only ``repeat`` passes."""
    no_validation: bool = False
    """Skip the model, its validation and the export; needs ``exist_onnx_path`` (any word with an engine file)."""
    exist_onnx_path: str | None = None
    """An ONNX file to compile instead of exporting one; any value but null skips the export."""
    exist_compiler_path: str | None = None
    """An engine file to load instead of compiling."""
    warmup_batches: int = Field(default=5, ge=0)
    """Warm-up calls after the first call, which is timed separately."""
    threads: PositiveInt | None = None
    """CPU threads; null: the number of cores that this process may use."""
    optimize_for: OptimizeFor | None = None
    """Compute several calls at a time, or one; null: ``latency`` if streams are measured, else ``throughput``."""
    engine_timeout_s: PositiveFloat = 1500.0
    """Longest wait for the engine: for its compilation, and for a window of calls."""
    max_batches: PositiveInt | None = None
    """Use the first batches of the data only (marks the run)."""
    synthetic: bool = False
    """Use synthetic data or initial weights: speed only, no accuracy (marks the run)."""
    repeat_check: bool = True
    """Compare the speed of repeated items with new ones, to detect a cache."""
    scenarios: tuple[ScenarioName, ...] = ()
    """LoadGen scenarios to run after the accuracy pass."""
    scenario_duration_s: PositiveFloat = 10.0
    """Minimum duration of one LoadGen run; below MLPerf's minimum (600 s) a run is labelled functional."""
    scenario_queries: PositiveInt = 100
    """Minimum number of queries of one LoadGen run; early stopping needs 64 for SingleStream's p90."""
    multi_stream_queries: PositiveInt = 662
    """The same for MultiStream, if larger: LoadGen's early stopping needs this many for p99."""
    server_queries: PositiveInt = 662
    """The same for Server, if larger: fewer are not enough for its p99 where one query exceeds the bound."""
    server_latency_bound_ms: PositiveFloat | None = None
    """Latency bound for 99 % of the queries of the Server scenario."""
    multi_stream_samples: PositiveInt = 8
    """Items per query of the MultiStream scenario."""
    generate_batches: tuple[PositiveInt, ...] = ()
    """Batch sizes of a language model's generation after the accuracy pass; empty: it generates nothing."""
    generate_input_tokens: tuple[PositiveInt, ...] = (64,)
    """Lengths of prompts; every batch size is measured with every length of prompt and answer."""
    generate_output_tokens: tuple[PositiveInt, ...] = (32,)
    """Lengths of answers, at whose end sequences are ignored."""
    generate_duration_s: PositiveFloat = 10.0
    """Approximate duration of one stage; it has at least three batches."""
    generate_compared: int = Field(default=16, ge=0)
    """Generated answers that are compared with the framework's greedy answers."""
    generate_scenarios: tuple[Literal["server", "offline"], ...] = ()
    """LoadGen scenarios with token latencies: the largest batch, prompts and answers of the first lengths."""
    generate_ttft_ms: PositiveFloat | None = None
    """Limit of the time to first token of the Server scenario; MLPerf's for Llama 3.1 8B is 2000."""
    generate_tpot_ms: PositiveFloat | None = None
    """Limit of the time per further token; MLPerf's for Llama 3.1 8B is 100."""
    engine_options: dict[str, EngineOption] = Field(default_factory=dict)
    """Options of one engine, among them the keys that a vendor adds to the configurations."""

    @property
    def title(self) -> str:
        """Engine, precision, batch size and options, as they distinguish inference runs of a case."""
        words = [f"{self.compiler or 'no engine'} {self.precision} batch {self.batch_size}"]
        for name, value in sorted(self.engine_options.items()):
            words.append(f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(words)

    @property
    def optimized_for(self) -> OptimizeFor:
        """``optimize_for``, or what follows from the scenarios where it is null."""
        streams = {"single_stream", "multi_stream"}.intersection(self.scenarios)
        return self.optimize_for or ("latency" if streams else "throughput")

    @model_validator(mode="after")
    def _possible(self) -> InferSettings:
        if self.no_validation and self.exist_onnx_path is None:
            raise ValueError(
                "no_validation needs exist_onnx_path: without a model there is nothing to export; "
                "name an ONNX file (or any word, where exist_compiler_path names the compiled engine)"
            )
        if "server" in self.scenarios and self.server_latency_bound_ms is None:
            raise ValueError(
                "scenarios: server needs server_latency_bound_ms; generated tokens are measured by generate_scenarios"
            )
        if self.compiler is None and self.no_validation:
            raise ValueError("compiler is null and no_validation is true, which leaves nothing to measure")
        if self.generate_batches and (self.compiler is None or self.no_validation):
            raise ValueError("generate_batches needs an engine (compiler) and its model (no_validation: false)")
        if self.generate_scenarios and not self.generate_batches:
            raise ValueError("generate_scenarios needs generate_batches")
        if self.benchmarks and not self.generate_batches:
            raise ValueError("benchmarks needs generate_batches")
        if "server" in self.generate_scenarios and not (self.generate_ttft_ms and self.generate_tpot_ms):
            raise ValueError("generate_scenarios: server needs generate_ttft_ms and generate_tpot_ms")
        if self.compiler is None and self.scenarios:
            raise ValueError("scenarios run in an engine, and compiler is null: name one, or take the scenarios out")
        return self


class Reference(FiniteSpec):
    """A published accuracy that the validation must reproduce within a tolerance."""

    value: float
    """Published value of the metric."""
    within: float = Field(ge=0)
    """Largest accepted difference."""
    source: str
    """Where the value was published."""


class CaseClass(FiniteSpec):
    """A class of a family of tasks with other attributes: a case that needs no code of its own."""

    base: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)*\.[A-Z]\w+$")
    """The class, below ``accelmark.tasks``: ``language.pytorch_decoder.Pretraining``; of inference below
    ``accelmark.infer``."""
    attributes: dict[str, Any] = Field(default_factory=dict)
    """Attribute of the class -> its value in this case."""


class InferCaseSpec(FiniteSpec):
    """The inference side of a case."""

    unit: Literal["image", "token", "sequence", "sample"]
    """What an item is."""
    metric: str
    """Name of the accuracy that the case's ``metrics`` returns."""
    metric_title: str = ""
    """Its meaning with its unit, such as ``perplexity per token``; empty: its name."""
    tolerance: float = Field(ge=0)
    """Largest valid difference between the metric in the engine and in the framework."""
    tolerance_why: str
    """Reason for the tolerance."""
    reference: Reference | None = None
    min_agreement: float = Field(default=0.0, ge=0, le=1)
    """Least share of a generated answer's tokens, from its start, that agree with the framework's (mean)."""
    agreement_why: str = ""
    """Reason for ``min_agreement``."""
    data: tuple[str, ...] = ()
    """Data sets of the case that inference needs; none with synthetic data."""
    optional_data: tuple[str, ...] = ()
    """Data sets that are used if the given data directory contains them."""
    weights: str | None = None
    """Trained weights below the data directory: a file (without it: speed only) or a Hugging Face directory."""
    configurations: dict[str, Any]
    """Defaults of :class:`InferSettings`."""
    classes: dict[str, CaseClass] = Field(default_factory=dict)
    """Framework -> the class that infers, in place of a file ``infer_<framework>.py``."""
    generates: bool = False
    """Whether the case is a language model, whose weights are a directory in Hugging Face's layout."""
    iterative: bool = False
    """Whether an answer takes dependent steps (tokens, denoising), which one static graph does not compute."""
    benchmarks: dict[Benchmark, Reference] = Field(default_factory=dict)
    """Task of lm-evaluation-harness -> published accuracy of these weights; one of them must be reproduced."""
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    """Parameters of the case (sequence length, image size): the same on every chip, never overridden."""


class Note(FiniteSpec):
    """A note for the user about how a setting was resolved."""

    severity: Literal["info", "warning"]
    where: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.what}"


def why_skipped(step: InferStep, settings: InferSettings) -> str | None:
    """Return the reason if the settings skip a step, else None."""
    if step is InferStep.VALIDATE and settings.no_validation:
        return "no_validation is true"
    if step in (InferStep.EXPORT, InferStep.COMPILE, InferStep.INFER) and settings.compiler is None:
        return "compiler is null"
    if step is InferStep.EXPORT and settings.exist_onnx_path is not None:
        return f"exist_onnx_path is {settings.exist_onnx_path}"
    if step is InferStep.COMPILE and settings.exist_compiler_path is not None:
        return f"exist_compiler_path is {settings.exist_compiler_path}"
    return None


def file_at(path: str | None) -> Path | None:
    """Return ``path`` if it is an existing file; FlagPerf also allows strings that are no paths."""
    file = None if path is None else Path(path).expanduser()
    return file if file is not None and file.is_file() else None


def number_option(options: Mapping[str, EngineOption], name: str, default: int, *, least: int = 0) -> int:
    """Return an integer option of an engine; raises RequestError: it is not an integer of at least ``least``."""
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"engine_options.{name} must be an integer of at least {least}, found {value!r}")
    return value


def text_options(options: Mapping[str, EngineOption], name: str) -> tuple[str, ...]:
    """Return an option that is one string or a list as a tuple of strings; empty if it is not set."""
    value = options.get(name)
    if value is None:
        return ()
    return tuple(str(item) for item in value) if isinstance(value, tuple) else (str(value),)


def switch_option(options: Mapping[str, EngineOption], name: str, *, default: bool = False) -> bool:
    """Return an option that is on or off; raises RequestError: it is neither true nor false."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"engine_options.{name} must be true or false, found {value!r}")
    return value
