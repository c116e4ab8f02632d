"""The figures AccelMark measures: names, units, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, final


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
        "Model TFLOP/s per device", "TFLOP/s", "higher", "training throughput x FLOPs of the model"
    ),
    FigureName.FLOPS_PER_SAMPLE: _info("Model FLOPs per sample", "FLOP", "neither", "forward and backward, counted"),
    FigureName.PEAK_DEVICE_MEMORY: _info("Peak device memory", "MiB", "lower", "largest allocation on any device"),
    FigureName.PEAK_HOST_MEMORY: _info("Peak host memory", "MiB", "lower", "largest use seen by telemetry on any host"),
    FigureName.DEVICE_UTILISATION: _info("Device utilisation", "ratio", "higher", "time-weighted mean while training"),
    FigureName.CPU_UTILISATION: _info("CPU utilisation", "ratio", "neither", "time-weighted mean while training"),
    FigureName.MEAN_POWER: _info("Mean power", "W", "lower", "all devices (or CPU packages) while training"),
    FigureName.ENERGY: _info("Energy", "J", "lower", "trapezoids over power while training, ends interpolated"),
    FigureName.ENERGY_PER_UNIT: _info("Energy per {unit}", "J", "lower", "energy over the units trained"),
    FigureName.UNITS_PER_JOULE: _info("Performance per watt", "{unit}s/J", "higher", "units per joule"),
    FigureName.TELEMETRY_CPU_TIME: _info("CPU time of telemetry", "s", "lower", "user and system time of the sampler"),
}
