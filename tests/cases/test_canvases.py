"""The small detection and segmentation cases: exact boxes and pixels, places of objects, and that they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from accelmark.cases.detection_mini._canvases import BACKGROUND, Canvases
from accelmark.cases.detection_mini.pytorch import point_loss
from accelmark.cases.segmentation_mini.pytorch import mirrored
from accelmark.spec.log.events import Event
from accelmark.tasks.detection.data import overlaps
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_definitions import case_of
from tests.cases.test_mini import write_idx


def items() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Rectangles of two shapes and levels of brightness: class 0 is wide and dark, class 1 is high and bright."""
    images = np.zeros((20, 1, 28, 28), np.uint8)
    images[::2, 0, 9:19, 2:26], images[1::2, 0, 2:26, 9:19] = 110, 250
    return images, np.arange(20) % 2


def test_boxes_surround_their_items_exactly() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    counts = []
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        pixels = np.asarray(scene.image)[..., 0] >= 16
        inside = np.zeros_like(pixels)
        for box, label in zip(scene.boxes.astype(int), scene.labels, strict=True):
            left, top, right, bottom = box
            part = pixels[top:bottom, left:right]
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()  # noqa: PT018
            assert ((right - left) > (bottom - top)) == (label == 0)
            inside[top:bottom, left:right] = True
        assert not (pixels & ~inside).any(), "nothing is outside of the boxes"
        for number, box in enumerate(scene.boxes):
            assert overlaps(scene.boxes[:number], box).max(initial=0) <= 0.05
        counts.append(len(scene.boxes))
    assert set(counts) == {1, 2, 3, 4}
    again = canvases.scene(7)
    assert (np.asarray(again.image) == np.asarray(canvases.scene(7).image)).all()
    assert not (np.asarray(again.image) == np.asarray(canvases.scene(8).image)).all()


def test_each_pixel_has_the_class_of_its_item() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        image, segments = canvases.pair(index)
        pixels = np.asarray(image)[..., 0]
        assert (np.asarray(scene.image)[..., 0] == pixels).all()
        assert ((pixels < 16) == (segments == BACKGROUND)).all()
        assert (segments[pixels > 110] == 2).all(), "only the second class is brighter"
        for label in (0, 1):
            inside = np.zeros_like(pixels, bool)
            for left, top, right, bottom in scene.boxes[scene.labels == label].astype(int):
                inside[top:bottom, left:right] = True
            assert not (inside < (segments == label + 1)).any(), "pixels of a class are in its boxes"
        assert set(np.unique(segments)) == {*(scene.labels + 1), BACKGROUND}


def test_half_of_the_canvases_are_mirrored_with_their_classes() -> None:
    image, segments = Canvases(*items(), 1, side=80, most=4).pair(0)
    same, mirror = mirrored(image, segments, lambda: 0.4), mirrored(image, segments, lambda: 0.6)
    assert (np.asarray(same[0]) == np.asarray(image)).all()
    assert (same[1] == segments).all()
    assert (np.asarray(mirror[0]) == np.asarray(image)[:, ::-1]).all()
    assert (mirror[1] == segments[:, ::-1]).all()


def test_a_peak_is_one_detection_of_its_class() -> None:
    case = case_of("detection_mini", {"model.hidden_size": 8})
    logits = torch.full((1, 20 * 20, 10), -9.0)
    logits[0, 5 * 20 + 7, 3], logits[0, 5 * 20 + 8, 3], logits[0, 5 * 20 + 8, 4] = 2.0, 1.0, 0.0
    score, label, place = case.scored(logits)  # type: ignore[attr-defined]
    assert list(zip(label[0, :2].tolist(), place[0, :2].tolist(), strict=True)) == [(3, 107), (4, 108)]
    assert score[0, :2].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert float(score[0, 2]) < 0.001, "the lower logit next to the peak of its class is left out"


def test_the_loss_is_that_of_the_centres_and_of_the_boxes() -> None:
    labels = [
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.30, 0.60, 0.2, 0.4]])},
        {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
    ]
    size, boxes = torch.Size((10, 10)), torch.full((2, 100, 4), 0.5)
    boxes[0, 63] = labels[0]["boxes"][0]
    logits = torch.full((2, 100, 2), -20.0)
    logits[0, 63, 1] = 20.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0, abs=1e-4)
    boxes[0, 63, 2] = 0.1
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5, abs=1e-4)
    near, far = logits.clone(), logits.clone()
    near[0, 73, 1], far[0, 9, 1] = 4.0, 4.0
    losses = [float(point_loss(each, boxes, labels, size)) for each in (near, far)]
    assert 0.5 < losses[0] < losses[1] - 1, losses
    assert losses[1] == pytest.approx(0.5 + 0.982**2 * 4.018, rel=1e-3)
    logits[0, 63, 1] = 0.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5 + 0.25 * math.log(2), abs=1e-4)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    images, labels = items()
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images[:, 0], packed=False)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", labels.astype(np.uint8), packed=False)
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "library", "metric", "least"),
    [("detection_mini", "pycocotools", "map50", 0.3), ("segmentation_mini", "transformers", "miou", 0.7)],
)
def test_the_case_learns(tmp_path: Path, fashion: Path, name: str, library: str, metric: str, least: float) -> None:
    pytest.importorskip(library)
    over: dict[str, Any] = {"model.hidden_size": 16, "model.train_images": 1600, "model.eval_images": 50, "threads": 1}
    events = run(job_of(name, tmp_path / "run", {"fashion_mnist": fashion}, over))
    finished, losses = value_of(events, Event.FINISHED), losses_of(events)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert finished["final_metrics"][metric] > least
