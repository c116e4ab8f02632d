"""Captions of canvases with items of Fashion-MNIST in PyTorch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlavaConfig
from transformers.modeling_outputs import BaseModelOutput

from accelmark.cases import resnet_mini
from accelmark.cases.detection_mini.pytorch import Canvases
from accelmark.cases.resnet_mini._fashion import MEAN, STD
from accelmark.cases.resnet_mini.pytorch import ResNetMini
from accelmark.frameworks.pytorch.batches import ReadSamples
from accelmark.infer.weights import load_weights
from accelmark.spec.backports import zip_strict
from accelmark.tasks.conversation.pytorch import END, PLACEHOLDER, Conversation, ImageAnswers
from accelmark.tasks.detection.pytorch import Scene

ITEMS: Final = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_UNKNOWN: Final = "<unk>"
_COUNTS: Final = ("one item", "two items", "three items", "four items")
_ROWS: Final = ("upper", "lower")
_COLUMNS: Final = ("left", "right")
_WORDS: Final = ("one", "two", "three", "four", "item", "items", ":", ",", *_ROWS, *_COLUMNS, *ITEMS)


def caption(scene: Scene) -> str:
    """Return number and items by quarters, such as ``two items: upper left bag, lower right coat``.

    An item is in the quarter of its box's centre; items of one quarter are in the order of their classes.
    """
    centres = (scene.boxes[:, :2] + scene.boxes[:, 2:]) / 2
    quarters = (centres >= np.array(scene.image.size) / 2).astype(int)
    objects = sorted((down, across, label) for (across, down), label in zip_strict(quarters, scene.labels))
    items = ", ".join(f"{_ROWS[down]} {_COLUMNS[across]} {ITEMS[label]}" for down, across, label in objects)
    return f"{_COUNTS[len(objects) - 1]}: {items}"


def words() -> Tokenizer:
    """Return a tokenizer with a token for each word and sign of captions."""
    tokens = [_UNKNOWN, END, *_WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w-]+|[:,]"), "removed", invert=True)
    tokenizer.add_special_tokens([END])
    return tokenizer


def captioned(canvases: Canvases, index: int, side: int) -> Conversation:
    """Return the image's place and the caption, which is the answer, and the canvas, whose size is ``side``."""
    scene = canvases.scene(index)
    text = PLACEHOLDER + caption(scene) + END
    return text, [(len(PLACEHOLDER), len(text))], np.array(scene.image).transpose(2, 0, 1).copy()


_WEIGHTS: Final = Path(resnet_mini.__path__[0]) / "weights.safetensors"
_WIDTH, _STAGES = 16, 3
"""Of the packaged ``resnet_mini``."""
_MERGED: Final = 2
"""So many places in a row and in a column become one."""
_FEATURES: Final = _WIDTH * 2 ** (_STAGES - 1) * _MERGED**2 + 2


class Places(nn.Module):
    """Features of the trained ``resnet_mini`` every 16 pixels, with places (Liu et al. 2018, arXiv:1807.03247)."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ResNetMini(_WIDTH, _STAGES, 1)

    def forward(self, pixel_values: Tensor, **_options: Any) -> BaseModelOutput:
        """Return features of shape (batch, places, width)."""
        maps = F.pixel_unshuffle(self.network.features(pixel_values[:, :1]), _MERGED)
        down, across = (torch.linspace(-1, 1, size, device=maps.device) for size in maps.shape[-2:])
        where = torch.stack(torch.meshgrid(down, across, indexing="ij")).expand(len(maps), -1, -1, -1)
        features = torch.cat([maps, where], 1).flatten(2).transpose(1, 2)
        return BaseModelOutput(last_hidden_state=features, hidden_states=(features,))

    def train(self, mode: bool = True) -> Places:
        """Keep the statistics of the normalisation."""
        return super().train(mode=False)


class Case(ImageAnswers):
    """A small Llama learns to describe canvases from the features of a frozen network."""

    mean, std = (MEAN / 255,) * 3, (STD / 255,) * 3

    def config(self) -> LlavaConfig:
        """Return the configuration; ``build_model`` replaces its vision model, which only states a width."""
        vision = CLIPVisionConfig(hidden_size=_FEATURES, num_hidden_layers=1, num_attention_heads=1)
        text = {"max_position_embeddings": self.number("seq_length")}
        return self.configured(vision, text, vision_feature_layer=-1, vision_feature_select_strategy="full")

    def build_model(self) -> nn.Module:
        """Build the model with the packaged weights of the vision model, and random ones."""
        model = super().build_model()
        net: Any = model.net
        places = Places().requires_grad_(requires_grad=False)
        if torch.get_default_device().type != "meta":
            load_weights(places.network, _WEIGHTS)
        net.model.vision_tower = places
        return model

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return canvases of training images, or of test images."""
        canvases = Canvases.of(self, train=train)
        return self.samples_of(len(canvases), partial(captioned, canvases), words())
