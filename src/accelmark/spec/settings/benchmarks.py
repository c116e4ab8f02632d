"""Settings of the tasks of lm-evaluation-harness, by which the accuracy of a language model is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from accelmark.spec.model import FiniteSpec

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
    """Questions of each task or subject; null: all, without which the result is OPEN."""
    benchmark_timeout_s: PositiveFloat = 14_400.0
    """Longest duration of a task."""
