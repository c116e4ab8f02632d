"""The figures that AccelMark measures: names, units, and whether higher or lower is better."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, final

from accelmark.spec.number_format import quantity


class FigureName(StrEnum):
    """Names of the figures of a round."""

    E2E_TIME = "e2e_time_s"
    INIT_TIME = "init_time_s"
    RAW_TRAIN_TIME = "raw_train_time_s"
    TRAIN_NO_EVAL_TIME = "train_no_eval_time_s"
    PURE_COMPUTE_TIME = "pure_compute_time_s"
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
    INFERENCE_METRIC = "inference_metric"
    VALIDATION_METRIC = "validation_metric"
    METRIC_DIFFERENCE = "metric_difference"
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


@final
@dataclass(frozen=True, slots=True)
class FigureInfo:
    """Presentation of a figure; title and unit may contain ``{unit}``, which a case defines (image, token)."""

    title: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    explanation: str


F = FigureName

FIGURES: Final[dict[FigureName, FigureInfo]] = {
    F.E2E_TIME: FigureInfo("End to end", "s", "lower", "from the start of rank 0's process to its last event"),
    F.INIT_TIME: FigureInfo("Initialisation", "s", "lower", "from the start of rank 0's process to TRAIN_START"),
    F.RAW_TRAIN_TIME: FigureInfo("Raw training", "s", "lower", "TRAIN_START to TRAIN_END, evaluation included"),
    F.TRAIN_NO_EVAL_TIME: FigureInfo("Training", "s", "lower", "raw training time minus evaluation"),
    F.PURE_COMPUTE_TIME: FigureInfo("Computation", "s", "lower", "sum of the computation of all steps"),
    F.TIME_TO_TARGET: FigureInfo(
        "Time to target", "s", "lower", "raw training time until the first evaluation that reached the target"
    ),
    F.THROUGHPUT_WHOLE: FigureInfo(
        "Throughput, whole", "{unit}s/s", "higher", "over raw training time, with data loading and evaluation"
    ),
    F.THROUGHPUT_TRAIN: FigureInfo("Throughput, training", "{unit}s/s", "higher", "over training time"),
    F.THROUGHPUT_CORE: FigureInfo("Throughput, core", "{unit}s/s", "higher", "over computation only"),
    F.THROUGHPUT_PER_DEVICE: FigureInfo(
        "Throughput per device", "{unit}s/s", "higher", "training throughput per device"
    ),
    F.STEP_P50: FigureInfo("Step time, median", "ms", "lower", "computation of a step"),
    F.STEP_P90: FigureInfo("Step time, p90", "ms", "lower", "computation of a step"),
    F.STEP_P99: FigureInfo("Step time, p99", "ms", "lower", "computation of a step"),
    F.DATA_WAIT_SHARE: FigureInfo("Waiting for data", "ratio", "lower", "share of training time"),
    F.FINAL_LOSS: FigureInfo("Final loss", "", "lower", "loss of the last step"),
    F.FINAL_METRIC: FigureInfo("Final metric", "", "neither", "the target's metric at the last evaluation"),
    F.MFU: FigureInfo(
        "MFU", "ratio", "higher", "model FLOP/s per device over the chip's dense peak at the precision used"
    ),
    F.MFU_MEASURED: FigureInfo(
        "MFU, measured ceiling",
        "ratio",
        "higher",
        "model FLOP/s per device over the matmul rate that the probe measured",
    ),
    F.ACHIEVED_TFLOPS: FigureInfo(
        "Model TFLOP/s per device", "TFLOP/s", "higher", "training throughput per device x model FLOPs"
    ),
    F.FLOPS_PER_SAMPLE: FigureInfo("Model FLOPs per sample", "FLOP", "neither", "forward and backward, counted"),
    F.PEAK_DEVICE_MEMORY: FigureInfo("Peak device memory", "MiB", "lower", "largest allocation on any device"),
    F.PEAK_HOST_MEMORY: FigureInfo("Peak host memory", "MiB", "lower", "largest use on any host, from telemetry"),
    F.DEVICE_UTILISATION: FigureInfo(
        "Device utilisation", "ratio", "higher", "time-weighted mean during the measurement"
    ),
    F.CPU_UTILISATION: FigureInfo("CPU utilisation", "ratio", "neither", "time-weighted mean during the measurement"),
    F.MEAN_POWER: FigureInfo("Mean power", "W", "lower", "all devices (or CPU packages) during the measurement"),
    F.ENERGY: FigureInfo("Energy", "J", "lower", "device's energy counter while training, else integrated power"),
    F.ENERGY_PER_UNIT: FigureInfo("Energy per {unit}", "J", "lower", "energy over the number of units"),
    F.UNITS_PER_JOULE: FigureInfo("Performance per watt", "{unit}s/J", "higher", "units per joule"),
    F.TELEMETRY_CPU_TIME: FigureInfo(
        "CPU time of telemetry", "s", "lower", "user and system time of the telemetry recorder"
    ),
    F.INFERENCE_CORE: FigureInfo(
        "Inference, core", "{unit}s/s", "higher", "engine: computation and copies to and from the device"
    ),
    F.INFERENCE_WHOLE: FigureInfo(
        "Inference, whole", "{unit}s/s", "higher", "engine: with data loading and evaluation"
    ),
    F.VALIDATION_CORE: FigureInfo(
        "Validation, core", "{unit}s/s", "higher", "framework: computation and copies to and from the device"
    ),
    F.VALIDATION_WHOLE: FigureInfo(
        "Validation, whole", "{unit}s/s", "higher", "framework: with data loading and evaluation"
    ),
    F.INFERENCE_METRIC: FigureInfo("Accuracy in the engine", "", "neither", "the case's metric over all items"),
    F.VALIDATION_METRIC: FigureInfo("Accuracy in the framework", "", "neither", "the case's metric over all items"),
    F.METRIC_DIFFERENCE: FigureInfo(
        "Accuracy difference", "", "neither", "engine minus framework; the case states a tolerance"
    ),
    F.LATENCY_P50: FigureInfo("Latency, median", "ms", "lower", "of a full batch in the engine, nearest rank"),
    F.LATENCY_P90: FigureInfo("Latency, p90", "ms", "lower", "of a full batch in the engine, nearest rank"),
    F.LATENCY_P99: FigureInfo("Latency, p99", "ms", "lower", "of a full batch in the engine, nearest rank"),
    F.LATENCY_P999: FigureInfo("Latency, p99.9", "ms", "lower", "of a full batch in the engine, nearest rank"),
    F.FIRST_CALL: FigureInfo(
        "First call", "ms", "lower", "first call of the engine, before warm-up; in no other figure"
    ),
    F.VALIDATION_TIME: FigureInfo("Validation step", "s", "lower", "step 3"),
    F.EXPORT_TIME: FigureInfo("Export step", "s", "lower", "step 4: export to ONNX"),
    F.COMPILE_TIME: FigureInfo("Compilation", "s", "lower", "step 5; in no throughput"),
    F.INFERENCE_TIME: FigureInfo("Inference step", "s", "lower", "step 6, with LoadGen scenarios"),
    F.FLOPS_PER_ITEM: FigureInfo("Model FLOPs per item", "FLOP", "neither", "forward pass, as the case states"),
    F.REPEAT_SPEEDUP: FigureInfo(
        "Repeated over new items",
        "ratio",
        "neither",
        "speed of repeated items over new ones; more than 1.1 in most batches suggests cached outputs",
    ),
    F.DECLARED_SHARE: FigureInfo(
        "Declared not inference",
        "ratio",
        "lower",
        "share of the measured calls' time that the engine declares as not inference; in no rate or latency",
    ),
    F.DEVICE_MEMORY_TOTAL: FigureInfo("Device memory", "MiB", "neither", "capacity of the device, from telemetry"),
    F.OFFLINE_RATE: FigureInfo("Offline scenario", "samples/s", "higher", "LoadGen: all samples in one query"),
    F.SINGLE_STREAM_LATENCY: FigureInfo("SingleStream scenario, p90", "ms", "lower", "LoadGen: one query at a time"),
    F.MULTI_STREAM_LATENCY: FigureInfo(
        "MultiStream scenario, p99", "ms", "lower", "LoadGen: queries of several samples"
    ),
    F.SERVER_RATE: FigureInfo(
        "Server scenario",
        "queries/s",
        "higher",
        "LoadGen: highest rate at which 99 % of queries meet the latency bound",
    ),
    F.SEARCH_SCORE: FigureInfo(
        "Score", "OP/s", "higher", "operations of all trials, by the search's counting rule, over its time"
    ),
    F.SEARCH_REGULATED_SCORE: FigureInfo("Regulated score", "OP/s", "higher", "-ln(held-out error) x score"),
    F.SEARCH_HELD_OUT_ERROR: FigureInfo("Held-out error", "ratio", "lower", "best trial, on the held-out split"),
    F.SEARCH_VALIDATION_ERROR: FigureInfo(
        "Best validation error", "ratio", "lower", "lowest error of any trial on the validation split"
    ),
    F.SEARCH_OPERATIONS: FigureInfo("Operations", "OP", "neither", "counted operations of all trials"),
    F.SEARCH_TIME: FigureInfo("Search", "s", "neither", "from the start of the first trial to the end of the last"),
    F.SEARCH_IDLE_SHARE: FigureInfo(
        "Idle", "ratio", "lower", "share of the workers' time without training or evaluation"
    ),
    F.SEARCH_TRIALS: FigureInfo("Trials finished", "trials", "neither", "of the trials that were started"),
    F.SEARCH_IMAGES: FigureInfo("Images trained", "images", "neither", "over all trials"),
}

_SHARED: Final = (
    F.E2E_TIME, F.MFU, F.ACHIEVED_TFLOPS, F.PEAK_DEVICE_MEMORY,
    F.PEAK_HOST_MEMORY, F.DEVICE_UTILISATION, F.CPU_UTILISATION, F.MEAN_POWER,
    F.ENERGY, F.ENERGY_PER_UNIT, F.UNITS_PER_JOULE, F.TELEMETRY_CPU_TIME,
)  # fmt: skip
_NAMES: Final = tuple(FigureName)
_INFER, _SEARCH = _NAMES.index(F.INFERENCE_CORE), _NAMES.index(F.SEARCH_SCORE)
INFER_FIGURES: Final = (*_NAMES[_INFER:_SEARCH], *_SHARED)
"""The figures of an inference round."""
TRAIN_FIGURES: Final = _NAMES[:_INFER]
"""The figures of a training round."""


def title_of(name: FigureName, unit: str) -> str:
    """Return a figure's title for a case that counts ``unit``."""
    return FIGURES[name].title.format(unit=unit)


def unit_of(name: FigureName, unit: str) -> str:
    """Return a figure's unit for a case that counts ``unit``."""
    return FIGURES[name].unit.format(unit=unit)


def format_figure(name: FigureName, value: float | None, unit: str) -> str:
    """Return a figure's value with its unit, for a case that counts ``unit``."""
    return quantity(value, unit_of(name, unit))
