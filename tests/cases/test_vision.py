"""Boxes and segments: reading, augmentation, scores, and learning rates of backbones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelmark.frameworks.pytorch.batches import collated
from accelmark.tasks.detection.pytorch import BoxedImages, Scene, distorted, multi_scale
from accelmark.tasks.metrics import box_precision, mean_overlap
from accelmark.tasks.segmentation.pytorch import SegmentedImages, random_part
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of


def edited(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_training_leaves_out_what_cannot_be_learnt_and_evaluation_does_not(tmp_path: Path) -> None:
    directory = tiny_data.coco(tmp_path)["coco"]
    file = directory / "annotations" / "instances_train2017.json"
    edited(file, lambda all_: all_["annotations"][0].update(iscrowd=1))
    assert [len(BoxedImages(directory, "train2017", num_classes=4, train=train)) for train in (True, False)] == [15, 16]
    scene = BoxedImages(directory, "train2017", num_classes=4, train=False).scene(0)
    assert (scene.crowd.tolist(), scene.labels[0] in (1, 3)) == ([1], True), "with 4 classes labels are the ids"


@pytest.mark.parametrize(
    "change",
    [lambda *given: multi_scale(given[0], 96, 160, given[1]), lambda *given: distorted(given[0], 128, given[1])],
)
def test_boxes_stay_around_their_objects(tmp_path: Path, change: Callable[..., Scene]) -> None:
    """The bright pixels of a changed image are those in the changed boxes."""
    images = BoxedImages(tiny_data.coco(tmp_path)["coco"], "train2017", num_classes=2, train=True)
    random = np.random.default_rng(0)
    compared = 0
    for _ in range(60):
        scene = images.scene(int(random.integers(len(images)) // 2 * 2))  # those with one box
        changed = change(scene, random.random)
        bright = np.array(changed.image).max(2) > 130
        if not len(changed.boxes):
            continue
        rows, columns = np.nonzero(bright)
        found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert np.abs(found - changed.boxes[0]).max() <= 6, (found, changed.boxes)
        compared += 1
    assert compared > 20


def test_segments_are_cut_with_their_image(tmp_path: Path) -> None:
    images = SegmentedImages(tiny_data.ade20k(tmp_path)["ade20k"], "training", num_classes=2)
    random = np.random.default_rng(0)
    for index in range(8):
        image, segments = random_part(*images.pair(index), random.random, 64)
        assert image.size == (64, 64) == segments.shape
        difference = np.array(image).astype(int)[..., 1] - np.array(image)[..., 2]
        clear = np.abs(difference) > 60
        agreeing = (difference > 0) == (segments == 1)
        assert agreeing[clear & (segments > 0)].mean() > 0.9


def test_samples_of_different_sizes_are_filled_up_with_zeros() -> None:
    boxes = torch.ones(2, 4), torch.ones(3, 4), torch.zeros(0, 4)
    batch = collated([{"box": box} for box in boxes], 3)
    assert batch["box"].sum((1, 2)).tolist() == [8, 12, 0]
    assert batch["box"].shape == (3, 3, 4)


def test_box_precision_is_one_for_exact_boxes_and_ignores_crowds() -> None:
    pytest.importorskip("pycocotools")
    boxes = np.array([[7, 10, 10, 20, 20, 3, 0], [7, 0, 0, 99, 99, 3, 1], [8, 5, 5, 30, 10, 1, 0]], float)
    exact = np.array([[7, 10, 10, 20, 20, 0.9, 3], [7, 40, 40, 20, 20, 0.8, 3], [8, 5, 5, 30, 10, 0.1, 1]], float)
    assert box_precision(boxes, exact) == {"map": pytest.approx(1.0), "map50": pytest.approx(1.0)}
    moved = exact + np.array([0, 5, 0, 0, 0, 0, 0])  # overlaps of 0.6, in the crowd, 0.714
    assert box_precision(boxes, moved)["map"] == pytest.approx((0.3 + 0.5) / 2)
    assert box_precision(boxes, exact[:0])["map"] == 0


def test_mean_overlap_is_that_of_the_classes_which_occur() -> None:
    rows = np.array([[0, 3, 4, 3], [1, 5, 6, 7], [2, 0, 0, 0], [0, 1, 1, 3]], float)
    assert mean_overlap(rows) == {"miou": pytest.approx((4 / 7 + 5 / 8) / 2), "pixel_accuracy": 9 / 11}


def test_detr_trains_as_many_weights_as_its_authors() -> None:
    with torch.device("meta"):
        model = case_of("detr", {}).build_model()
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == 41_302_368, "their n_parameters"


def test_a_tenth_of_the_rate_is_that_of_the_backbone_alone() -> None:
    """Mask2Former's decoder of pixels has an encoder too, which its authors train at the full rate."""
    for name in ("mask2former", "detr", "rt_detr"):
        case: Any = case_of(name, SMALL[name])
        model: Any = case.build_model()
        optimizer = case.build_optimizer(model)
        low = min(group["lr"] for group in optimizer.param_groups)
        slow = {each for group in optimizer.param_groups if group["lr"] == low for each in group["params"]}
        assert low == pytest.approx(case.settings.optimizer.lr / 10)
        assert slow == {each for each in case.backbone(model.net).parameters() if each.requires_grad}, name


def test_training_batches_of_rt_detr_have_eleven_sizes() -> None:
    case: Any = case_of("rt_detr", {**SMALL["rt_detr"], "model.image_size": 640})
    image = torch.randint(0, 256, (1, 3, 640, 640), dtype=torch.uint8)
    batch = {"image": image, "mask": torch.ones(1, 640, 640, dtype=torch.uint8), "label": torch.zeros(1)}
    random = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(80):
        scaled = case.augment(batch, random)
        side = scaled["image"].shape[2]
        assert scaled["image"].shape == (1, 3, side, side)
        assert scaled["mask"].shape == (1, side, side)
        assert scaled["mask"].all()
        assert scaled["label"] is batch["label"]
        sizes.add(side)
    assert sizes == set(range(480, 801, 32))
    case = case_of("detr", SMALL["detr"])
    assert case.augment(batch, random) is batch


def test_detections_are_the_best_pairs_of_query_and_class_where_classes_are_independent() -> None:
    logits = torch.tensor([[[3.0, 2.5, -9.0], [-9.0, -9.0, 1.0]]])
    case: Any = case_of("rt_detr", SMALL["rt_detr"])
    score, label, query = case.scored(logits)
    assert (label.tolist(), query.tolist()) == ([[0, 1]], [[0, 0]])
    assert score[0].tolist() == pytest.approx([0.9526, 0.9241], abs=1e-4)
    case = case_of("detr", SMALL["detr"])
    _, label, query = case.scored(logits)
    assert (label.tolist(), query.tolist()) == ([[0, 0]], [[0, 1]]), "a class each, and the last logit is for none"
