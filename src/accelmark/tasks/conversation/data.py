"""Conversations about images in LLaVA's layout: a JSON list of samples, and folders of images."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt
from PIL import Image

from accelmark.datasets.folders import opened_image
from accelmark.datasets.shards import bytes_at
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, raising

PLACEHOLDER: Final = "<image>"
"""Where the image is in a sample's text."""
END: Final = "</s>"
"""End of an answer."""
MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
"""Mean of each channel for values from 0 to 1, as published with CLIP; images are made square with this colour."""
STD: Final = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of each channel, from the same source."""
_SYSTEM: Final = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
_ROLES: Final = ("human", "gpt")
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""


class ImageTexts(Protocol):
    """Texts about an image each, parts of which are answers."""

    def __len__(self) -> int: ...

    def read(self, index: int, side: int) -> tuple[str, list[Span], npt.NDArray[np.uint8] | None]:
        """Return the text of a sample with ``PLACEHOLDER`` where its image is, where the answers are, and the image.

        The image has the shape (3, side, side), and is None where the sample has none.
        """


_CHUNK: Final = 1 << 24
_FIRST, _NEXT, _LAST = (re.compile(rf"[ \t\r\n]*{sign}[ \t\r\n]*") for sign in (r"\[", ",", r"\]"))
"""What is before the first element of a list, before another one, and after the last."""


def element_places(path: Path) -> npt.NDArray[np.int64]:
    """Return first byte and end of each element of a JSON list, which is read in parts and not kept.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no list of JSON objects, or an empty one.
    """
    decoder, places, before = json.JSONDecoder(), array("q"), _FIRST
    text, first, done = "", 0, 0
    with path.open(encoding="latin-1", newline="") as file:  # which has one character for each byte
        while chunk := file.read(_CHUNK):
            text, first, done = text[done:] + chunk, first + done, 0
            while (found := before.match(text, done)) is not None:
                try:
                    _, end = decoder.raw_decode(text, found.end())
                except json.JSONDecodeError:  # it is continued in the next part
                    break
                places.extend((first + found.end(), first + end))
                done, before = end, _NEXT
    if not places or not _LAST.fullmatch(text, done):
        raise ValueError(f"is not a list of samples, or is cut off or damaged after {len(places) // 2:,} of them")
    return np.frombuffer(places, np.int64).reshape(-1, 2)


@final
class Conversations:
    """The samples of the JSON file in ``conversations``; ``image`` is a path in ``images``, absent where there is none.

    A sample is read from the file when it is needed: all of them as objects would take gigabytes in each process.
    """

    def __init__(self, directory: Path) -> None:
        files = sorted((directory / "conversations").glob("*.json"))
        if len(files) != 1:
            raise DataError(f"{directory / 'conversations'}: expected one JSON file, found {len(files)}")
        self._images, self._file = directory / "images", files[0]
        with raising(DataError, str(self._file), OSError, ValueError):
            self._places = element_places(self._file)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, side: int) -> tuple[str, list[Span], npt.NDArray[np.uint8] | None]:
        """Return the text of a sample in Vicuna's format, where the answers are, and its image, if it has one.

        The image is filled up to a square. Raises DataError: it cannot be read, the sample has no questions with
        answers, or no place for its image.
        """
        where = f"{self._file}: sample {index}"
        begin, end = self._places[index].tolist()
        unreadable = raising(DataError, f"{where}: is not a conversation", OSError, ValueError, KeyError, TypeError)
        with unreadable, self._file.open("rb") as file:
            sample = json.loads(bytes_at(file, begin, end - begin))
            turns = [(str(turn["from"]), str(turn["value"])) for turn in sample["conversations"]]
            name = sample.get("image")
        roles = tuple(role for role, _ in turns)
        if not turns or roles != _ROLES * (len(turns) // 2):
            raise DataError(f"{where}: expected 'human' and 'gpt' in turn, found {', '.join(roles) or 'none'}")
        if (count := sum(value.count(PLACEHOLDER) for _, value in turns)) != (name is not None):
            raise DataError(f"{where}: has {count} times {PLACEHOLDER} and the image {name}")
        text, answers = _SYSTEM, []
        for (_, question), (_, answer) in zip_strict(turns[::2], turns[1::2]):
            if PLACEHOLDER in question:
                question = f"{PLACEHOLDER}\n{question.replace(PLACEHOLDER, '').strip()}"
            text += f"USER: {question} ASSISTANT: "
            answers.append((len(text), len(text) + len(answer) + len(END)))
            text += answer + END
        return text, answers, None if name is None else _squared(self._images / str(name), side)


def _squared(path: Path, side: int) -> npt.NDArray[np.uint8]:
    with opened_image(path) as file:
        image = file.convert("RGB")
    width, height = image.size
    longer = max(image.size)
    square = Image.new("RGB", (longer, longer), tuple(int(mean * 255) for mean in MEAN))
    square.paste(image, ((longer - width) // 2, (longer - height) // 2))
    return np.array(square.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()
