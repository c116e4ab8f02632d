"""Run MLCommons LoadGen over a request queue, and read its log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.infer.failures import InferenceError
from accelmark.infer.scenarios.request_queue import Query, RequestQueue
from accelmark.spec.errors import RunError
from accelmark.spec.settings.inference import ScenarioName

_PREFIX: Final = ":::MLLOG "
_PERCENTILES: Final = {"p50": "50.00", "p90": "90.00", "p99": "99.00", "p99.9": "99.90"}
_NS_IN_MS: Final = 1e6


@final
@dataclass(frozen=True, slots=True)
class LoadGenSettings:
    """Settings of one LoadGen run."""

    min_duration_s: float
    min_queries: int
    queries_per_s: float = 1.0
    """Offline: expected samples per second; Server: target rate of queries."""
    latency_s: float = 1.0
    """SingleStream and MultiStream: expected latency."""
    samples_per_query: int = 1
    latency_bound_ms: float | None = None


@final
@dataclass(frozen=True, slots=True)
class LoadGenLog:
    """The results in LoadGen's log."""

    values: Mapping[str, Any]

    @property
    def valid(self) -> bool:
        """Whether LoadGen reports the run as VALID."""
        return self.values.get("result_validity") == "VALID"

    @property
    def bound_met(self) -> bool:
        """Whether the latency bound of the Server scenario was met."""
        return bool(self.values.get("result_perf_constraints_met", False))

    @property
    def long_enough(self) -> bool:
        """Whether the run lasted the requested minimum duration."""
        return bool(self.values.get("result_min_duration_met", False))

    @property
    def reason(self) -> str | None:
        """Return LoadGen's reason for an invalid run; None for a valid one."""
        if self.valid:
            return None
        found = (self.values.get(key) for key in ("result_invalid_reason", "early_stopping_result"))
        reasons = (" ".join(str(each or "").replace("*", " ").split()) for each in found)
        return "; ".join(each for each in reasons if each) or "LoadGen reports no reason"

    def number(self, key: str) -> float | None:
        """Return a number, or None where the log has none."""
        value = self.values.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def latencies_ms(self, *, per_query: bool) -> dict[str, float]:
        """Return LoadGen's latency percentiles of samples, or of queries."""
        infix = "percentile_per_query" if per_query else "percentile"
        found = {name: self.number(f"result_{share}_{infix}_latency_ns") for name, share in _PERCENTILES.items()}
        return {name: value / _NS_IN_MS for name, value in found.items() if value is not None}


def run_loadgen(
    scenario: ScenarioName,
    expected: LoadGenSettings,
    queue: RequestQueue,
    num_items: int,
    log_dir: Path,
    *,
    accuracy: bool = False,
) -> LoadGenLog:
    """Run one scenario in performance mode, or ask for each item once (``accuracy``); LoadGen logs to ``log_dir``.

    Raises:
        InferenceError: LoadGen is not installed.
        RunError: its log is not readable.
        AccelmarkError: the engine failed.
    """
    try:
        import mlperf_loadgen as lg
    except ImportError as error:
        what = f"scenarios need LoadGen, which cannot be imported ({error}): pip install mlcommons-loadgen"
        raise InferenceError(what, "engine_missing") from error
    log_dir.mkdir(parents=True, exist_ok=True)
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, scenario.title().replace("_", ""))
    settings.mode = lg.TestMode.AccuracyOnly if accuracy else lg.TestMode.PerformanceOnly
    settings.min_duration_ms = math.ceil(expected.min_duration_s * 1000)
    settings.min_query_count = expected.min_queries
    settings.offline_expected_qps = expected.queries_per_s
    settings.server_target_qps = expected.queries_per_s
    settings.single_stream_expected_latency_ns = max(1, int(expected.latency_s * 1e9))
    settings.multi_stream_expected_latency_ns = max(1, int(expected.latency_s * 1e9))
    settings.multi_stream_samples_per_query = expected.samples_per_query
    if expected.latency_bound_ms is not None:
        settings.server_target_latency_ns = int(expected.latency_bound_ms * _NS_IN_MS)
    output = lg.LogOutputSettings()
    output.outdir = str(log_dir)
    output.copy_summary_to_stdout = False
    logs = lg.LogSettings()
    logs.log_output = output
    logs.enable_trace = False

    def complete(queries: Sequence[Query]) -> None:
        lg.QuerySamplesComplete([lg.QuerySampleResponse(query.id, 0, 0) for query in queries])

    queue.complete = complete
    with queue:
        system = lg.ConstructSUT(queue.issue, _nothing)
        library = lg.ConstructQSL(num_items, num_items, _nothing, _nothing)
        try:
            lg.StartTestWithLogSettings(system, library, settings, logs)
        finally:
            lg.DestroyQSL(library)
            lg.DestroySUT(system)
    queue.raise_failure()
    # In accuracy mode LoadGen logs no result.
    return LoadGenLog({}) if accuracy else read_log(log_dir / "mlperf_log_detail.txt")


def _nothing(*_: object) -> None:
    """Do nothing: all items are in memory, and no query is delayed."""


def read_log(path: Path) -> LoadGenLog:
    """Read LoadGen's detailed log.

    Raises:
        RunError: it is missing or in another format.
    """
    values: dict[str, Any] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(_PREFIX):
                entry = json.loads(line.removeprefix(_PREFIX))
                values[entry["key"]] = entry["value"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path}: not a log of LoadGen: {error}") from error
    if "result_validity" not in values:
        raise RunError(f"{path}: no result from LoadGen; see the other files in {path.parent}")
    return LoadGenLog(values)
