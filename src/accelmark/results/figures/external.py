"""Figures of an external trainer: null where its log lacks the data to compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accelmark.results.figure_names import FigureName
from accelmark.results.schema import Figure
from accelmark.spec.plugins.trainer import TrainerSpec

_NEEDS_STEP_TIME: Final = (
    FigureName.PURE_COMPUTE_TIME, FigureName.THROUGHPUT_CORE, FigureName.STEP_P50, FigureName.STEP_P90,
    FigureName.STEP_P99,
)  # fmt: skip
_NEEDS_EVALUATION_TIME: Final = (
    FigureName.TRAIN_NO_EVAL_TIME, FigureName.THROUGHPUT_TRAIN, FigureName.THROUGHPUT_PER_DEVICE,
)  # fmt: skip
_NOT_IN_LOGS: Final = {
    FigureName.DATA_WAIT_SHARE: "waiting for data",
    FigureName.FLOPS_PER_SAMPLE: "the FLOPs of its model",
    FigureName.ACHIEVED_TFLOPS: "the FLOPs of its model",
    FigureName.MFU: "the FLOPs of its model",
    FigureName.MFU_MEASURED: "the FLOPs of its model",
    FigureName.PEAK_DEVICE_MEMORY: "its peak allocation",
}


def limited_to_log(figures: Mapping[FigureName, Figure], trainer: TrainerSpec) -> dict[FigureName, Figure]:
    """Return ``figures`` with null and the reason for each that cannot be computed from the trainer's log."""
    log, whose = trainer.log, f"the log of trainer {trainer.name}"
    missing = {name: f"{whose} does not give {what}" for name, what in _NOT_IN_LOGS.items()}
    if "step_time" not in log.step_groups():
        missing |= dict.fromkeys(_NEEDS_STEP_TIME, f"{whose} has no time of single steps")
    if "loss" not in log.step_groups():
        missing[FigureName.FINAL_LOSS] = f"{whose} has no loss"
    if log.evaluation is None:
        missing[FigureName.FINAL_METRIC] = f"{whose} has no evaluation"
    elif "duration" not in log.evaluation_groups():
        missing |= dict.fromkeys(_NEEDS_EVALUATION_TIME, f"{whose} does not give the time of an evaluation")
    return {name: Figure(value=None, reason=missing[name]) if name in missing else figures[name] for name in figures}
