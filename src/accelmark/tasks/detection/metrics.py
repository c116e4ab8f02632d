"""Scores of detection and segmentation from rows that were collected over batches and ranks."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float64]


def box_precision(boxes: Rows, detections: Rows) -> dict[str, float]:
    """Return COCO's average precision of boxes, ``map`` (IoU of 0.50 to 0.95) and ``map50``, by pycocotools.

    Args:
        boxes: image, left, top, width, height, class, and 1 for a crowd, in each row.
        detections: image, left, top, width, height, score, class.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth: Any = COCO()
    images = sorted({int(number) for number in [*boxes[:, 0], *detections[:, 0]]})
    truth.dataset = {
        "images": [{"id": number} for number in images],
        "categories": [{"id": number} for number in sorted(set(boxes[:, 5].astype(int).tolist()))],
        "annotations": [
            {
                "id": number,
                "image_id": int(row[0]),
                "bbox": row[1:5].tolist(),
                "area": float(row[3] * row[4]),
                "category_id": int(row[5]),
                "iscrowd": int(row[6]),
            }
            for number, row in enumerate(boxes, 1)
        ],
        "info": {},
    }
    with redirect_stdout(StringIO()):  # which pycocotools fills with its progress
        truth.createIndex()
        evaluation: Any = COCOeval(truth, truth.loadRes(detections), "bbox") if len(detections) else None
        if evaluation is None:
            return {"map": 0.0, "map50": 0.0}
        evaluation.params.maxDets = [100]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"]
    return {"map": _mean(precision), "map50": _mean(precision[0])}


def _mean(precision: Rows) -> float:
    """Return the mean over the classes that have boxes; the others have -1."""
    counted = precision[precision > -1]
    return float(counted.mean()) if counted.size else 0.0


def mean_overlap(segments: Rows) -> dict[str, float]:
    """Return ``miou``, the mean over the classes of summed intersections over summed unions, and pixel accuracy.

    Args:
        segments: class, pixels of the class that were found, and pixels of that class, found ones, in each row.
    """
    classes = segments[:, 0].astype(np.int64)
    sums = np.stack([np.bincount(classes, column) for column in segments[:, 1:].T])
    shared, truth, predicted = sums
    union = truth + predicted - shared
    present = union > 0
    return {
        "miou": float((shared[present] / union[present]).mean()),
        "pixel_accuracy": float(shared.sum() / truth.sum()),
    }
