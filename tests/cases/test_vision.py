"""Images, boxes and segments: reading, augmentation, scores, and learning rates of backbones."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accelmark.datasets.images import ClassFolders
from accelmark.frameworks.pytorch.batches import collated, generator_for
from accelmark.spec.errors import DataError, RequestError
from accelmark.tasks.detection.pytorch import BoxedImages, Scene, distorted, multi_scale
from accelmark.tasks.images import data as image_data
from accelmark.tasks.images.pytorch_imagenet import OPERATIONS, ImageFolder, erase, mixed, rand_augment
from accelmark.tasks.metrics import box_precision, mean_overlap
from accelmark.tasks.segmentation.pytorch import SegmentedImages, random_part
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of


def test_training_leaves_out_what_cannot_be_learnt_and_evaluation_does_not(tmp_path: Path) -> None:
    directory = tiny_data.coco(tmp_path)["coco"]
    file = directory / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["annotations"][0]["iscrowd"] = 1
    file.write_text(json.dumps(content), encoding="utf-8")
    assert [len(BoxedImages(directory, "train2017", num_classes=4, train=train)) for train in (True, False)] == [15, 16]
    scene = BoxedImages(directory, "train2017", num_classes=4, train=False).scene(0)
    assert (scene.crowd.tolist(), scene.labels[0] in (1, 3)) == ([1], True), "with 4 classes labels are the ids"


@pytest.mark.parametrize(
    "change",
    [lambda *given: multi_scale(given[0], 96, 160, given[1]), lambda *given: distorted(given[0], 128, given[1])],
)
def test_boxes_stay_around_their_objects(tmp_path: Path, change: Callable[..., Scene]) -> None:
    """The bright pixels of a changed image are those in the changed boxes."""
    images = BoxedImages(tiny_data.coco(tmp_path)["coco"], "train2017", num_classes=2, train=True)
    random = np.random.default_rng(0)
    compared = 0
    for _ in range(60):
        scene = images.scene(int(random.integers(len(images)) // 2 * 2))  # those with one box
        changed = change(scene, random.random)
        bright = np.array(changed.image).max(2) > 130
        if not len(changed.boxes):
            continue
        rows, columns = np.nonzero(bright)
        found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert np.abs(found - changed.boxes[0]).max() <= 6, (found, changed.boxes)
        compared += 1
    assert compared > 20


def test_segments_are_cut_with_their_image(tmp_path: Path) -> None:
    images = SegmentedImages(tiny_data.ade20k(tmp_path)["ade20k"], "training", num_classes=2)
    random = np.random.default_rng(0)
    for index in range(8):
        image, segments = random_part(*images.pair(index), random.random, 64)
        assert image.size == (64, 64) == segments.shape
        difference = np.array(image).astype(int)[..., 1] - np.array(image)[..., 2]
        clear = np.abs(difference) > 60
        agreeing = (difference > 0) == (segments == 1)
        assert agreeing[clear & (segments > 0)].mean() > 0.9


def test_samples_of_different_sizes_are_filled_up_with_zeros() -> None:
    boxes = torch.ones(2, 4), torch.ones(3, 4), torch.zeros(0, 4)
    batch = collated([{"box": box} for box in boxes], 3)
    assert batch["box"].sum((1, 2)).tolist() == [8, 12, 0]
    assert batch["box"].shape == (3, 3, 4)


def test_box_precision_is_one_for_exact_boxes_and_ignores_crowds() -> None:
    pytest.importorskip("pycocotools")
    boxes = np.array([[7, 10, 10, 20, 20, 3, 0], [7, 0, 0, 99, 99, 3, 1], [8, 5, 5, 30, 10, 1, 0]], float)
    exact = np.array([[7, 10, 10, 20, 20, 0.9, 3], [7, 40, 40, 20, 20, 0.8, 3], [8, 5, 5, 30, 10, 0.1, 1]], float)
    assert box_precision(boxes, exact) == {"map": pytest.approx(1.0), "map50": pytest.approx(1.0)}
    moved = exact + np.array([0, 5, 0, 0, 0, 0, 0])  # overlaps of 0.6, in the crowd, 0.714
    assert box_precision(boxes, moved)["map"] == pytest.approx((0.3 + 0.5) / 2)
    assert box_precision(boxes, exact[:0])["map"] == 0


def test_mean_overlap_is_that_of_the_classes_which_occur() -> None:
    rows = np.array([[0, 3, 4, 3], [1, 5, 6, 7], [2, 0, 0, 0], [0, 1, 1, 3]], float)
    assert mean_overlap(rows) == {"miou": pytest.approx((4 / 7 + 5 / 8) / 2), "pixel_accuracy": 9 / 11}


def test_detr_trains_as_many_weights_as_its_authors() -> None:
    with torch.device("meta"):
        model = case_of("detr", {}).build_model()
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == 41_302_368, "their n_parameters"


def test_stages_that_no_argument_of_the_network_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("resnet50", SMALL["resnet50"])
    monkeypatch.setattr(type(case), "arguments", {})
    with pytest.raises(RequestError, match=r"model\.stage1_blocks has no effect: state depths"):
        case.build_model()


def test_a_tenth_of_the_rate_is_that_of_the_backbone_alone() -> None:
    """Mask2Former's decoder of pixels has an encoder too, which its authors train at the full rate."""
    for name in ("mask2former", "detr", "rt_detr"):
        case: Any = case_of(name, SMALL[name])
        model: Any = case.build_model()
        optimizer = case.build_optimizer(model)
        low = min(group["lr"] for group in optimizer.param_groups)
        slow = {each for group in optimizer.param_groups if group["lr"] == low for each in group["params"]}
        assert low == pytest.approx(case.settings.optimizer.lr / 10)
        assert slow == {each for each in case.backbone(model.net).parameters() if each.requires_grad}, name


def test_training_batches_of_rt_detr_have_eleven_sizes() -> None:
    case: Any = case_of("rt_detr", {**SMALL["rt_detr"], "model.image_size": 640})
    image = torch.randint(0, 256, (1, 3, 640, 640), dtype=torch.uint8)
    batch = {"image": image, "mask": torch.ones(1, 640, 640, dtype=torch.uint8), "label": torch.zeros(1)}
    random = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(80):
        scaled = case.augment(batch, random)
        side = scaled["image"].shape[2]
        assert scaled["image"].shape == (1, 3, side, side)
        assert scaled["mask"].shape == (1, side, side)
        assert scaled["mask"].all()
        assert scaled["label"] is batch["label"]
        sizes.add(side)
    assert sizes == set(range(480, 801, 32))
    case = case_of("detr", SMALL["detr"])
    assert case.augment(batch, random) is batch


def test_detections_are_the_best_pairs_of_query_and_class_where_classes_are_independent() -> None:
    logits = torch.tensor([[[3.0, 2.5, -9.0], [-9.0, -9.0, 1.0]]])
    case: Any = case_of("rt_detr", SMALL["rt_detr"])
    score, label, query = case.scored(logits)
    assert (label.tolist(), query.tolist()) == ([[0, 1]], [[0, 0]])
    assert score[0].tolist() == pytest.approx([0.9526, 0.9241], abs=1e-4)
    case = case_of("detr", SMALL["detr"])
    _, label, query = case.scored(logits)
    assert (label.tolist(), query.tolist()) == ([[0, 0]], [[0, 1]]), "a class each, and the last logit is for none"


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
