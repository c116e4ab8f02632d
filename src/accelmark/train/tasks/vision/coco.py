"""Images with boxes in the layout of COCO: ``<split>/*.jpg`` and ``annotations/instances_<split>.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError
from accelmark.train.tasks.labelled_images import opened_image
from accelmark.train.tasks.vision.scenes import Scene

_OUTSIDE_PX: Final = 5.0
"""Boxes of COCO reach over the edge by fractions of a pixel, which is cut off; more than this is an error."""


@final
class BoxedImages:
    """The images of a split with their boxes.

    Training leaves out crowds, boxes without area and images without boxes; evaluation has all of them. A box's label
    is its category's id, or where there are ``num_classes`` categories, the position of its id among them.

    Raises:
        DataError: the annotations cannot be read, have no image for a box or no such class, or a box lies outside of
            its image; the message names file and annotation.
    """

    def __init__(self, directory: Path, split: str, *, num_classes: int, train: bool) -> None:
        self._folder = directory / split
        self._file = directory / "annotations" / f"instances_{split}.json"
        content = self._read()
        try:
            images = {image["id"]: image for image in content["images"]}
            sizes = {each: (image["width"], image["height"]) for each, image in images.items()}
            labels = self._labels([each["id"] for each in content["categories"]], num_classes)
            found: dict[int, list[tuple[float, ...]]] = {each: [] for each in images}
            for annotation in content["annotations"]:
                row = self._row(annotation, images, labels)
                if not train or (not row[5] and row[2] > row[0] and row[3] > row[1]):
                    found[annotation["image_id"]].append(row)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self._file}: is not in COCO's format: {type(error).__name__}: {error}") from error
        kept = [number for number in sorted(images) if found[number] or not train]
        self._images = [(str(images[each]["file_name"]), sizes[each]) for each in kept]
        self._boxes = [np.array(found[each], np.float64).reshape(-1, 6) for each in kept]

    def __len__(self) -> int:
        return len(self._images)

    def scene(self, index: int) -> Scene:
        """Return image ``index`` with its boxes; raises DataError where it cannot be read."""
        path = self.path(index)
        with opened_image(path) as file:
            image = file.convert("RGB")
        if image.size != (stated := self._images[index][1]):
            found, expected = (f"{width} x {height}" for width, height in (image.size, stated))
            raise DataError(f"{path}: has {found} pixels, {self._file} states {expected}: was it resized?")
        rows = self._boxes[index]
        limits = np.array([*image.size, *image.size])
        return Scene(image, np.clip(rows[:, :4], 0, limits), rows[:, 4].astype(np.int64), rows[:, 5].astype(np.int64))

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self._folder / self._images[index][0]

    def _read(self) -> Mapping[str, Any]:
        try:
            content: Mapping[str, Any] = json.loads(self._file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{self._file}: is not a readable JSON file: {error}") from error
        return content

    def _labels(self, ids: Sequence[int], num_classes: int) -> Mapping[int, int]:
        if len(ids) == num_classes:
            return {each: label for label, each in enumerate(sorted(ids))}
        if not ids or min(ids) < 0 or max(ids) >= num_classes:
            raise DataError(
                f"{self._file}: has {len(ids)} categories with ids up to {max(ids, default=0)}; expected {num_classes} "
                f"categories, or ids below {num_classes}"
            )
        return {each: each for each in ids}

    def _row(
        self, annotation: Mapping[str, Any], images: Mapping[int, Any], labels: Mapping[int, int]
    ) -> tuple[float, ...]:
        """Return left, top, right, bottom, label and whether it is a crowd."""
        where = f"{self._file}: annotation {annotation['id']}"
        image = images.get(annotation["image_id"])
        if image is None:
            raise DataError(f"{where}: there is no image {annotation['image_id']}")
        if annotation["category_id"] not in labels:
            raise DataError(f"{where}: there is no category {annotation['category_id']}")
        left, top, width, height = map(float, annotation["bbox"])
        right, bottom = left + width, top + height
        beyond = (-left, -top, right - image["width"], bottom - image["height"], -width, -height)
        if not all(each <= _OUTSIDE_PX for each in beyond):  # which not a number is not
            size = f"{image['width']} x {image['height']}"
            raise DataError(
                f"{where}: the box {annotation['bbox']} is not inside {image['file_name']} of {size} pixels"
            )
        return left, top, right, bottom, labels[annotation["category_id"]], bool(annotation.get("iscrowd", 0))


def centred(boxes: npt.NDArray[np.float64], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return boxes of corners in pixels as centre, width and height in parts of an image of ``size``."""
    low, high = boxes[:, :2] / size, boxes[:, 2:] / size
    return np.concatenate([(low + high) / 2, high - low], 1).astype(np.float32)
