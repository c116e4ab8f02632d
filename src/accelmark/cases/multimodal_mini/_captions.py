"""Captions of canvases with items of Fashion-MNIST, and a tokenizer of their words."""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from accelmark.cases.detection_mini._canvases import Canvases
from accelmark.spec.backports import zip_strict
from accelmark.tasks.conversation.data import END, PLACEHOLDER, Span
from accelmark.tasks.detection.data import Scene

ITEMS: Final = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_UNKNOWN: Final = "<unk>"
_COUNTS: Final = ("one item", "two items", "three items", "four items")
_ROWS: Final = ("upper", "lower")
_COLUMNS: Final = ("left", "right")
_WORDS: Final = ("one", "two", "three", "four", "item", "items", ":", ",", *_ROWS, *_COLUMNS, *ITEMS)


def caption(scene: Scene) -> str:
    """Return number and items by quarters, such as ``two items: upper left bag, lower right coat``.

    An item is in the quarter of its box's centre; items of one quarter are in the order of their classes.
    """
    centres = (scene.boxes[:, :2] + scene.boxes[:, 2:]) / 2
    quarters = (centres >= np.array(scene.image.size) / 2).astype(int)
    objects = sorted((down, across, label) for (across, down), label in zip_strict(quarters, scene.labels))
    items = ", ".join(f"{_ROWS[down]} {_COLUMNS[across]} {ITEMS[label]}" for down, across, label in objects)
    return f"{_COUNTS[len(objects) - 1]}: {items}"


def words() -> Tokenizer:
    """Return a tokenizer with a token for each word and sign of captions."""
    tokens = [_UNKNOWN, END, *_WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w-]+|[:,]"), "removed", invert=True)
    tokenizer.add_special_tokens([END])
    return tokenizer


@final
class Captions:
    """Canvases with their captions; see :class:`accelmark.tasks.conversation.data.ImageTexts`."""

    def __init__(self, canvases: Canvases) -> None:
        self._canvases = canvases
        self._last: tuple[int, Scene] | None = None

    def __len__(self) -> int:
        return len(self._canvases)

    def text(self, index: int) -> tuple[str, list[Span]]:
        """Return the image's place and the caption; the whole caption is the answer."""
        text = PLACEHOLDER + caption(self._scene(index)) + END
        return text, [(len(PLACEHOLDER), len(text))]

    def image(self, index: int, side: int) -> npt.NDArray[np.uint8]:
        """Return the canvas, whose size is ``side``."""
        return np.array(self._scene(index).image).transpose(2, 0, 1).copy()

    def _scene(self, index: int) -> Scene:
        """Return a canvas; text and image of a sample are read one after the other, and it is composed once."""
        last = self._last
        if last is None or last[0] != index:
            last = self._last = index, self._canvases.scene(index)
        return last[1]
