"""JPEG files with the size, detail and folder layout of ImageNet."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

NUM_CLASSES: Final = 8
_DISTINCT: Final = 32
"""Images that are encoded; the files repeat them."""
_WIDTH, _HEIGHT = 500, 375


def make_images(directory: Path, images_per_class: int) -> Path:
    """Write ``train`` and ``val`` folders of eight classes, once, and return ``directory``."""
    import numpy as np
    from PIL import Image

    if (directory / "val").is_dir():
        return directory
    random = np.random.default_rng(0)
    encoded = []
    for _ in range(_DISTINCT):
        # Smooth structure with fine grain: about 100 KB a file at quality 90, like photographs.
        coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(smooth + random.normal(0, 10, smooth.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    for split, count in (("train", images_per_class), ("val", 4)):
        for label in range(NUM_CLASSES):
            folder = directory / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for index in range(count):
                (folder / f"{index}.JPEG").write_bytes(encoded[(label + index * NUM_CLASSES) % _DISTINCT])
    return directory
