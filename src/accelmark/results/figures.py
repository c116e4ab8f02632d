"""The figures that AccelMark measures; ``figures.yaml`` defines them."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from accelmark.spec.model import Spec, read_yaml
from accelmark.spec.number_format import quantity


class FigureName(StrEnum):
    """Names of the figures of a round."""

    E2E_TIME = "e2e_time_s"
    INIT_TIME = "init_time_s"
    RAW_TRAIN_TIME = "raw_train_time_s"
    TRAIN_NO_EVAL_TIME = "train_no_eval_time_s"
    PURE_COMPUTE_TIME = "pure_compute_time_s"
    REEVALUATION_TIME = "reevaluation_time_s"
    TIME_TO_TARGET = "time_to_target_s"
    THROUGHPUT_WHOLE = "throughput_whole"
    THROUGHPUT_TRAIN = "throughput_train"
    THROUGHPUT_CORE = "throughput_core"
    THROUGHPUT_PER_DEVICE = "throughput_per_device"
    STEP_P50 = "step_p50_ms"
    STEP_P90 = "step_p90_ms"
    STEP_P99 = "step_p99_ms"
    DATA_WAIT_SHARE = "data_wait_share"
    FINAL_LOSS = "final_loss"
    FINAL_METRIC = "final_metric"
    MFU = "mfu"
    MFU_MEASURED = "mfu_measured"
    ACHIEVED_TFLOPS = "achieved_tflops_per_device"
    FLOPS_PER_SAMPLE = "flops_per_sample"
    PEAK_DEVICE_MEMORY = "peak_device_memory_mib"
    PEAK_HOST_MEMORY = "peak_host_memory_mib"
    DEVICE_UTILISATION = "device_utilisation"
    CPU_UTILISATION = "cpu_utilisation"
    MEAN_POWER = "mean_power_w"
    ENERGY = "energy_j"
    ENERGY_PER_UNIT = "energy_per_unit_j"
    UNITS_PER_JOULE = "performance_per_watt"
    TELEMETRY_CPU_TIME = "telemetry_cpu_time_s"

    # Inference.
    INFERENCE_CORE = "inference_core"
    INFERENCE_WHOLE = "inference_whole"
    VALIDATION_CORE = "validation_core"
    VALIDATION_WHOLE = "validation_whole"
    ENGINE_METRIC = "engine_metric"
    FRAMEWORK_METRIC = "framework_metric"
    METRIC_DIFFERENCE = "metric_difference"
    INFERENCE_METRIC = "inference_metric"
    VALIDATION_METRIC = "validation_metric"
    LATENCY_P50 = "latency_p50_ms"
    LATENCY_P90 = "latency_p90_ms"
    LATENCY_P99 = "latency_p99_ms"
    LATENCY_P999 = "latency_p999_ms"
    FIRST_CALL = "first_call_ms"
    VALIDATION_TIME = "validation_time_s"
    EXPORT_TIME = "export_time_s"
    COMPILE_TIME = "compile_time_s"
    INFERENCE_TIME = "inference_time_s"
    FLOPS_PER_ITEM = "flops_per_item"
    REPEAT_SPEEDUP = "repeat_speedup"
    DECLARED_SHARE = "not_inference_share"
    DEVICE_MEMORY_TOTAL = "device_memory_total_mib"
    OFFLINE_RATE = "offline_samples_per_second"
    SINGLE_STREAM_LATENCY = "single_stream_latency_p90_ms"
    MULTI_STREAM_LATENCY = "multi_stream_latency_p99_ms"
    SERVER_RATE = "server_queries_per_second"

    # Offline generation.
    PREFILL_RATE = "prefill_tokens_per_second"
    DECODE_RATE = "decode_tokens_per_second"
    PREFILL_MFU = "prefill_mfu"
    DECODE_MFU = "decode_mfu"
    DECODE_MBU = "decode_mbu"
    KV_CACHE = "kv_cache_mib"

    # Serving.
    OUTPUT_RATE = "output_tokens_per_second"
    OUTPUT_RATE_PER_DEVICE = "output_tokens_per_second_per_device"
    OUTPUT_RATE_PER_USER = "output_tokens_per_second_per_user"
    REQUEST_RATE = "requests_per_second"
    TTFT_P50 = "ttft_p50_ms"
    TTFT_P99 = "ttft_p99_ms"
    TPOT_P50 = "tpot_p50_ms"
    TPOT_P99 = "tpot_p99_ms"
    ITL_P99 = "itl_p99_ms"
    GOODPUT = "goodput_requests_per_second"
    SLO_SHARE = "slo_share"
    SLO_RATE = "slo_rate_requests_per_second"
    LOADGEN_SERVER_TOKENS = "loadgen_server_tokens_per_second"
    LOADGEN_OFFLINE_TOKENS = "loadgen_offline_tokens_per_second"
    FAILED_SHARE = "failed_request_share"
    ANSWER_AGREEMENT = "answer_agreement"
    SERVER_START_TIME = "server_start_time_s"

    # AutoML searches.
    SEARCH_SCORE = "search_score"
    SEARCH_REGULATED_SCORE = "search_regulated_score"
    SEARCH_HELD_OUT_ERROR = "search_held_out_error"
    SEARCH_VALIDATION_ERROR = "search_validation_error"
    SEARCH_OPERATIONS = "search_operations"
    SEARCH_TIME = "search_time_s"
    SEARCH_IDLE_SHARE = "search_idle_share"
    SEARCH_TRIALS = "search_trials_finished"
    SEARCH_IMAGES = "search_trained_images"


class FigureInfo(Spec):
    """Presentation of a figure; title and unit may contain what a case defines.

    These are ``{unit}`` (image, token) and, in titles, ``{metric}`` (top-1 accuracy).
    """

    title: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    explanation: str
    is_difference: bool = False
    """Whether its values may be on both sides of 0, so that a share of them means nothing."""


_DEFINITIONS: Final = TypeAdapter(dict[str, dict[FigureName, FigureInfo]]).validate_python(
    read_yaml(Path(__file__).with_name("figures.yaml"))
)
FIGURE_GROUPS: Final = {title: tuple(figures) for title, figures in _DEFINITIONS.items()}
"""Title of a group -> its figures, in the order of pages and tables."""
FIGURES: Final = {name: info for figures in _DEFINITIONS.values() for name, info in figures.items()}

F = FigureName
_SHARED: Final = (
    F.E2E_TIME, F.MFU, F.MFU_MEASURED, F.ACHIEVED_TFLOPS, F.PEAK_DEVICE_MEMORY,
    F.PEAK_HOST_MEMORY, F.DEVICE_UTILISATION, F.CPU_UTILISATION, F.MEAN_POWER,
    F.ENERGY, F.ENERGY_PER_UNIT, F.UNITS_PER_JOULE, F.TELEMETRY_CPU_TIME,
)  # fmt: skip
_NAMES: Final = tuple(FigureName)
_INFER, _GENERATE, _SERVE, _SEARCH = map(
    _NAMES.index, (F.INFERENCE_CORE, F.PREFILL_RATE, F.OUTPUT_RATE, F.SEARCH_SCORE)
)
INFER_FIGURES: Final = (*_NAMES[_INFER:_GENERATE], *_SHARED)
"""The figures of an inference round."""
GENERATION_FIGURES: Final = (
    *_NAMES[_GENERATE:_SERVE], F.OUTPUT_RATE, F.OUTPUT_RATE_PER_DEVICE, F.OUTPUT_RATE_PER_USER, F.TTFT_P50, F.TTFT_P99,
    F.TPOT_P50, F.TPOT_P99, F.ITL_P99, F.LOADGEN_SERVER_TOKENS, F.LOADGEN_OFFLINE_TOKENS, F.ANSWER_AGREEMENT,
)  # fmt: skip
"""The further figures of one that generates text."""
_UNCOUNTED: Final = (F.MFU, F.MFU_MEASURED, F.ACHIEVED_TFLOPS)
SERVE_FIGURES: Final = (*_NAMES[_SERVE:_SEARCH], *(name for name in _SHARED if name not in _UNCOUNTED))
"""The figures of a serving round; a server reports no FLOPs."""
TRAIN_FIGURES: Final = _NAMES[:_INFER]
"""The figures of a training round."""
HEADLINES: Final = (
    F.THROUGHPUT_TRAIN, F.TIME_TO_TARGET, F.FINAL_METRIC, F.INFERENCE_CORE, F.ENGINE_METRIC, F.LATENCY_P50,
    F.OUTPUT_RATE, F.TTFT_P50, F.TPOT_P50, F.SLO_RATE, F.REQUEST_RATE, F.ANSWER_AGREEMENT, F.UNITS_PER_JOULE,
    F.LATENCY_P99, F.MFU, F.ENERGY_PER_UNIT, F.VALIDATION_CORE, F.PEAK_DEVICE_MEMORY, F.STEP_P50, F.DATA_WAIT_SHARE,
    F.FINAL_LOSS, F.COMPILE_TIME, F.RAW_TRAIN_TIME,
)  # fmt: skip
"""The figures that say most, in order of preference; those without a value are skipped."""
_NUM_FIRST: Final = 3


def in_groups(names: Collection[FigureName]) -> dict[str, list[FigureName]]:
    """Return figures by title of their group, as a comparison shows them: first the three that say most."""
    first = [name for name in HEADLINES if name in names][:_NUM_FIRST]
    left = set(names) - set(first)
    groups = {"Headline figures": first} | {
        title: [name for name in group if name in left] for title, group in FIGURE_GROUPS.items()
    }
    return {title: group for title, group in groups.items() if group}


def title_of(name: FigureName, unit: str, metric: str | None = None) -> str:
    """Return a figure's title for a case that counts ``unit`` and has the ``metric``."""
    title = FIGURES[name].title.format(unit=unit, metric=metric or "metric")
    return title[:1].upper() + title[1:]


def unit_of(name: FigureName, unit: str) -> str:
    """Return a figure's unit for a case that counts ``unit``."""
    return FIGURES[name].unit.format(unit=unit)


def format_figure(name: FigureName, value: float | None, unit: str) -> str:
    """Return a figure's value with its unit, for a case that counts ``unit``."""
    return quantity(value, unit_of(name, unit))
