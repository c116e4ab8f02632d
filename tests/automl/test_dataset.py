"""Data sets of every layout, valid and damaged."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accelmark.automl.config import DatasetConfig
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.model.seeds import resnet50, small
from accelmark.datasets.images import ClassFolders, LabeledFiles, imagenet_identity
from accelmark.datasets.shards import write_tar, write_tfrecord
from accelmark.spec.errors import DataError, RequestError
from tests.automl.images import CLASSES, SIDE, tiny_dataset, tiny_network


def write_fashion(directory: Path, *, packed: bool = False) -> None:
    generator = np.random.default_rng(1)
    for name, count in (("train", 50), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            raw = header + array.tobytes()
            suffix = ".gz" if packed else ""
            (directory / f"{name}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(raw) if packed else raw)


def opened(directory: Path) -> Dataset:
    return open_dataset(DatasetConfig(name="fashion-mnist", directory=directory), small())


@pytest.mark.parametrize("packed", [False, True])
def test_images_are_split_three_ways_without_overlap_and_limited(tmp_path: Path, packed: bool) -> None:
    write_fashion(tmp_path, packed=packed)
    data = opened(tmp_path)
    assert (len(data.training), len(data.validation), len(data.held_out)) == (45, 5, 20)
    everything = np.arange(45)
    seen = {data.training.batch(everything[[index]], None).tobytes() for index in everything}
    validated = {data.validation.batch(np.array([index]), None).tobytes() for index in range(5)}
    assert not seen & validated
    data = open_dataset(tiny_dataset(tmp_path).model_copy(update={"limit": 40}), tiny_network())
    assert (len(data.training), len(data.validation), len(data.held_out)) == (32, 8, 40)


def test_a_missing_or_damaged_split_is_reported(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"a split is missing.*t10k-labels"):
        opened(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not an IDX file"):
        opened(tmp_path)


def test_wrong_shapes_and_class_counts_are_reported(tmp_path: Path) -> None:
    config = tiny_dataset(tmp_path)
    with pytest.raises(DataError, match=r"network 'resnet50' takes \(3, 224, 224\)"):
        open_dataset(config, resnet50())
    with pytest.raises(DataError, match="has 7 classes"):
        open_dataset(config, small((1, SIDE, SIDE), 7))
    with pytest.raises(RequestError, match="give its location"):
        open_dataset(DatasetConfig(name="cifar-10"), small((3, 32, 32)))
    with pytest.raises(DataError, match="there is no"):
        open_dataset(DatasetConfig(name="cifar-10", directory=tmp_path / "none"), small((3, 32, 32)))


def test_cifar10s_binary_records_are_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        records = generator.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    data = open_dataset(DatasetConfig(name="cifar-10", directory=tmp_path), small((3, 32, 32)))
    assert (len(data.training), len(data.validation), len(data.held_out)) == (90, 10, 20)
    first = np.arange(90)
    mirrored = data.training.batch(first, np.random.default_rng(0))
    plain = data.training.batch(first, None)
    same = (mirrored == plain).all(axis=(1, 2, 3))
    assert 0 < same.sum() < 90
    assert (mirrored[~same] == plain[~same][..., ::-1]).all()
    (tmp_path / "test_batch.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="not a whole number"):
        open_dataset(DatasetConfig(name="cifar-10", directory=tmp_path), small((3, 32, 32)))


def write_folders(root: Path) -> dict[str, list[tuple[Path, int]]]:
    """Write images as ImageNet's folders have them; return the files of each split with their labels."""
    image = pytest.importorskip("PIL.Image")
    written: dict[str, list[tuple[Path, int]]] = {"train": [], "val": []}
    for split, count in (("train", 6), ("val", 2)):
        for label in range(3):
            folder = root / split / f"n{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                path = folder / f"n{label}_{number}.JPEG"
                image.new("RGB", (60 + number, 40), (80 * label, 10 * number, 10)).save(path)
                written[split].append((path, label))
    return written


def test_imagenets_folders_are_decoded_and_must_agree(tmp_path: Path) -> None:
    write_folders(tmp_path)
    config = DatasetConfig(name="imagenet", directory=tmp_path, validation_share=0.3)
    data = open_dataset(config, resnet50(classes=3, side=32))
    batch = data.training.batch(np.array([0, 1]), np.random.default_rng(0))
    assert batch.shape == (2, 3, 32, 32)
    assert abs(int(batch[0, 0].mean()) - 80 * int(data.training.labels[0])) < 4
    assert data.held_out.batch(np.array([5]), None).shape == (1, 3, 32, 32)
    assert data.identity == "folders of 3 other classes than ImageNet's"
    (tmp_path / "val" / "n2").rename(tmp_path / "val" / "n7")
    with pytest.raises(DataError, match="different classes"):
        open_dataset(config, resnet50(classes=3, side=32))


@pytest.mark.parametrize(("write", "name"), [(write_tar, "000000.tar"), (write_tfrecord, "{}-00000-of-00001")])
def test_shards_give_a_search_the_images_of_the_folders(
    tmp_path: Path, write: Callable[[Path, list[tuple[Path, int]]], None], name: str
) -> None:
    for split, images in write_folders(tmp_path / "folders").items():
        (tmp_path / "shards" / split).mkdir(parents=True)
        write(tmp_path / "shards" / split / name.format(split), images)
    folders, shards = (
        open_dataset(DatasetConfig(name="imagenet", directory=tmp_path / kind), resnet50(classes=3, side=32))
        for kind in ("folders", "shards")
    )
    assert shards.fingerprint == folders.fingerprint
    indices = np.arange(len(shards.training))
    draws = [np.random.default_rng(1), np.random.default_rng(1)]
    drawn = [data.training.batch(indices, draw) for data, draw in zip((shards, folders), draws, strict=True)]
    assert (drawn[0] == drawn[1]).all()
    assert (shards.identity, folders.identity) == tuple(
        f"{kind} of 3 other classes than ImageNet's" for kind in ("shards", "folders")
    )
    source = shards.training.source if isinstance(shards.training, LabeledFiles) else None
    assert source is not None
    assert source.classes == ["n0", "n1", "n2"], "by which ImageNet is identified"
    with pytest.raises(DataError, match="expected images of 4 classes"):
        open_dataset(DatasetConfig(name="imagenet", directory=tmp_path / "shards"), resnet50(classes=4, side=32))


def test_imagenet_is_identified_by_its_classes_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The thousand names and the million files are not here; three and thirty stand for them.
    names = ("n01440764", "n01443537", "n01484850")
    known = hashlib.sha256("\n".join(names).encode()).hexdigest()
    for name, value in {"IMAGENET_SYNSETS_SHA256": known, "IMAGENET_TRAINING": 30, "IMAGENET_HELD_OUT": 9}.items():
        monkeypatch.setattr(f"accelmark.datasets.images.{name}", value)

    def split(count: int, folders: tuple[str, ...] = names) -> LabeledFiles:
        place = tmp_path / f"{folders[0]}-{count}"
        for number in range(count):
            folder = place / folders[number % len(folders)]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.JPEG").touch()
        return LabeledFiles(ClassFolders(place, len(folders)), np.arange(count), np.zeros(count, np.int64), 224)

    assert imagenet_identity(split(29), split(9)) == "a part of imagenet (29 training and 9 held-out images)"
    assert imagenet_identity(split(30), split(9)) == "imagenet"
    others = split(30, ("cat", "dog", "newt"))
    assert imagenet_identity(others, split(9)) == "folders of 3 other classes than ImageNet's"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": np.zeros((40, 1, SIDE, SIDE))}, r"train_images: holds float64 .*expected bytes"),
        ({"train_labels": np.arange(39) % CLASSES}, r"train_labels: expected 40 integers"),
        ({"train_labels": np.arange(40) % CLASSES - 1}, r"train_labels: .*from 0"),
        ({"train_labels": np.array([None] * 40)}, r"bad\.npz: cannot be read as images"),
    ],
)
def test_arrays_that_are_not_labeled_images_are_reported_by_file_and_array(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    images, labels = np.zeros((40, 1, SIDE, SIDE), np.uint8), np.arange(40) % CLASSES
    plain = {"train_images": images, "train_labels": labels, "held_out_images": images, "held_out_labels": labels}
    np.savez(tmp_path / "bad.npz", **(plain | changes))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        open_dataset(DatasetConfig(name="arrays", directory=tmp_path / "bad.npz"), tiny_network())
