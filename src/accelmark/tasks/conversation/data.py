"""Conversations about images in LLaVA's layout: a JSON list of samples, and folders of images."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
from PIL import Image

from accelmark.datasets.shards import bytes_at
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, raising
from accelmark.tasks.images.data import opened_image

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

    def text(self, index: int) -> tuple[str, list[Span]]:
        """Return the text of a sample with ``PLACEHOLDER`` where its image is, and where the answers are."""
        ...

    def image(self, index: int, side: int) -> npt.NDArray[np.uint8] | None:
        """Return the image of shape (3, side, side); None where the sample has none."""
        ...


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

    Raises DataError: there is not exactly one file, or it is not a JSON list.
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

    def _sample(self, index: int) -> Any:
        begin, end = self._places[index].tolist()
        unreadable = raising(DataError, f"{self.where(index)}: cannot be read", OSError, ValueError)
        with unreadable, self._file.open("rb") as file:
            return json.loads(bytes_at(file, begin, end - begin))

    def where(self, index: int) -> str:
        """Return file and position of a sample."""
        return f"{self._file}: sample {index}"

    def text(self, index: int) -> tuple[str, list[Span]]:
        """Return the text of a sample in Vicuna's format, and where the answers are.

        Raises DataError: it has no questions with answers, or no place for its image; names file and sample.
        """
        sample = self._sample(index)
        with raising(DataError, f"{self.where(index)}: is not a conversation", KeyError, TypeError):
            turns = [(str(turn["from"]), str(turn["value"])) for turn in sample["conversations"]]
            has_image = "image" in sample
        roles = tuple(role for role, _ in turns)
        if not turns or roles != _ROLES * (len(turns) // 2):
            raise DataError(
                f"{self.where(index)}: expected 'human' and 'gpt' in turn, found {', '.join(roles) or 'none'}"
            )
        if (count := sum(value.count(PLACEHOLDER) for _, value in turns)) != has_image:
            raise DataError(f"{self.where(index)}: has {count} times {PLACEHOLDER} and {int(has_image)} images")
        text, answers = _SYSTEM, []
        for (_, question), (_, answer) in zip_strict(turns[::2], turns[1::2]):
            if PLACEHOLDER in question:
                question = f"{PLACEHOLDER}\n{question.replace(PLACEHOLDER, '').strip()}"
            text += f"USER: {question} ASSISTANT: "
            answers.append((len(text), len(text) + len(answer) + len(END)))
            text += answer + END
        return text, answers

    def image(self, index: int, side: int) -> npt.NDArray[np.uint8] | None:
        """Return the image of shape (3, side, side), filled up to a square; None where the sample has none.

        Raises DataError: the image cannot be read; names it.
        """
        name = self._sample(index).get("image")
        if name is None:
            return None
        with opened_image(self._images / str(name)) as file:
            image = file.convert("RGB")
        width, height = image.size
        longer = max(image.size)
        square = Image.new("RGB", (longer, longer), tuple(int(mean * 255) for mean in MEAN))
        square.paste(image, ((longer - width) // 2, (longer - height) // 2))
        return np.array(square.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()
