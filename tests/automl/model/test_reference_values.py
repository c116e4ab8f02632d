"""AIPerf's published counts, to the last operation."""

from __future__ import annotations

import pytest

from accelmark.automl.model.counting import count
from accelmark.automl.model.seeds import resnet50
from accelmark.automl.records import EpochReport, OperationCost

REFERENCE_PARTS = {
    "convolution": 7_711_850_496,
    "batch_norm": 74_109_952,
    "relu": 9_081_856,
    "add": 5_519_360,
    "max_pool": 1_806_336,
    "global_pool": 106_496,
    "dense": 4_096_000,
    "softmax": 12_999,
}


def processed(*, trained: int, evaluated: int, steps: int) -> EpochReport:
    nothing = dict.fromkeys(("begun_s", "ended_s", "training_s", "evaluating_s"), 0.0)
    unknown = dict.fromkeys(("train_loss", "validation_loss", "validation_accuracy"))
    counts = {"trained_images": trained, "evaluated_images": evaluated, "steps": steps}
    return EpochReport.model_validate(nothing | unknown | counts | {"epoch": 1, "complete": True})


def test_resnet50_counts_as_aiperf_counts_it() -> None:
    counted = count(resnet50(), "aiperf-v1")
    assert counted.forward == 7_806_583_495
    assert counted.backward == 15_246_874_820


@pytest.mark.parametrize(("kind", "operations"), sorted(REFERENCE_PARTS.items()))
def test_every_part_of_resnet50_matches_the_reference_table(kind: str, operations: int) -> None:
    layers = count(resnet50(), "aiperf-v1").layers
    assert sum(layer.forward for layer in layers if layer.kind == kind) == operations


def test_a_run_is_counted_from_the_images_really_processed() -> None:
    counted = count(resnet50(), "aiperf-v1")
    expected = (7_806_583_495 + 15_246_874_820) * 100 + 7_806_583_495 * 10
    assert OperationCost.of(counted).operations(processed(trained=100, evaluated=10, steps=7)) == expected


def test_accelmark_counts_the_update_once_a_step_and_not_once_an_image() -> None:
    counted = count(resnet50(), "accelmark")
    assert counted.update == 4 * 25_557_032
    assert OperationCost.of(counted).operations(processed(trained=0, evaluated=0, steps=3)) == 3 * counted.update


def test_accelmark_agrees_on_matrix_work_and_counts_batch_norm_backward_in_full() -> None:
    ours, theirs = count(resnet50(), "accelmark"), count(resnet50(), "aiperf-v1")
    assert ours.matrix_forward == theirs.matrix_forward
    assert ours.matrix_backward == theirs.matrix_backward
    norm = sum(layer.backward for layer in ours.layers if layer.kind == "batch_norm")
    assert norm == 9 * 74_109_952 // 7
    assert theirs.backward - theirs.update_in_backward < ours.backward
