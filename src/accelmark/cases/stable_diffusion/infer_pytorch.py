"""Inference of Stable Diffusion 2: images for captions of COCO."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset
from transformers import CLIPModel, CLIPTextModel

from accelmark.cases.stable_diffusion import _network
from accelmark.cases.stable_diffusion._pipeline import TextToImage
from accelmark.infer.case import InferBatch, InferBatches, InferCase, LoaderBatches
from accelmark.infer.weights import load_weights
from accelmark.spec.errors import DataError, first_line
from accelmark.tasks.generation.pytorch import CHANNELS
from accelmark.tasks.text.pytorch import read_tokenizer

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's images, in its ``preprocessor_config.json``."""


@final
class Captions(Dataset[tuple[Tensor, Tensor, int]]):
    """The first caption of each of the first ``count`` images of ``val2017``, by the images' numbers, with noise.

    Raises:
        DataError: the annotations cannot be read, or have too few captions.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, count: int, length: int, side: int) -> None:
        file = directory / "annotations" / "captions_val2017.json"
        try:
            rows = json.loads(file.read_bytes())["annotations"]
            first: dict[int, str] = {}
            for row in sorted(rows, key=lambda row: (row["image_id"], row["id"])):
                first.setdefault(row["image_id"], row["caption"].strip())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}: is not in COCO's format: {type(error).__name__}: {error}") from error
        self.texts = list(first.values())[:count]
        if len(self.texts) < count:
            raise DataError(f"{file}: has captions of {len(self.texts)} images, expected {count} or more")
        self.tokens = torch.tensor([padded(tokenizer, text, length) for text in self.texts])
        self._side = side

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        """Return tokens, the noise of the image, always the same, and the caption's number."""
        noise = torch.randn(CHANNELS, self._side, self._side, generator=Generator().manual_seed(index))
        return self.tokens[index], noise, index


def padded(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    """Return the tokens of a caption with its start and end; a longer one is cut off, a shorter one padded with 0."""
    ids = tokenizer.encode(text).ids
    ids = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
    return [*ids, *[0] * (length - len(ids))]


class Case(InferCase):
    """Captions of COCO's ``val2017``, with weights of stabilityai/stable-diffusion-2-base."""

    input_names = ("tokens", "noise")
    output_names = ("predictions", "images")
    _captions: Captions
    _clip: Any

    def networks(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Build the UNet, the text encoder and the autoencoder with random weights."""
        encoder = CLIPTextModel(_network.text_encoder(self.number))
        return _network.unet(self.number), encoder, _network.autoencoder(self.number)

    def create_model(self) -> nn.Module:
        """Build the networks, with weights from the data directory."""
        net, encoder, autoencoder = self.networks()
        self.trained = "weights" in self.data_dirs
        if self.trained:
            folder = self.data_dirs["weights"].parents[1]
            _load(net, folder / "unet")
            load_weights(encoder, folder / "text_encoder" / "model.safetensors")
            _load(autoencoder, folder / "vae")
        last = self.number("vocab_size") - 1
        empty = [last - 1, last, *[0] * (self.number("text_length") - 2)]  # start, end and padding
        guidance = float(self.parameters["guidance"] or 0)
        return TextToImage(net, encoder, autoencoder, empty, self.number("num_steps"), guidance)

    def build_dataloader(self) -> InferBatches:
        """Read captions, and the model of their score."""
        if missing := {"coco_captions", "clip_vit_b32"} - self.data_dirs.keys():
            raise DataError(
                f"no {' and no '.join(sorted(missing))}: name a directory that holds them (--data DIR), or measure "
                "speed only with synthetic data (--synthetic)"
            )
        folder = self.data_dirs["clip_vit_b32"] / "hf"
        tokenizer = read_tokenizer(folder / "tokenizer.json", self.number("vocab_size"))
        try:
            clip: Any = CLIPModel
            self._clip = clip.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{folder}: is not a checkpoint of CLIPModel: {first_line(error)}") from error
        sizes = self.number("num_captions"), self.number("text_length"), self.number("latent_size")
        self._captions = Captions(self.data_dirs["coco_captions"], tokenizer, *sizes)
        return LoaderBatches(self._captions, self.settings)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Add up the cosines of images and captions in CLIP's space."""
        side = self._clip.config.vision_config.image_size
        pixels = ((outputs[1] / 2 + 0.5).clamp(0, 1) * 255).round() / 255
        small = F.interpolate(pixels, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (_MEAN, _STD))
        scores = self._clip(pixel_values=(small - mean) / std, input_ids=self._captions.tokens[labels])
        return {"cosine": float((scores.image_embeds * scores.text_embeds).sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the CLIP score, 100 times the mean cosine (Hessel et al. 2021, arXiv:2104.08718, without a factor)."""
        return {"clip_score": 100 * sums["cosine"] / max(1.0, sums["count"])}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Return random captions and noise."""
        side = self.number("latent_size")
        tokens = torch.randint(self.number("vocab_size"), (size, self.number("text_length")))
        return InferBatch((tokens, torch.randn(size, CHANNELS, side, side)), None)


def _load(net: Any, folder: Path) -> None:
    """Give a network of diffusers the weights in ``folder``.

    Raises:
        DataError: they cannot be read, or are another network's.
    """
    try:
        loaded, report = type(net).from_pretrained(
            folder, local_files_only=True, torch_dtype=torch.float32, output_loading_info=True
        )
        net.load_state_dict(loaded.state_dict())
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{folder}: is not a checkpoint of this {type(net).__name__}: {first_line(error)}") from error
    if report["missing_keys"]:
        raise DataError(f"{folder}: lacks weights of {type(net).__name__}: {min(report['missing_keys'])}, ...")
