"""Run MLCommons LoadGen in this process, and read its log."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from accelmark.serving.request import LoadGenRun, LoadGenSettings
from accelmark.spec.errors import RunError, raising
from accelmark.spec.plugins.requirements import pip_install

MIN_TOKENS: Final = 2
"""Fewest tokens of an answer that LoadGen takes."""
MLPERF_MIN_DURATION_S: Final = 600.0
"""Minimum duration of a run by MLPerf's rules."""
_PREFIX: Final = ":::MLLOG "
_PERCENTILES: Final = {"p50": "50.00", "p90": "90.00", "p99": "99.00", "p99.9": "99.90"}
_REASONS: Final = (
    "result_invalid_reason", "early_stopping_result", "early_stopping_ttft_result", "early_stopping_tpot_result",
)  # fmt: skip
_NS_IN_MS: Final = 1e6


class Query(Protocol):
    """One sample that LoadGen requests: the item ``index``, by the response ``id``."""

    id: int
    index: int


class LoadGenLog(NamedTuple):
    """The results in LoadGen's log."""

    values: Mapping[str, Any]
    valid: bool
    """Whether LoadGen reports the run as VALID."""
    bound_met: bool
    """Whether the latency bound of the Server scenario was met."""
    long_enough: bool
    """Whether the run lasted the requested minimum duration."""

    @property
    def reason(self) -> str | None:
        """LoadGen's reason for an invalid run; None for a valid one."""
        if self.valid:
            return None
        texts = (self.values.get(key) for key in _REASONS)
        reasons = (" ".join(str(text or "").replace("*", " ").split()) for text in texts)
        return "; ".join(reason for reason in reasons if reason) or "LoadGen reports no reason"

    def number(self, key: str) -> float | None:
        """Return a number, or None where the log has none."""
        value = self.values.get(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def percentiles_ms(self, key: str) -> dict[str, float]:
        """Return the percentiles that the log has under ``key``, with ``{}`` in place of each."""
        latencies = {name: self.number(key.format(share)) for name, share in _PERCENTILES.items()}
        return {name: value / _NS_IN_MS for name, value in latencies.items() if value is not None}


def run_token_loadgen(run: LoadGenRun, issue: Callable[[Sequence[int]], None]) -> None:
    """Run one scenario with token latencies; ``issue`` gets ids of queries, for :func:`first` and :func:`done`."""
    lg = library()
    count = max(1, run.settings.min_queries)
    start_test(lg, run.scenario, run.settings, lambda queries: issue([each.id for each in queries]), count, run.log_dir)


def first(query: int) -> None:
    """Report that the first output of a query arrived."""
    lg = library()
    lg.FirstTokenComplete([lg.QuerySampleResponse(query, 0, 0)])


def done(query: int, num_tokens: int | None) -> None:
    """Report that a query ended; LoadGen is told at least the fewest tokens that it takes."""
    lg = library()
    lg.QuerySamplesComplete([lg.QuerySampleResponse(query, 0, 0, max(num_tokens or 0, MIN_TOKENS))])


def start_test(
    lg: Any,
    scenario: str,
    expected: LoadGenSettings,
    issue: Callable[[Sequence[Any]], None],
    num_items: int,
    log_dir: Path,
    *,
    accuracy: bool = False,
) -> None:
    """Run LoadGen to the end of its last query."""
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
    settings.use_token_latencies = expected.token_latencies
    if expected.ttft_ms is not None and expected.tpot_ms is not None:
        settings.ttft_latency = int(expected.ttft_ms * _NS_IN_MS)
        settings.tpot_latency = int(expected.tpot_ms * _NS_IN_MS)
        settings.server_target_latency_percentile = expected.share
    output = lg.LogOutputSettings()
    output.outdir = str(log_dir)
    output.copy_summary_to_stdout = False
    logs = lg.LogSettings()
    logs.log_output = output
    logs.enable_trace = False
    system = lg.ConstructSUT(issue, lambda: None)  # no query is delayed
    library = lg.ConstructQSL(num_items, num_items, lambda _: None, lambda _: None)  # all items are in memory
    try:
        lg.StartTestWithLogSettings(system, library, settings, logs)
    finally:
        lg.DestroyQSL(library)
        lg.DestroySUT(system)


def library() -> Any:
    """Return LoadGen's module. Raises RunError: it is not installed."""
    with raising(RunError, f"scenarios need LoadGen: run {pip_install(['mlcommons-loadgen'])}", ImportError):
        import mlperf_loadgen
    return mlperf_loadgen


def read_log(log_dir: Path) -> LoadGenLog:
    """Read LoadGen's detailed log. Raises RunError: it is missing or in another format."""
    path = log_dir / "mlperf_log_detail.txt"
    values: dict[str, Any] = {}
    with raising(RunError, f"{path}: not a log of LoadGen", OSError, ValueError, KeyError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(_PREFIX):
                entry = json.loads(line.removeprefix(_PREFIX))
                values[entry["key"]] = entry["value"]
    if "result_validity" not in values:
        raise RunError(f"{path}: no result from LoadGen; see the other files in {path.parent}")
    met = (bool(values.get(f"result_{name}_met", False)) for name in ("perf_constraints", "min_duration"))
    return LoadGenLog(values, values["result_validity"] == "VALID", *met)
