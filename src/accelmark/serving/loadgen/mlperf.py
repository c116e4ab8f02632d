"""Run MLCommons LoadGen in this process, read its log, and run its scenarios with token latencies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, final

from accelmark.serving.load.plan import EXPECTED_STEPS, FIRST_SHARE, LoadPlan, search_rate
from accelmark.serving.request import Load, LoadGenRun, LoadGenSettings
from accelmark.serving.stages import Stages
from accelmark.spec.errors import RunError
from accelmark.spec.log.events import Event
from accelmark.spec.log.serving import LoadStage, RequestRecord, TokenScenarioResult
from accelmark.spec.plugins.requirements import pip_install
from accelmark.spec.settings.serving import ServeSettings, TokenScenario

MIN_TOKENS: Final = 2
"""Fewest tokens of an answer that LoadGen takes."""
MLPERF_MIN_DURATION_S: Final = 600.0
"""Minimum duration of a run by MLPerf's rules."""
DETAIL_FILE: Final = "mlperf_log_detail.txt"
_PREFIX: Final = ":::MLLOG "
_PERCENTILES: Final = {"p50": "50.00", "p90": "90.00", "p99": "99.00", "p99.9": "99.90"}
_REASONS: Final = (
    "result_invalid_reason", "early_stopping_result", "early_stopping_ttft_result", "early_stopping_tpot_result",
)  # fmt: skip
_NS_IN_MS: Final = 1e6


class Query(Protocol):
    """One sample that LoadGen requests."""

    @property
    def id(self) -> int:
        """Id of the response."""
        ...

    @property
    def index(self) -> int:
        """Index of the item."""
        ...


@final
@dataclass(frozen=True)
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
        texts = (self.values.get(key) for key in _REASONS)
        reasons = (" ".join(str(text or "").replace("*", " ").split()) for text in texts)
        return "; ".join(reason for reason in reasons if reason) or "LoadGen reports no reason"

    def number(self, key: str) -> float | None:
        """Return a number, or None where the log has none."""
        value = self.values.get(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def latencies_ms(self, *, per_query: bool) -> dict[str, float]:
        """Return LoadGen's latency percentiles of samples, or of queries."""
        infix = "percentile_per_query" if per_query else "percentile"
        return self._percentiles_ms("result_{}_" + infix + "_latency_ns")

    def ttft_ms(self) -> dict[str, float]:
        """Return percentiles of the time to the first token."""
        return self._percentiles_ms("result_first_token_{}_percentile_latency_ns")

    def tpot_ms(self) -> dict[str, float]:
        """Return percentiles of the time per further token."""
        return self._percentiles_ms("result_time_per_output_token_{}_percentile_ns")

    def _percentiles_ms(self, key: str) -> dict[str, float]:
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
    system = lg.ConstructSUT(issue, _nothing)
    library = lg.ConstructQSL(num_items, num_items, _nothing, _nothing)
    try:
        lg.StartTestWithLogSettings(system, library, settings, logs)
    finally:
        lg.DestroyQSL(library)
        lg.DestroySUT(system)


def library() -> Any:
    """Return LoadGen's module.

    Raises:
        RunError: it is not installed.
    """
    try:
        import mlperf_loadgen
    except ImportError as error:
        install = pip_install(["mlcommons-loadgen"])
        problem = f"scenarios need LoadGen, which cannot be imported ({error}): run {install}"
        raise RunError(problem) from error
    return mlperf_loadgen


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


_HEADROOM: Final = 1.2
"""LoadGen advises to expect more than the measured rate."""
_LONGEST: Final = 10.0
"""Longest run of the search, in the least durations of a run: lower rates are not tried."""
_OFFLINE_TRIES: Final = 3
_OFFLINE_WAIT: Final = 4.0
"""Longest wait for an answer of the Offline scenario, in which all queries wait, in durations of a run."""


class _Run(NamedTuple):
    log: LoadGenLog
    stage: LoadStage
    num_failed: int
    log_dir: Path

    @property
    def holds(self) -> bool:
        """Whether the limits of the Server scenario were held, by every query."""
        return self.log.bound_met and not self.num_failed


@final
@dataclass
class TokenScenarios:
    """Runs the scenarios of the settings, with the stages of a load."""

    settings: ServeSettings
    plan: LoadPlan
    stages: Stages
    node_dir: Path
    emit: Callable[[Event, Any], None]

    def run(self) -> None:
        """Run them in the order of the settings.

        Raises:
            AccelmarkError: the server, the client or LoadGen ended.
        """
        library()  # its absence is reported before the first stage
        kinds: dict[TokenScenario, Callable[[], TokenScenarioResult]] = {
            "server": self._server,
            "offline": self._offline,
        }
        for name in self.settings.scenarios:
            self.emit(Event.TOKEN_SCENARIO, kinds[name]())

    def _server(self) -> TokenScenarioResult:
        runs: dict[float, _Run] = {}
        slo = self.settings.slo

        later_s = self.plan.begin(EXPECTED_STEPS * self.settings.scenario_duration_s)

        def holds(rate: float, steps_left: int) -> bool:
            left_s = later_s + steps_left * self.settings.scenario_duration_s
            expected = self._expected(rate, ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, share=slo.share)
            runs[rate] = self._run("server", expected, f"try{len(runs) + 1:02}_qps_{rate:.3f}", left_s)
            return runs[rate].holds

        least = self.settings.scenario_queries / (_LONGEST * self.settings.scenario_duration_s)
        best = search_rate(holds, max(FIRST_SHARE * self.plan.answered_rate, least), least).rate
        shown = min(runs) if best is None else best
        log = runs[shown].log
        result = self._result("server", runs[shown], log.number("result_completed_tokens_per_second"), best)
        update: dict[str, Any] = {
            "ttft_limit_ms": slo.ttft_ms,
            "tpot_limit_ms": slo.tpot_ms,
            "ttft_ms": log.ttft_ms(),
            "tpot_ms": log.tpot_ms(),
            "tried": tuple((rate, run.holds) for rate, run in runs.items()),
        }
        if best is None:
            update |= {"tokens_per_second": None, "reason": "no tried rate held the limits"}
        return result.model_copy(update=update)

    def _offline(self) -> TokenScenarioResult:
        rate = max(self.plan.answered_rate, 1e-3)
        later_s = self.plan.begin(self.settings.scenario_duration_s)
        for number in range(_OFFLINE_TRIES):  # again where the estimate was too low for the minimum duration
            run = self._run("offline", self._expected(rate * _HEADROOM), f"try{number + 1:02}", later_s)
            if run.log.long_enough or run.num_failed:
                break
            rate = run.log.number("result_samples_per_second") or rate * _HEADROOM
        return self._result(
            "offline",
            run,
            run.log.number("result_tokens_per_second"),
            run.log.number("result_samples_per_second"),
        )

    def _expected(self, rate: float, **limits: Any) -> LoadGenSettings:
        least = LoadGenSettings(self.settings.scenario_duration_s, self.settings.scenario_queries, rate)
        return replace(least, token_latencies=True, **limits)

    def _run(self, name: TokenScenario, expected: LoadGenSettings, folder: str, later_s: float) -> _Run:
        settings, rate = self.settings, expected.queries_per_s
        waits_s = _OFFLINE_WAIT * expected.min_duration_s if name == "offline" else 0.0
        num_queries = max(expected.min_queries, round(expected.min_duration_s * rate))
        log_dir = self.node_dir / "loadgen" / name / folder
        load = Load(
            stage=self.plan.next_stage(),
            until_s=expected.min_duration_s,
            timeout_s=settings.request_timeout_s + waits_s,
            arrival="poisson" if name == "server" else "at_once",
            rate=rate if name == "server" else None,
            later_s=later_s,
            loadgen=LoadGenRun(name, expected, log_dir, self.stages.tokenizer_dir),
            num_drawn=round(num_queries * _HEADROOM),
        )
        stage, records = self.stages.run(load, self.plan.fresh_requests())
        failed = [record for record in records if record.status != "ok" or (_num_tokens(record) or 0) < MIN_TOKENS]
        return _Run(read_log(log_dir / DETAIL_FILE), stage, len(failed), log_dir)

    def _result(
        self, name: TokenScenario, run: _Run, tokens_per_s: float | None, queries_per_s: float | None
    ) -> TokenScenarioResult:
        failed = f"{run.num_failed} of {run.stage.num_requests} queries failed or have fewer than two tokens"
        reasons = [reason for reason in (failed if run.num_failed else None, run.log.reason) if reason]
        return TokenScenarioResult(
            scenario=name,
            stage=run.stage.stage,
            valid=run.log.valid and not run.num_failed,
            functional=self.settings.scenario_duration_s < MLPERF_MIN_DURATION_S,
            tokens_per_second=tokens_per_s,
            queries_per_second=queries_per_s,
            num_failed=run.num_failed,
            log_dir=str(run.log_dir.relative_to(self.node_dir)),
            reason="; ".join(reasons) or None,
        )


def _num_tokens(record: RequestRecord) -> int | None:
    return record.output_tokens if record.output_tokens is not None else record.usage_output
