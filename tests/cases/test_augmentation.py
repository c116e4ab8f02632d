"""Augmentation of photographs: depends on its generator alone, and labels follow what is in the image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.tasks.images.pytorch import OPERATIONS, erase, mixed, rand_augment

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_operation_keeps_size_and_mode(name: str, sign: float) -> None:
    for size in (0.0, 0.9, 1.0):
        changed = OPERATIONS[name](PICTURE, size, sign)
        assert (changed.size, changed.mode) == (PICTURE.size, "RGB")


def test_rand_augment_depends_on_its_generator_alone() -> None:
    found = [np.asarray(rand_augment(PICTURE, 9, generator_for(seed))).tobytes() for seed in (1, 1, 2, 3, 4, 5)]
    assert found[0] == found[1]
    assert len(set(found)) > 2
    assert PICTURE.tobytes() in {np.asarray(rand_augment(PICTURE, 9, generator_for(s))).tobytes() for s in range(40)}


def test_a_share_of_the_images_has_an_erased_rectangle() -> None:
    black = torch.zeros(3, 40, 40, dtype=torch.uint8)
    areas = [float((erase(black, 0.25, generator_for(seed)) > 0).any(0).float().mean()) for seed in range(400)]
    changed = [area for area in areas if area]
    assert 60 < len(changed) < 140
    assert all(0.01 < area < 0.36 for area in changed)
    assert not black.any(), "the image itself is not changed"


def test_shares_are_the_parts_of_the_mixed_images() -> None:
    image = torch.stack([torch.zeros(3, 32, 32), torch.full((3, 32, 32), 200.0)]).to(torch.uint8)
    kinds = set()
    for seed in range(60):
        found = mixed({"image": image, "label": torch.tensor([0, 1])}, 0.8, 1.0, generator_for(seed))
        assert found["label"].tolist() == [0, 1]
        assert found["other_label"].tolist() == [1, 0]
        share = float(found["share"][0])
        assert float(found["image"][1].float().mean()) == pytest.approx(200 * share, abs=0.6)
        assert float(found["image"][0].float().mean()) == pytest.approx(200 * (1 - share), abs=0.6)
        pixels = found["image"][1]
        kinds.add(int(pixels.max()) > int(pixels.min()))
    assert kinds == {True, False}, "some are cut, some are mixed"
