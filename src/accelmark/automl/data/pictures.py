"""A set of labelled pictures that batches are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from accelmark.spec.errors import DataError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]


class Pictures(Protocol):
    """Labelled pictures of one shape."""

    def __len__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        ...

    @property
    def labels(self) -> Labels:
        """The class of every picture, from 0."""
        ...

    def batch(self, indices: Indices, generator: np.random.Generator | None) -> Images:
        """Return pictures, shape (batch, channels, height, width); with a generator, augmented for training."""
        ...

    def subset(self, indices: Indices) -> Pictures:
        """Return the pictures at ``indices`` as a set of their own."""
        ...


@dataclass(frozen=True)
class ArrayPictures:
    """Pictures that fit into memory; ``flip`` mirrors half of them while training."""

    images: Images
    labels: Labels
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        return (self.images.shape[1], self.images.shape[2], self.images.shape[3])

    def batch(self, indices: Indices, generator: np.random.Generator | None) -> Images:
        """Return pictures, mirrored at random when a generator is given and mirroring is on."""
        chosen = self.images[indices]
        if generator is not None and self.flip:
            mirrored = generator.random(len(indices)) < 0.5
            chosen[mirrored] = chosen[mirrored][..., ::-1]
        return chosen

    def subset(self, indices: Indices) -> ArrayPictures:
        """Return the pictures at ``indices`` as a set of their own."""
        return ArrayPictures(self.images[indices], self.labels[indices], self.flip)


@dataclass(frozen=True)
class FolderPictures:
    """JPEG files, one folder a class, decoded when they are asked for; ``side`` is the picture's side in pixels."""

    files: Sequence[Path]
    labels: Labels
    side: int
    threads: int = 8

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        return (3, self.side, self.side)

    def batch(self, indices: Indices, generator: np.random.Generator | None) -> Images:
        """Return pictures: a random crop, mirrored at random, for training; else the middle of the picture."""
        draws = None if generator is None else generator.random((len(indices), 4))
        with ThreadPoolExecutor(self.threads) as pool:
            decoded = pool.map(
                lambda place: self._decoded(int(indices[place]), None if draws is None else draws[place]),
                range(len(indices)),
            )
            return np.stack(list(decoded))

    def _decoded(self, index: int, draw: NDArray[np.float64] | None) -> Images:
        from PIL import Image

        try:
            with Image.open(self.files[index]) as opened:
                image = opened.convert("RGB")
        except OSError as error:
            raise DataError(f"{self.files[index]}: cannot be read as a picture: {error}") from error
        width, height = image.size
        share = 0.766 if draw is None else 0.08 + 0.92 * float(draw[0])  # area: a 224 crop of 256 is 0.766
        edge = max(1, min(width, height, round((share * width * height) ** 0.5)))
        place = (0.5, 0.5) if draw is None else (float(draw[1]), float(draw[2]))
        left, top = round((width - edge) * place[0]), round((height - edge) * place[1])
        image = image.resize((self.side, self.side), box=(left, top, left + edge, top + edge))
        array = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
        return array[..., ::-1] if draw is not None and draw[3] < 0.5 else array

    def subset(self, indices: Indices) -> FolderPictures:
        """Return the pictures at ``indices`` as a set of their own."""
        return FolderPictures([self.files[int(index)] for index in indices], self.labels[indices], self.side)
