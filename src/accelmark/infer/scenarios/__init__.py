"""Run the four MLPerf inference scenarios with a compiled engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import torch

from accelmark.infer.case import InferBatches
from accelmark.infer.failures import Context
from accelmark.infer.measure import Forward
from accelmark.infer.scenarios.loadgen import LoadGenLog, LoadGenSettings, run_loadgen
from accelmark.infer.scenarios.request_queue import RequestQueue, SampleLibrary
from accelmark.spec.events import ScenarioResult
from accelmark.spec.inference import InferSettings, ScenarioName

MLPERF_MIN_DURATION_S: Final = 600.0
"""Minimum duration of a run by MLPerf's rules."""
_PROBES: Final = 5
_MAX_TRIES: Final = 10
_RATE_TOLERANCE: Final = 0.05
"""Relative gap between the highest rate that met the bound and the lowest that did not, at which the search ends."""
_HEADROOM: Final = 1.2


@final
@dataclass
class Scenarios:
    """Runs the scenarios of the settings."""

    forward: Forward
    batches: InferBatches
    settings: InferSettings
    fixed_batch: bool
    node_dir: Path
    context: Context

    def __post_init__(self) -> None:
        """Load the items."""
        self.items = SampleLibrary(self.batches)
        self.minimum = LoadGenSettings(self.settings.scenario_duration_s, self.settings.scenario_queries)

    def run(self) -> Iterator[ScenarioResult]:
        """Run them in the order of the settings; yield each result immediately."""
        kinds: dict[ScenarioName, Callable[[], ScenarioResult]] = {
            "offline": self._offline,
            "single_stream": lambda: self._stream("single_stream", 1),
            "multi_stream": lambda: self._stream("multi_stream", self.settings.multi_stream_samples),
            "server": self._server,
        }
        for name in self.settings.scenarios:
            yield kinds[name]()

    def _offline(self) -> ScenarioResult:
        rate = self.settings.batch_size / self._call_s(self.settings.batch_size)
        for _ in range(2):  # again where the estimate was too low for the minimum duration
            # LoadGen advises to expect more than the measured rate.
            log = self._run("offline", replace(self.minimum, queries_per_s=rate * _HEADROOM), self.log_dir("offline"))
            if log.long_enough:
                break
            rate = log.number("result_samples_per_second") or rate * _HEADROOM
        return self._result("offline", log, "samples_per_second", log.number("result_samples_per_second"))

    def _stream(self, name: ScenarioName, samples: int) -> ScenarioResult:
        expected = replace(self.minimum, latency_s=self._call_s(samples) / 2, samples_per_query=samples)
        percentile = "p90"
        if name == "multi_stream":
            least = max(self.settings.scenario_queries, self.settings.multi_stream_queries)
            expected, percentile = replace(expected, min_queries=least), "p99"
        log = self._run(name, expected, self.log_dir(name))
        figure = log.latencies_ms(per_query=samples > 1).get(percentile)
        return self._result(name, log, f"latency_{percentile}_ms", figure)

    def _server(self) -> ScenarioResult:
        bound_ms, size = self.settings.server_latency_bound_ms, self.settings.batch_size
        logs: dict[float, LoadGenLog] = {}

        def meets_bound(rate: float) -> bool:
            expected = replace(self.minimum, queries_per_s=rate, latency_bound_ms=bound_ms)
            log_dir = self.log_dir("server") / f"try{len(logs) + 1:02}_qps_{rate:.3f}"
            logs[rate] = self._run("server", expected, log_dir)
            return logs[rate].bound_met

        best = highest(meets_bound, size / self._call_s(size))
        result = self._result("server", logs[min(logs) if best is None else best], "queries_per_second", best)
        reason = "no tried rate met the latency bound" if best is None else result.reason
        tried = tuple((rate, log.bound_met) for rate, log in logs.items())
        return result.model_copy(update={"latency_bound_ms": bound_ms, "tried": tried, "reason": reason})

    def log_dir(self, name: ScenarioName) -> Path:
        """Return the directory of LoadGen's logs of a scenario."""
        return self.node_dir / "loadgen" / name

    def _run(self, name: ScenarioName, expected: LoadGenSettings, log_dir: Path) -> LoadGenLog:
        batched = name in ("offline", "server")
        queue = RequestQueue(
            self.forward,
            self.items,
            batch_size=self.settings.batch_size if batched else expected.samples_per_query,
            padded=self.fixed_batch or not batched,
            context=replace(self.context, activity=f"scenario {name}"),
        )
        return run_loadgen(name, expected, queue, len(self.items), log_dir)

    def _call_s(self, size: int) -> float:
        """Return the median duration of a call of ``size`` items in s, after a warm-up call."""
        times: list[float] = []
        with torch.inference_mode():  # as in the queue's thread
            batch = self.items.batch([index % len(self.items) for index in range(size)])
            self.forward(batch)
            for _ in range(_PROBES):
                began = time.perf_counter()
                self.forward(batch)
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _result(self, name: ScenarioName, log: LoadGenLog, figure_name: str, figure: float | None) -> ScenarioResult:
        return ScenarioResult.model_validate(
            {
                "scenario": name,
                "valid": log.valid,
                "functional": self.settings.scenario_duration_s < MLPERF_MIN_DURATION_S,
                "figure": figure,
                "figure_name": figure_name,
                "latencies_ms": log.latencies_ms(per_query=name == "multi_stream"),
                "log_dir": str(self.log_dir(name).relative_to(self.node_dir)),
                "reason": log.reason,
            }
        )


def highest(meets_bound: Callable[[float], bool], ceiling: float) -> float | None:
    """Search the highest rate for which ``meets_bound`` is true, starting at half of ``ceiling``.

    The rate is doubled or halved until one meets the bound and a higher one does not; then the gap is halved until it
    is within 5 % or ten rates were tried. None where no rate met the bound.
    """
    good: float | None = None
    bad: float | None = None
    rate = ceiling / 2
    for _ in range(_MAX_TRIES):
        if meets_bound(rate):
            good = rate
        else:
            bad = rate
        if good is None:
            rate = rate / 2
        elif bad is None:
            rate = rate * 2
        elif bad / good - 1 <= _RATE_TOLERANCE:
            break
        else:
            rate = (good + bad) / 2
    return good
