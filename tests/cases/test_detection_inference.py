"""Inference of DETR, whose metric needs the detections of all images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelmark.infer.case import InferBatch, InferCase
from accelmark.infer.measure import Score
from tests.cases import tiny_data
from tests.cases.infer_of import built, infer

DETR = {"image_size": 64, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 8}
SMALL = DETR | {f"stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)}


def _answers(batch: InferBatch, *, shift: float = 0.0) -> list[Tensor]:
    """Return the outputs of a detector that finds the annotated boxes, moved by a part of the image's sides."""
    assert batch.labels is not None
    logits, boxes = torch.zeros(batch.num_items, 8, 92), torch.zeros(batch.num_items, 8, 4)
    logits[..., -1] = 20.0
    for item, labels in enumerate(batch.labels):
        for query, row in enumerate(labels[1 : 1 + int(labels[0, 2])]):
            logits[item, query, int(row[4])] = 40.0
            boxes[item, query] = row[:4] + torch.tensor([shift, 0, 0, 0])
    return [logits, boxes]


def _scored(case: InferCase, passes: int, **over: Any) -> Score:
    score = Score(case)
    for batch in [batch for _ in range(passes) for batch in case.build_dataloader()]:
        score.add(_answers(batch, **over), batch.labels)
    return score


def test_the_annotated_boxes_have_a_precision_of_one_in_any_number_of_passes(tmp_path: Path) -> None:
    case = built("detr", tmp_path, tiny_data.coco(tmp_path), SMALL, batch_size=2)
    case.trained = True
    assert _scored(case, 1).metrics() == {"map": 1.0, "map50": 1.0}
    moved = _scored(case, 1, shift=0.1).metrics()
    assert moved["map50"] == 1.0
    assert 0.2 < float(moved["map"] or 0) < 0.9
    thrice = _scored(case, 3, shift=0.1)
    assert {int(row[0]) for rows in thrice.rows["boxes"] for row in rows} == set(range(9)), "three images in each pass"
    assert thrice.metrics() == pytest.approx(moved, abs=0.03), "boxes at 101 recalls are interpolated"


def test_images_are_filled_up_and_their_labels_are_those_of_the_files(tmp_path: Path) -> None:
    case = built("detr", tmp_path, tiny_data.coco(tmp_path), SMALL, batch_size=3)
    (batch,) = case.build_dataloader()
    image, mask = batch.inputs
    assert image.shape == (3, 3, 64, 64)
    assert mask.sum((1, 2)).tolist() == [64 * 43, 43 * 64, 64 * 43]
    assert not image[0, :, 43:].any()
    assert batch.labels is not None
    assert batch.labels[:, 0, :3].tolist() == [[60, 40, 1], [40, 60, 2], [60, 40, 1]]
    assert batch.labels[0, 1, 2:4].tolist() == pytest.approx([20 / 60, 20 / 40])


@pytest.mark.timeout(900)
@pytest.mark.heavy
@pytest.mark.parametrize("compiler", ["onnxruntime", "openvino"])
def test_detr_detects_the_objects_of_coco_with_weights_from_a_directory(tmp_path: Path, compiler: str) -> None:
    torch.manual_seed(0)
    made: Any = built("detr", tmp_path, {}, SMALL).create_model()
    made.net.save_pretrained(tmp_path / "detr", safe_serialization=True)
    dirs = {**tiny_data.coco(tmp_path), "weights": tmp_path / "detr" / "model.safetensors"}
    over = {"compiler": compiler, "precision": "fp32", "batch_size": 2, "repeat": 3}
    ran = infer("detr", tmp_path, dirs, parameters=SMALL, **over)
    assert ran.finished.state == "completed", ran.finished.message
    assert (ran.detail("create", "items"), ran.detail("create", "trained")) == (3, True)
    assert ran.finished.val_average_acc is not None
    assert ran.finished.infer_average_acc == pytest.approx(ran.finished.val_average_acc, abs=0.05)
    assert ran.finished.valid, ran.finished.invalid_reasons
