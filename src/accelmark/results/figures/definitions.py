"""The figures AccelMark measures: names, units, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, final

from accelmark.spec.number_format import quantity


class FigureName(StrEnum):
    """Every headline figure of a round."""

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
    """How a figure is shown: ``unit`` may hold ``{unit}``, the case's own (image, token)."""

    title: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    explanation: str


def _info(title: str, unit: str, better: Literal["higher", "lower", "neither"], explanation: str) -> FigureInfo:
    return FigureInfo(title, unit, better, explanation)


FIGURES: Final[dict[FigureName, FigureInfo]] = {
    FigureName.E2E_TIME: _info("End to end", "s", "lower", "from the start of rank 0's process to its last event"),
    FigureName.INIT_TIME: _info("Initialisation", "s", "lower", "from the start of rank 0's process to TRAIN_START"),
    FigureName.RAW_TRAIN_TIME: _info("Raw training", "s", "lower", "TRAIN_START to TRAIN_END, evaluation included"),
    FigureName.TRAIN_NO_EVAL_TIME: _info("Training", "s", "lower", "raw training less evaluation"),
    FigureName.PURE_COMPUTE_TIME: _info("Computation", "s", "lower", "sum over the steps of their computation"),
    FigureName.TIME_TO_TARGET: _info(
        "Time to target", "s", "lower", "raw training time up to the first evaluation that met the target"
    ),
    FigureName.THROUGHPUT_WHOLE: _info(
        "Throughput, whole", "{unit}s/s", "higher", "over raw training time: data loading and evaluation included"
    ),
    FigureName.THROUGHPUT_TRAIN: _info("Throughput, training", "{unit}s/s", "higher", "over training time"),
    FigureName.THROUGHPUT_CORE: _info("Throughput, core", "{unit}s/s", "higher", "over computation alone"),
    FigureName.THROUGHPUT_PER_DEVICE: _info(
        "Throughput per device", "{unit}s/s", "higher", "training throughput over the number of devices"
    ),
    FigureName.STEP_P50: _info("Step time, median", "ms", "lower", "computation of a step"),
    FigureName.STEP_P90: _info("Step time, p90", "ms", "lower", "computation of a step"),
    FigureName.STEP_P99: _info("Step time, p99", "ms", "lower", "computation of a step"),
    FigureName.DATA_WAIT_SHARE: _info("Waiting for data", "ratio", "lower", "share of training time"),
    FigureName.FINAL_LOSS: _info("Final loss", "", "lower", "loss of the last step"),
    FigureName.FINAL_METRIC: _info("Final metric", "", "neither", "the target's metric at the last evaluation"),
    FigureName.MFU: _info(
        "MFU", "ratio", "higher", "model FLOP/s per device over the chip's dense peak for the precision used"
    ),
    FigureName.MFU_MEASURED: _info(
        "MFU, measured ceiling", "ratio", "higher", "model FLOP/s per device over the matmul rate that probe measured"
    ),
    FigureName.ACHIEVED_TFLOPS: _info(
        "Model TFLOP/s per device", "TFLOP/s", "higher", "throughput of computation x FLOPs of the model"
    ),
    FigureName.FLOPS_PER_SAMPLE: _info("Model FLOPs per sample", "FLOP", "neither", "forward and backward, counted"),
    FigureName.PEAK_DEVICE_MEMORY: _info("Peak device memory", "MiB", "lower", "largest allocation on any device"),
    FigureName.PEAK_HOST_MEMORY: _info("Peak host memory", "MiB", "lower", "largest use seen by telemetry on any host"),
    FigureName.DEVICE_UTILISATION: _info("Device utilisation", "ratio", "higher", "time-weighted mean while measuring"),
    FigureName.CPU_UTILISATION: _info("CPU utilisation", "ratio", "neither", "time-weighted mean while measuring"),
    FigureName.MEAN_POWER: _info("Mean power", "W", "lower", "all devices (or CPU packages) while training"),
    FigureName.ENERGY: _info("Energy", "J", "lower", "device's energy counter while training, else integrated power"),
    FigureName.ENERGY_PER_UNIT: _info("Energy per {unit}", "J", "lower", "energy over the units trained"),
    FigureName.UNITS_PER_JOULE: _info("Performance per watt", "{unit}s/J", "higher", "units per joule"),
    FigureName.TELEMETRY_CPU_TIME: _info("CPU time of telemetry", "s", "lower", "user and system time of the sampler"),
    FigureName.INFERENCE_CORE: _info(
        "Inference, core", "{unit}s/s", "higher", "in the engine: computation and the copies to and from the device"
    ),
    FigureName.INFERENCE_WHOLE: _info(
        "Inference, whole", "{unit}s/s", "higher", "in the engine, with loading the data and evaluation"
    ),
    FigureName.VALIDATION_CORE: _info(
        "Validation, core", "{unit}s/s", "higher", "in the framework: computation and the copies to and from the device"
    ),
    FigureName.VALIDATION_WHOLE: _info(
        "Validation, whole", "{unit}s/s", "higher", "in the framework, with loading the data and evaluation"
    ),
    FigureName.INFERENCE_METRIC: _info("Accuracy in the engine", "", "neither", "the case's metric over all items"),
    FigureName.VALIDATION_METRIC: _info("Accuracy in the framework", "", "neither", "the case's metric over all items"),
    FigureName.METRIC_DIFFERENCE: _info(
        "Difference of accuracies",
        "",
        "neither",
        "in the engine less in the framework; the case bounds it",
    ),
    FigureName.LATENCY_P50: _info("Latency, median", "ms", "lower", "of a full batch in the engine, nearest rank"),
    FigureName.LATENCY_P90: _info("Latency, p90", "ms", "lower", "of a full batch in the engine, nearest rank"),
    FigureName.LATENCY_P99: _info("Latency, p99", "ms", "lower", "of a full batch in the engine, nearest rank"),
    FigureName.LATENCY_P999: _info("Latency, p99.9", "ms", "lower", "of a full batch in the engine, nearest rank"),
    FigureName.FIRST_CALL: _info("First call", "ms", "lower", "of the engine, before warming up; counts nowhere else"),
    FigureName.VALIDATION_TIME: _info("Validation step", "s", "lower", "the third step"),
    FigureName.EXPORT_TIME: _info("Export step", "s", "lower", "the fourth step: to ONNX"),
    FigureName.COMPILE_TIME: _info("Compilation", "s", "lower", "the fifth step; in no throughput"),
    FigureName.INFERENCE_TIME: _info("Inference step", "s", "lower", "the sixth step, scenarios included"),
    FigureName.FLOPS_PER_ITEM: _info("Model FLOPs per item", "FLOP", "neither", "forward pass, as the case states it"),
    FigureName.REPEAT_SPEEDUP: _info(
        "Same items over fresh",
        "ratio",
        "neither",
        "how much faster the same items again run; above 1.1 in most batches is suspicious",
    ),
    FigureName.DECLARED_SHARE: _info(
        "Declared not inference",
        "ratio",
        "lower",
        "share of the measured calls' time that the engine itself leaves out of every rate and latency",
    ),
    FigureName.DEVICE_MEMORY_TOTAL: _info("Device memory", "MiB", "neither", "what the device has, from telemetry"),
    FigureName.OFFLINE_RATE: _info("Offline scenario", "samples/s", "higher", "LoadGen: all samples in one query"),
    FigureName.SINGLE_STREAM_LATENCY: _info(
        "SingleStream scenario, p90", "ms", "lower", "LoadGen: one query after another"
    ),
    FigureName.MULTI_STREAM_LATENCY: _info(
        "MultiStream scenario, p99", "ms", "lower", "LoadGen: queries of several samples"
    ),
    FigureName.SERVER_RATE: _info(
        "Server scenario", "queries/s", "higher", "LoadGen: the highest rate at which 99 % hold the latency bound"
    ),
    FigureName.SEARCH_SCORE: _info(
        "Score", "OP/s", "higher", "operations of all trials over the search's time, as its counting rule counts them"
    ),
    FigureName.SEARCH_REGULATED_SCORE: _info("Regulated score", "OP/s", "higher", "-ln(held-out error) x score"),
    FigureName.SEARCH_HELD_OUT_ERROR: _info(
        "Held-out error", "ratio", "lower", "of the best trial, on the split that the search never saw"
    ),
    FigureName.SEARCH_VALIDATION_ERROR: _info(
        "Best error in the search", "ratio", "lower", "best of all peeks at the validation split"
    ),
    FigureName.SEARCH_OPERATIONS: _info("Operations", "OP", "neither", "of all trials, counted"),
    FigureName.SEARCH_TIME: _info("Search", "s", "neither", "from the first trial's start to the last one's end"),
    FigureName.SEARCH_IDLE_SHARE: _info(
        "Idle", "ratio", "lower", "share of the workers' time that was neither training nor evaluating"
    ),
    FigureName.SEARCH_TRIALS: _info("Trials finished", "trials", "neither", "of those started"),
    FigureName.SEARCH_IMAGES: _info("Images trained", "images", "neither", "over all trials"),
}

_SHARED: Final = (
    FigureName.E2E_TIME, FigureName.MFU, FigureName.ACHIEVED_TFLOPS, FigureName.PEAK_DEVICE_MEMORY,
    FigureName.PEAK_HOST_MEMORY, FigureName.DEVICE_UTILISATION, FigureName.CPU_UTILISATION, FigureName.MEAN_POWER,
    FigureName.ENERGY, FigureName.ENERGY_PER_UNIT, FigureName.UNITS_PER_JOULE, FigureName.TELEMETRY_CPU_TIME,
)  # fmt: skip
_NAMES: Final = tuple(FigureName)
_INFER, _SEARCH = _NAMES.index(FigureName.INFERENCE_CORE), _NAMES.index(FigureName.SEARCH_SCORE)
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
