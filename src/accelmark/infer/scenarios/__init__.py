"""Run the four MLPerf inference scenarios with an engine in its process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from torch import Tensor

from accelmark.infer.checks.checked_pass import CheckedPass
from accelmark.infer.failures import Context
from accelmark.infer.scenarios.library import AnswerSamples, Library
from accelmark.infer.scenarios.request_queue import Look, RequestQueue
from accelmark.serving.load.progress import LoadReporter
from accelmark.serving.load.search import EXPECTED_STEPS, FIRST_SHARE, search_rate
from accelmark.serving.loadgen.mlperf import MLPERF_MIN_DURATION_S, LoadGenLog, LoadGenSettings, run_loadgen
from accelmark.spec.log.inference import AnswerCheck, ScenarioResult
from accelmark.spec.log.serving import SCENARIO_PHASES
from accelmark.spec.settings.inference import ScenarioName

_PROBES: Final = 5
_MAX_TRIES: Final = 10
_HEADROOM: Final = 1.2
_SLACK: Final = 1.1
"""LoadGen's own factor on the samples of the Offline scenario."""


@final
@dataclass
class Scenarios:
    """Runs the scenarios of the settings with the engine of ``checked``."""

    checked: CheckedPass
    fixed_batch: bool
    node_dir: Path
    context: Context

    def __post_init__(self) -> None:
        """Load the items."""
        self.settings = self.checked.settings
        self.library = Library(self.checked, max(self.settings.batch_size, self.settings.multi_stream_samples))
        self.minimum = LoadGenSettings(self.settings.scenario_duration_s, self.settings.scenario_queries)
        self.samples = AnswerSamples(self.library)
        self.crossing_us = self.checked.process.crossing_s() * 1e6
        self.progress = LoadReporter(self.checked.emit)
        self.later_s = sum(self._planned_s(name) for name in self.settings.scenarios)
        """Planned duration of the scenarios that have not begun."""

    def run(self) -> Iterator[ScenarioResult]:
        """Run them in the order of the settings; yield each result immediately."""
        kinds: dict[ScenarioName, Callable[[], ScenarioResult]] = {
            "offline": self._offline,
            "single_stream": lambda: self._stream("single_stream", 1),
            "multi_stream": lambda: self._stream("multi_stream", self.settings.multi_stream_samples),
            "server": self._server,
        }
        for name in self.settings.scenarios:
            self.samples = AnswerSamples(self.library)
            self.later_s -= self._planned_s(name)
            yield kinds[name]()

    def _offline(self) -> ScenarioResult:
        rate = self._rate()
        for _ in range(2):  # again where the estimate was too low for the minimum duration
            # LoadGen advises to expect more than the measured rate.
            expected = replace(self.minimum, queries_per_s=rate * _HEADROOM)
            log = self._run("offline", expected, self.log_dir("offline"), self._run_s("offline"))
            if log.long_enough:
                break
            rate = log.number("result_samples_per_second") or rate * _HEADROOM
        figure = log.number("result_samples_per_second")
        return self._result("offline", log, "samples_per_second", figure, expected)

    def _stream(self, name: ScenarioName, samples: int) -> ScenarioResult:
        expected = replace(self.minimum, latency_s=self._call_s(samples) / 2, samples_per_query=samples)
        percentile = "p90"
        if name == "multi_stream":
            least = max(self.settings.scenario_queries, self.settings.multi_stream_queries)
            expected, percentile = replace(expected, min_queries=least), "p99"
        log = self._run(name, expected, self.log_dir(name), self._run_s(name))
        figure = log.latencies_ms(per_query=samples > 1).get(percentile)
        return self._result(name, log, f"latency_{percentile}_ms", figure, expected)

    def _server(self) -> ScenarioResult:
        bound_ms = self.settings.server_latency_bound_ms
        least = max(self.settings.scenario_queries, self.settings.server_queries)
        minimum = replace(self.minimum, min_queries=least, latency_bound_ms=bound_ms)
        logs: dict[float, LoadGenLog] = {}

        def meets_bound(rate: float, steps_left: int) -> bool:
            expected = replace(minimum, queries_per_s=rate)
            log_dir = self.log_dir("server") / f"try{len(logs) + 1:02}_qps_{rate:.3f}"
            run_s = max(self.minimum.min_duration_s, least / rate)
            logs[rate] = self._run("server", expected, log_dir, run_s, steps_left * run_s)
            return logs[rate].bound_met

        best = search_rate(meets_bound, FIRST_SHARE * self._rate(), max_steps=_MAX_TRIES).rate
        shown = min(logs) if best is None else best
        expected = replace(minimum, queries_per_s=shown)
        result = self._result("server", logs[shown], "queries_per_second", best, expected)
        reason = "no tried rate met the latency bound" if best is None else result.reason
        tried = tuple((rate, log.bound_met) for rate, log in logs.items())
        return result.model_copy(update={"latency_bound_ms": bound_ms, "tried": tried, "reason": reason})

    def log_dir(self, name: ScenarioName) -> Path:
        """Return the directory of LoadGen's logs of a scenario."""
        return self.node_dir / "loadgen" / name

    def _planned_s(self, name: ScenarioName) -> float:
        return self._run_s(name) * (EXPECTED_STEPS if name == "server" else 1)

    def _run_s(self, name: ScenarioName) -> float:
        """Return the expected duration of LoadGen's run, from the shortest call of the warm-up."""
        settings, call_s = self.settings, self.checked.call_s
        at_once = settings.batch_size * self.checked.process.concurrency
        num_calls = {
            "offline": settings.scenario_queries / at_once,
            "single_stream": settings.scenario_queries,
            "multi_stream": max(settings.scenario_queries, settings.multi_stream_queries),
            "server": max(settings.scenario_queries, settings.server_queries) / at_once,
        }[name]
        shortest_s = self.minimum.min_duration_s * (_HEADROOM * _SLACK if name == "offline" else 1.0)
        return max(shortest_s, num_calls * call_s)

    def _run(
        self, name: ScenarioName, expected: LoadGenSettings, log_dir: Path, run_s: float, later_s: float = 0.0
    ) -> LoadGenLog:
        """Run LoadGen for about ``run_s``; ``later_s`` of this scenario follow."""
        self.progress.begin(SCENARIO_PHASES[name], run_s, later_s + self.later_s)
        return run_loadgen(name, expected, self._queue(name, expected, self.samples.take), len(self.library), log_dir)

    def _accuracy(self, name: ScenarioName, expected: LoadGenSettings) -> AnswerCheck | None:
        """Answer every item in LoadGen's accuracy mode; return the comparison with the framework's answers."""
        if self.checked.reference is None:
            return None
        every = AnswerSamples(self.library, share=1.0)
        log_dir = self.log_dir(name) / "accuracy"
        run_loadgen(name, expected, self._queue(name, expected, every.take), len(self.library), log_dir, accuracy=True)
        return every.compared()

    def _queue(self, name: ScenarioName, expected: LoadGenSettings, look: Look) -> RequestQueue:
        batched, process = name in ("offline", "server"), self.checked.process

        def take(indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
            look(indices, outputs)
            self.progress.add(len(indices))

        return RequestQueue(
            process.pick,
            take,
            overlapped=process if batched and process.concurrency > 1 else None,
            batch_size=self.settings.batch_size if batched else expected.samples_per_query,
            padded=self.fixed_batch or not batched,
            context=replace(self.context, activity=f"scenario {name}"),
        )

    def _rate(self) -> float:
        """Return an estimate of the most items per second."""
        size = self.settings.batch_size
        return self.checked.process.concurrency * size / self._call_s(size)

    def _call_s(self, size: int) -> float:
        """Return the median duration of a call of ``size`` items in s, after a warm-up call."""
        indices = [index % len(self.library) for index in range(size)]
        self.checked.process.pick(indices)
        times: list[float] = []
        for _ in range(_PROBES):
            began = time.perf_counter()
            self.checked.process.pick(indices)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _result(
        self, name: ScenarioName, log: LoadGenLog, figure_name: str, figure: float | None, expected: LoadGenSettings
    ) -> ScenarioResult:
        samples = self.samples.compared()
        accuracy = self._accuracy(name, expected)
        size = self.settings.batch_size if name in ("offline", "server") else expected.samples_per_query
        check = self.library.repeat_check(size) if self.settings.repeat_check else None
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
                "crossing_us": self.crossing_us,
                "accuracy_answers": accuracy,
                "performance_answers": samples,
                "repeat_check": check,
            }
        )
