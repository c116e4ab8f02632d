"""Inference of Stable Diffusion 2: images for captions of COCO."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import DDIMScheduler
from tokenizers import Tokenizer
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset
from transformers import CLIPModel, CLIPTextModel

from accelmark.infer.case import InferBatch, InferBatches, InferCase, IterativeModel, LoaderBatches
from accelmark.infer.weights import load_weights
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.generation.pytorch import BETAS, CHANNELS, SCALE, STEPS, autoencoder, padded, text_config, unet
from accelmark.tasks.images.data import CLIP_MEAN, CLIP_STD
from accelmark.tasks.text.pytorch import read_tokenizer


class TextToImage(IterativeModel):
    """Deterministic denoising (DDIM, Song et al. 2020, arXiv:2010.02502) of a network that predicts the noise.

    Each step computes the prediction with the caption and without (Ho & Salimans 2022, arXiv:2207.12598).
    """

    times: Tensor
    empty: Tensor

    def __init__(self, networks: Sequence[Any], empty: Sequence[int], steps: int, guidance: float) -> None:
        """Take UNet, text encoder and autoencoder; ``empty`` are the tokens of an empty caption, padding included."""
        super().__init__()
        self.unet, self.text_encoder, decoder = networks
        self.from_latent = nn.Sequential(decoder.post_quant_conv, decoder.decoder)
        self.guidance = guidance
        with torch.device("cpu"):  # its constants are read by the host
            scheduler: Any = DDIMScheduler
            self.scheduler = scheduler(
                num_train_timesteps=STEPS, beta_start=BETAS[0], beta_end=BETAS[1], beta_schedule="scaled_linear",
                clip_sample=False, set_alpha_to_one=False, steps_offset=1,
            )  # fmt: skip
            self.scheduler.set_timesteps(steps)
        self.steps: list[int] = self.scheduler.timesteps.tolist()
        self.register_buffer("times", torch.tensor(self.steps), persistent=False)
        self.register_buffer("empty", torch.tensor(empty)[None], persistent=False)

    def parts(self) -> Sequence[nn.Module]:
        return [self.text_encoder, self.unet, self.from_latent]

    def forward(
        self, tokens: Tensor, noise: Tensor, predictions: Tensor | None = None, images: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return predictions (items, steps, 2, 4, side, side), without caption and with it, and the images.

        With ``predictions`` of an earlier call, each step starts from the latent that follows from those before it, and
        the images from the last one. ``tokens`` are (items, length), ``noise`` has the initial latents
        (items, 4, side, side); ``images`` (items, 3, 8 side, 8 side) have values from -1 to 1, and are not used.
        """
        captions = torch.cat([self.empty.expand(len(tokens), -1), tokens])
        context = self.text_encoder(input_ids=captions).last_hidden_state
        latent, outputs = noise.float(), noise.new_empty(len(noise), len(self.steps), 2, *noise.shape[1:])
        for number, time in enumerate(self.steps):
            inputs = latent.to(noise.dtype).repeat(2, 1, 1, 1)
            made: Tensor = self.unet(inputs, self.times[number], context).sample
            outputs[:, number] = torch.stack(made.chunk(2), 1)
            without, guided = (outputs if predictions is None else predictions)[:, number].float().unbind(1)
            latent = self.scheduler.step(without + self.guidance * (guided - without), time, latent).prev_sample
        return outputs, self.from_latent((latent / SCALE).to(noise.dtype))


class Captions(Dataset[tuple[Tensor, Tensor, int]]):
    """The first caption of each of the first ``count`` images of ``val2017``, by the images' numbers, with noise."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, count: int, length: int, side: int) -> None:
        file = directory / "annotations" / "captions_val2017.json"
        with raising(DataError, f"{file}: is not in COCO's format", OSError, ValueError, KeyError, TypeError):
            rows = json.loads(file.read_bytes())["annotations"]
            first: dict[int, str] = {}
            for row in sorted(rows, key=lambda row: (row["image_id"], row["id"])):
                first.setdefault(row["image_id"], row["caption"].strip())
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


class Case(InferCase):
    """Captions of COCO's ``val2017``, with weights of stabilityai/stable-diffusion-2-base."""

    input_names = ("tokens", "noise")
    output_names = ("predictions", "images")
    _captions: Captions
    _clip: Any

    def networks(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Build the UNet, the text encoder and the autoencoder with random weights."""
        encoder = CLIPTextModel(text_config(self.number))
        return unet(self.number), encoder, autoencoder(self.number)

    def create_model(self) -> nn.Module:
        net, encoder, decoder = self.networks()
        self.trained = "weights" in self.data_dirs
        if self.trained:
            folder = self.data_dirs["weights"].parents[1]
            _load(net, folder / "unet")
            load_weights(encoder, folder / "text_encoder" / "model.safetensors")
            _load(decoder, folder / "vae")
        last = self.number("vocab_size") - 1
        empty = [last - 1, last, *[0] * (self.number("text_length") - 2)]  # start, end and padding
        guidance = float(self.parameters["guidance"] or 0)
        return TextToImage((net, encoder, decoder), empty, self.number("num_steps"), guidance)

    def build_dataloader(self) -> InferBatches:
        """Read captions, and the model of their score."""
        captions = self.data_dir("coco_captions", "coco_captions")
        folder = self.data_dir("clip_vit_b32", "clip_vit_b32") / "hf"
        tokenizer = read_tokenizer(folder / "tokenizer.json", self.number("vocab_size"))
        with raising(DataError, f"{folder}: is not a checkpoint of CLIPModel", OSError, RuntimeError, ValueError):
            clip: Any = CLIPModel
            self._clip = clip.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        sizes = self.number("num_captions"), self.number("text_length"), self.number("latent_size")
        self._captions = Captions(captions, tokenizer, *sizes)
        return LoaderBatches(self._captions, self.settings)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Add up the cosines of images and captions in CLIP's space."""
        side = self._clip.config.vision_config.image_size
        pixels = ((outputs[1] / 2 + 0.5).clamp(0, 1) * 255).round() / 255
        small = F.interpolate(pixels, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (CLIP_MEAN, CLIP_STD))
        scores = self._clip(pixel_values=(small - mean) / std, input_ids=self._captions.tokens[labels])
        return {"cosine": float((scores.image_embeds * scores.text_embeds).sum()), "count": float(len(labels))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the CLIP score, 100 times the mean cosine (Hessel et al. 2021, arXiv:2104.08718, without a factor)."""
        return {"clip_score": 100 * sums["cosine"] / max(1.0, sums["count"])}

    def synthetic_batch(self, size: int) -> InferBatch:
        side = self.number("latent_size")
        tokens = torch.randint(self.number("vocab_size"), (size, self.number("text_length")))
        return InferBatch((tokens, torch.randn(size, CHANNELS, side, side)), None)


def _load(net: Any, folder: Path) -> None:
    """Give a network of diffusers the weights in ``folder``; raises DataError where they are another network's."""
    with raising(DataError, f"{folder}: is not a checkpoint of this {type(net).__name__}", *UNREADABLE):
        loaded, report = type(net).from_pretrained(
            folder, local_files_only=True, torch_dtype=torch.float32, output_loading_info=True
        )
        net.load_state_dict(loaded.state_dict())
    if report["missing_keys"]:
        raise DataError(f"{folder}: lacks weights of {type(net).__name__}: {min(report['missing_keys'])}, ...")
