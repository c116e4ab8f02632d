"""The small cases of canvases: exact boxes, pixels, captions, places of objects, features, and that they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from accelmark.cases.detection_mini.pytorch import BACKGROUND, Canvases, point_loss
from accelmark.cases.multimodal_mini.pytorch import ITEMS, Captions, caption, words
from accelmark.cases.segmentation_mini.pytorch import mirrored
from accelmark.tasks.conversation.pytorch import IMAGE, PLACEHOLDER, Answers
from accelmark.tasks.detection.pytorch import Scene, overlaps
from accelmark.tasks.metrics import IGNORED
from tests.cases.job_of import trained
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.tiny_data import write_idx


def items() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Rectangles of two shapes and levels of brightness: class 0 is wide and dark, class 1 is high and bright."""
    images = np.zeros((20, 1, 28, 28), np.uint8)
    images[::2, 0, 9:19, 2:26], images[1::2, 0, 2:26, 9:19] = 110, 250
    return images, np.arange(20) % 2


def test_boxes_surround_their_items_exactly() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    counts = []
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        pixels = np.asarray(scene.image)[..., 0] >= 16
        inside = np.zeros_like(pixels)
        for box, label in zip(scene.boxes.astype(int), scene.labels, strict=True):
            left, top, right, bottom = box
            part = pixels[top:bottom, left:right]
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()  # noqa: PT018
            assert ((right - left) > (bottom - top)) == (label == 0)
            inside[top:bottom, left:right] = True
        assert not (pixels & ~inside).any(), "nothing is outside of the boxes"
        for number, box in enumerate(scene.boxes):
            assert overlaps(scene.boxes[:number], box).max(initial=0) <= 0.05
        counts.append(len(scene.boxes))
    assert set(counts) == {1, 2, 3, 4}
    again = canvases.scene(7)
    assert (np.asarray(again.image) == np.asarray(canvases.scene(7).image)).all()
    assert not (np.asarray(again.image) == np.asarray(canvases.scene(8).image)).all()


def test_each_pixel_has_the_class_of_its_item() -> None:
    canvases = Canvases(*items(), 40, side=80, most=4)
    for index in range(len(canvases)):
        scene = canvases.scene(index)
        image, segments = canvases.pair(index)
        pixels = np.asarray(image)[..., 0]
        assert (np.asarray(scene.image)[..., 0] == pixels).all()
        assert ((pixels < 16) == (segments == BACKGROUND)).all()
        assert (segments[pixels > 110] == 2).all(), "only the second class is brighter"
        for label in (0, 1):
            inside = np.zeros_like(pixels, bool)
            for left, top, right, bottom in scene.boxes[scene.labels == label].astype(int):
                inside[top:bottom, left:right] = True
            assert not (inside < (segments == label + 1)).any(), "pixels of a class are in its boxes"
        assert set(np.unique(segments)) == {*(scene.labels + 1), BACKGROUND}


def test_half_of_the_canvases_are_mirrored_with_their_classes() -> None:
    image, segments = Canvases(*items(), 1, side=80, most=4).pair(0)
    same, mirror = mirrored(image, segments, lambda: 0.4), mirrored(image, segments, lambda: 0.6)
    assert (np.asarray(same[0]) == np.asarray(image)).all()
    assert (same[1] == segments).all()
    assert (np.asarray(mirror[0]) == np.asarray(image)[:, ::-1]).all()
    assert (mirror[1] == segments[:, ::-1]).all()


def test_a_peak_is_one_detection_of_its_class() -> None:
    case = case_of("detection_mini", {"model.hidden_size": 8})
    logits = torch.full((1, 20 * 20, 10), -9.0)
    logits[0, 5 * 20 + 7, 3], logits[0, 5 * 20 + 8, 3], logits[0, 5 * 20 + 8, 4] = 2.0, 1.0, 0.0
    score, label, place = case.scored(logits)  # type: ignore[attr-defined]
    assert list(zip(label[0, :2].tolist(), place[0, :2].tolist(), strict=True)) == [(3, 107), (4, 108)]
    assert score[0, :2].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert float(score[0, 2]) < 0.001, "the lower logit next to the peak of its class is left out"


def test_the_loss_is_that_of_the_centres_and_of_the_boxes() -> None:
    labels = [
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.30, 0.60, 0.2, 0.4]])},
        {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)},
    ]
    size, boxes = torch.Size((10, 10)), torch.full((2, 100, 4), 0.5)
    boxes[0, 63] = labels[0]["boxes"][0]
    logits = torch.full((2, 100, 2), -20.0)
    logits[0, 63, 1] = 20.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0, abs=1e-4)
    boxes[0, 63, 2] = 0.1
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5, abs=1e-4)
    near, far = logits.clone(), logits.clone()
    near[0, 73, 1], far[0, 9, 1] = 4.0, 4.0
    losses = [float(point_loss(each, boxes, labels, size)) for each in (near, far)]
    assert 0.5 < losses[0] < losses[1] - 1, losses
    assert losses[1] == pytest.approx(0.5 + 0.982**2 * 4.018, rel=1e-3)
    logits[0, 63, 1] = 0.0
    assert float(point_loss(logits, boxes, labels, size)) == pytest.approx(0.5 + 0.25 * math.log(2), abs=1e-4)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    images, labels = items()
    for prefix in ("train", "t10k"):
        write_idx(tmp_path, prefix, images[:, 0], labels.astype(np.uint8))
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "library", "metric", "least"),
    [("detection_mini", "pycocotools", "map50", 0.3), ("segmentation_mini", "transformers", "miou", 0.7)],
)
def test_the_case_learns(tmp_path: Path, fashion: Path, name: str, library: str, metric: str, least: float) -> None:
    pytest.importorskip(library)
    over: dict[str, Any] = {"model.hidden_size": 16, "model.train_images": 1600, "model.eval_images": 50, "threads": 1}
    finished, losses = trained(name, tmp_path, {"fashion_mnist": fashion}, over)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert finished["final_metrics"][metric] > least


NAME = "multimodal_mini"


def scene_of(boxes: list[tuple[int, int, int, int]], labels: list[int]) -> Scene:
    none = np.zeros(len(labels), np.int64)
    return Scene(Image.new("RGB", (64, 64)), np.array(boxes, np.float64), np.array(labels), none)


def test_a_caption_says_number_places_and_items() -> None:
    assert caption(scene_of([(0, 0, 20, 20)], [8])) == "one item: upper left bag"
    boxes = [(40, 40, 60, 60), (0, 40, 20, 60), (30, 2, 50, 22), (32, 0, 60, 20)]
    assert caption(scene_of(boxes, [0, 9, 6, 4])) == (
        "four items: upper right coat, upper right shirt, lower left boot, lower right t-shirt"
    )
    assert caption(scene_of([(21, 21, 42, 43)], [1])) == "one item: lower left trouser"


def test_every_caption_is_made_of_the_tokenizers_words() -> None:
    tokenizer = words()
    assert tokenizer.get_vocab_size() == int(case_of(NAME, {}).settings.model["vocab_size"] or 0)
    captions = Captions(Canvases(*items(), 40, side=64, most=3))
    longest = 0
    for index in range(len(captions)):
        text, [(start, end)], _ = captions.read(index, 64)
        encoded = tokenizer.encode(text[start:end])
        assert IMAGE not in encoded.ids
        assert text == PLACEHOLDER + text[start:end]
        assert "".join(encoded.tokens) == text[start:end].replace(" ", "")
        longest = max(longest, len(encoded.ids))
    assert longest == 15
    most = "three items: " + ", ".join(f"lower right {name}" for name in ITEMS[:3])
    assert len(tokenizer.encode(f"{most}</s>")) == 15 <= 32 - 16


def test_the_caption_is_learned_after_the_places_of_the_image() -> None:
    case: Any = case_of(NAME, {})
    captions = Captions(Canvases(*items(), 4, side=64, most=3))
    sample = Answers(case, captions, range(4), words()).read(2, torch.Generator())
    tokens, labels = sample["tokens"], sample["labels"]
    assert tokens.shape == labels.shape == (32,)
    assert (tokens[:16] == IMAGE).all()
    learned = labels[labels != IGNORED]
    assert words().decode(learned.tolist(), skip_special_tokens=True).replace(" ", "") == caption(
        Canvases(*items(), 4, side=64, most=3).scene(2)
    ).replace(" ", "")
    assert int(learned[-1]) == 1
    assert (tokens[16 : 16 + len(learned)] == learned).all()
    assert sample["image"].shape == (3, 64, 64)


def test_features_are_those_of_the_packaged_network_and_do_not_change() -> None:
    case: Any = case_of(NAME, {})
    model: Any = case.build_model().train()
    tower, image = model.net.model.vision_tower, case.synthetic_batch(3)["image"]
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    features = tower(model.normalised(image)).last_hidden_state
    assert features.shape == (3, 16, 258)
    maps = tower.network.eval().features(model.normalised(image)[:, :1])
    assert torch.equal(features[:, 6, :256].view(3, 64, 2, 2), maps[:, :, 2:4, 4:6]), "four places are one"
    assert features[0, [0, 3, 15], 256:].tolist() == [[-1, -1], [-1, 1], [1, 1]]
    torch.autograd.backward(case.loss(model, case.synthetic_batch(2)))
    assert all(torch.equal(before[name], value) for name, value in tower.state_dict().items())
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if "vision_tower" in name}


def test_a_caption_is_exact_where_each_of_its_tokens_is_the_likeliest() -> None:
    case: Any = case_of(NAME, SMALL[NAME])
    batch = case.synthetic_batch(4)
    labels = batch["labels"]
    labels[3] = IGNORED
    logits = torch.zeros(4, labels.shape[1], 24)
    logits[:, :-1].scatter_(2, labels[:, 1:].clamp(min=0)[..., None], 5.0)
    logits[1, labels.shape[1] - 2] = 0.0  # the last token of the second caption
    logits[1, labels.shape[1] - 2, 0] = 9.0

    class Fixed(torch.nn.Module):
        def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return logits

    metrics = case.metrics({name: float(value) for name, value in case.eval_sums(Fixed(), batch).items()})
    assert metrics["exact_match"] == 0.5, "the second is wrong, the fourth has no answer"


@pytest.mark.heavy
def test_multimodal_mini_learns(tmp_path: Path, fashion: Path) -> None:
    over: dict[str, Any] = {"model.train_images": 4800, "model.eval_images": 100, "model.num_layers": 2, "threads": 1}
    over |= {"model.most_items": 1, "model.hidden_size": 64}
    finished, losses = trained(NAME, tmp_path, {"fashion_mnist": fashion}, over)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), losses
    assert finished["final_metrics"]["exact_match"] > 0.4, "guesses have 1 in 8"
