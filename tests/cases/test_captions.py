"""The small multimodal case: captions of canvases, features of the frozen network, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accelmark.cases.detection_mini._canvases import Canvases
from accelmark.cases.multimodal_mini.pytorch import ITEMS, Captions, caption, words
from accelmark.spec.log.events import Event
from accelmark.tasks.conversation.data import PLACEHOLDER
from accelmark.tasks.conversation.pytorch import IMAGE
from accelmark.tasks.detection.data import Scene
from accelmark.tasks.metrics import IGNORED
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_canvases import items
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.test_mini import write_idx

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
        text, [(start, end)] = captions.text(index)
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
    sample = case.answers(captions, range(4), words()).read(2, torch.Generator())
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
def test_multimodal_mini_learns(tmp_path: Path) -> None:
    images, labels = items()
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images[:, 0], packed=False)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", labels.astype(np.uint8), packed=False)
    over: dict[str, Any] = {"model.train_images": 4800, "model.eval_images": 100, "model.num_layers": 2, "threads": 1}
    over |= {"model.most_items": 1, "model.hidden_size": 64}
    events = run(job_of(NAME, tmp_path / "run", {"fashion_mnist": tmp_path}, over))
    finished, losses = value_of(events, Event.FINISHED), losses_of(events)
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5]), losses
    assert finished["final_metrics"]["exact_match"] > 0.4, "guesses have 1 in 8"
