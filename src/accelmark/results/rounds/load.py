"""Compute the stages of a load, of a server or of an engine that generates offline, and the figures of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from accelmark.results.figure_names import FigureName as F
from accelmark.results.figures.consumption import HostSamples, consumption_figures
from accelmark.results.figures.serving import measured_stage
from accelmark.results.figures.serving_curves import StageRequests, load_curves
from accelmark.results.figures.training import Figures, value
from accelmark.results.read.rank_log import EndedStage
from accelmark.results.read.requests import Requests
from accelmark.results.schema import Figure, Point
from accelmark.results.serving_schema import ServingStage
from accelmark.spec.job import JobSpec
from accelmark.spec.log.serving import TokenScenarioResult
from accelmark.spec.settings.serving import ServeSettings, TokenScenario

_PERCENTILES: Final = {
    F.TTFT_P50: ("ttft", "p50"), F.TTFT_P99: ("ttft", "p99"), F.TPOT_P50: ("tpot", "p50"), F.TPOT_P99: ("tpot", "p99"),
    F.ITL_P99: ("itl", "p99"),
}  # fmt: skip
_SCENARIOS: Final[dict[F, TokenScenario]] = {
    F.LOADGEN_SERVER_TOKENS: "server", F.LOADGEN_OFFLINE_TOKENS: "offline",
}  # fmt: skip
_RATES: Final = {
    F.OUTPUT_RATE: "output_token_rate", F.OUTPUT_RATE_PER_DEVICE: "token_rate_per_device",
    F.OUTPUT_RATE_PER_USER: "token_rate_per_user", F.REQUEST_RATE: "request_rate",
}  # fmt: skip


class Consumption(NamedTuple):
    """Telemetry of the hosts, and why there is none."""

    hosts: HostSamples
    reason: str


def consumed(
    job: JobSpec, stage: ServingStage, load: EndedStage, consumption: Consumption
) -> tuple[Figures, list[str], int]:
    """Return the figures from telemetry over the stage's window, warnings about them, and the tokens in it."""
    if stage.window_s is None:
        figures, notes = consumption_figures({}, 0, job.device_type, stage.reasons[0])
        return figures, notes, 0
    begin_s, end_s = (load.load.begin_mono_s + time for time in stage.window_s)
    tokens = round((stage.output_token_rate or 0.0) * (end_s - begin_s))
    hosts = {host: (samples, ((begin_s, end_s),)) for host, (samples, _) in consumption.hosts.items()}
    figures, notes = consumption_figures(hosts, tokens, job.device_type, consumption.reason)
    return figures, notes, tokens


def stage_of(
    job: JobSpec,
    settings: ServeSettings,
    requests: Requests,
    ended: EndedStage,
    num_devices: int,
    consumption: Consumption,
) -> ServingStage:
    """Return the figures of one stage, with the energy in its window."""
    chosen = requests.where(requests.stage == ended.load.stage)
    ended_s = ended.mono_s - ended.load.begin_mono_s
    stage = measured_stage(chosen, ended.load, settings, num_devices, ended_s)
    used = consumed(job, stage, ended, consumption)[0]
    return stage.model_copy(
        update={
            "mean_power_w": used[F.MEAN_POWER].value,
            "joules_per_token": used[F.ENERGY_PER_UNIT].value,
            "tokens_per_joule": used[F.UNITS_PER_JOULE].value,
        }
    )


def headline_of(stages: Sequence[ServingStage], *, has_slo: bool) -> tuple[int | None, str]:
    """Return the stage whose figures are those of the round, and how it was chosen."""
    measured = [stage for stage in stages if stage.output_token_rate is not None and stage.scenario is None]
    if not measured:
        return None, "no stage has a rate of output tokens"
    if not has_slo:
        best = max(measured, key=lambda stage: stage.output_token_rate or 0.0)
        return best.stage, "the stage with the highest rate of output tokens; there is no SLO"
    holding = [stage for stage in measured if stage.holds_slo]
    if holding:
        best = max(holding, key=lambda stage: stage.output_token_rate or 0.0)
        return best.stage, "the stage with the highest rate of output tokens that holds the SLO"
    best = max(measured, key=lambda stage: stage.slo_share or 0.0)
    return best.stage, "no stage holds the SLO: the stage in which the largest share of requests does"


def stage_figures(stage: ServingStage | None, absent: str) -> Figures:
    """Return rates and percentiles of the stage whose figures are those of the round; ``absent``: why there is none."""
    return {
        **{name: value(getattr(stage, field) if stage else None, absent) for name, field in _RATES.items()},
        **{name: _percentile(stage, *of, absent) for name, of in _PERCENTILES.items()},
    }


def scenario_figures(scenarios: Sequence[TokenScenarioResult]) -> Figures:
    """Return the figures of LoadGen's scenarios with token latencies."""
    results = {result.scenario: result for result in scenarios}
    figures: Figures = {}
    for name, scenario in _SCENARIOS.items():
        result = results.get(scenario)
        absent = (result.reason if result else "the scenario was not requested") or "LoadGen reported none"
        figures[name] = value(result.tokens_per_second if result else None, absent)
    return figures


def _percentile(stage: ServingStage | None, latency: str, name: str, absent: str) -> Figure:
    found = stage.latencies.get(latency) if stage is not None else None
    quantile = found.quantiles.get(name) if found is not None else None
    return value(quantile.value, quantile.reason or absent) if quantile is not None else value(None, absent)


def load_span(ended: Sequence[EndedStage]) -> tuple[float, float] | None:
    """Return begin and end of all stages in seconds of their host's monotonic clock; None without a stage."""
    if not ended:
        return None
    last = ended[-1].load
    return ended[0].load.begin_mono_s, last.begin_mono_s + last.duration_s


def curves_of(ended: Sequence[EndedStage], requests: Requests) -> dict[str, tuple[Point, ...]]:
    """Return the curves of all stages over time."""
    first_s = ended[0].load.begin_mono_s if ended else 0.0
    return load_curves(
        [
            StageRequests(
                stage.load.stage, stage.load.begin_mono_s - first_s, requests.where(requests.stage == stage.load.stage)
            )
            for stage in ended
        ]
    )
