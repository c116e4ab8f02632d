from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accelmark.datasets.images import ClassFolders
from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.spec.errors import DataError
from accelmark.tasks.images import data as image_data
from accelmark.tasks.images.pytorch_imagenet import OPERATIONS, ImageFolder, erase, mixed, rand_augment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, synset in enumerate(("n01440764", "n01443537")):
        (tmp_path / "val" / synset).mkdir(parents=True)
        pixels = np.zeros((60, 90, 3), np.uint8)
        pixels[..., label] = 200
        pixels[:, :10] = 255
        Image.fromarray(pixels).save(tmp_path / "val" / synset / "a.JPEG", quality=95)
    return tmp_path


def test_the_label_is_the_rank_of_the_folder(folder: Path) -> None:
    images = ImageFolder(folder, "val", num_classes=2, size=32, train=False)
    samples = [images.read(index, generator_for(0)) for index in range(len(images))]
    assert [int(sample["label"]) for sample in samples] == [0, 1]
    for label, sample in enumerate(samples):
        assert sample["image"].shape == (3, 32, 32)
        assert sample["image"].dtype == torch.uint8
        assert abs(float(sample["image"][label].float().mean()) - 200) < 5, "the centre crop leaves the white edge out"


def test_class_folders_of_millions_of_images_take_little_memory(tmp_path: Path) -> None:
    for label, synset in enumerate(("n01440764", "n01443537")):
        (tmp_path / synset).mkdir()
        for number in range(2000):
            (tmp_path / synset / f"{synset}_{number}.JPEG").write_bytes(b"%d" % label)
    (tmp_path / "n01440764" / "ü.JPEG").touch()
    tracemalloc.start()
    images = ClassFolders(tmp_path, 2)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert images.labels[[0, 2000, 2001]].tolist() == [0, 0, 1]
    assert size < 60 * len(images), "an object for each image would be copied by each worker, too"
    with pytest.raises(DataError, match=r"n01440764/ü\.JPEG: is not a readable image"), images.opened(2000):
        pass


def test_a_training_sample_depends_on_its_generator_alone(folder: Path) -> None:
    images = ImageFolder(folder, "val", num_classes=2, size=32, train=True)
    first = images.read(0, generator_for(1))["image"]
    assert torch.equal(images.read(0, generator_for(1))["image"], first)
    assert len({tuple(images.read(0, generator_for(s))["image"].flatten().tolist()) for s in range(6)}) > 3


def test_half_of_the_training_samples_are_flipped(folder: Path) -> None:
    images = ImageFolder(folder, "val", num_classes=2, size=32, train=True)
    left = right = 0
    for seed in range(200):
        green = images.read(0, generator_for(seed))["image"][1].float()
        left += bool(green[:, 0].mean() > 200)
        right += bool(green[:, -1].mean() > 200)
    assert left > 10
    assert right > 10
    assert 0.5 < left / right < 2


def test_a_small_grey_png_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "val/x").mkdir(parents=True)
    Image.fromarray(np.full((3, 1), 77, np.uint8)).save(tmp_path / "val/x/a.png")
    images = ImageFolder(tmp_path, "val", num_classes=1, size=8, train=True)
    assert images.read(0, generator_for(0))["image"].eq(77).all()


@pytest.mark.parametrize(("width", "scale"), [(100, 1), (150, 2), (600, 8)])
def test_a_draft_decodes_at_the_smallest_scale_that_covers_the_crop_and_hardly_changes_it(
    width: int, scale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train/x").mkdir(parents=True)
    across, down = np.meshgrid(np.linspace(0, 12, width), np.linspace(0, 12, width))
    pixels = np.stack([128 + 100 * np.sin(across), 128 + 100 * np.cos(down), across * 20], -1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "train/x/a.jpg", quality=95)
    whole = (0.0, 0.0, float(width), float(width))
    monkeypatch.setattr(image_data, "_random_box", lambda size, uniform: whole)
    decoded: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def observed(file: Image.Image, *given: Any, **options: Any) -> Image.Image:
        decoded.append(file.size)
        return resize(file, *given, **options)

    monkeypatch.setattr(Image.Image, "resize", observed)
    exact, drafted = (
        ImageFolder(tmp_path, "train", num_classes=1, size=64, train=True, draft=draft).read(0, generator_for(3))
        for draft in (False, True)
    )
    assert decoded == [(width, width), (-(-width // scale), -(-width // scale))]
    assert float((exact["image"].float() - drafted["image"].float()).abs().mean()) < 4
    assert torch.equal(exact["image"], drafted["image"]) is (scale == 1)


def test_evaluation_images_are_never_drafts(folder: Path) -> None:
    both = [
        ImageFolder(folder, "val", num_classes=2, size=8, train=False, draft=draft).read(0, generator_for(0))["image"]
        for draft in (False, True)
    ]
    assert torch.equal(*both)


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
