"""Denoising of latents with captions (Rombach et al. 2021, arXiv:2112.10752)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.data.batches import generator_for
from accelmark.frameworks.pytorch.optimizers import build_optimizer
from accelmark.frameworks.pytorch.tasks.generation.velocity import VelocityPrediction
from accelmark.frameworks.pytorch.tasks.text import read_tokenizer
from accelmark.train.schedules import scaled_learning_rate
from accelmark.train.tasks.generation.latents import CaptionedLatents

CHANNELS: Final = 4
"""Of latents."""
SCALE: Final = 0.18215
"""Latents are multiplied with it, so that their variance is about 1."""
STEPS: Final = 1000
BETAS: Final = (0.00085, 0.012)
"""Of the noise's schedule: its steps, and the variances added in the first and the last."""
_LOG_VARIANCES: Final = (-30.0, 20.0)


class Denoiser(nn.Module):
    """A network that predicts the velocity of noised latents (Salimans & Ho 2022, arXiv:2202.00512), from captions.

    The text encoder is not trained.
    """

    kept: Tensor

    def __init__(self, net: Any, text_encoder: PreTrainedModel) -> None:
        super().__init__()
        self.net = net
        self.text_encoder: Any = text_encoder.requires_grad_(False)
        low, high = (each**0.5 for each in BETAS)
        # The device is named: after a from_pretrained() of transformers 5.23, linspace may ignore the default one.
        kept = (1 - torch.linspace(low, high, STEPS, device=torch.get_default_device()) ** 2).cumprod(0)
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, latent: Tensor, noise: Tensor, step: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and actual velocity, of the shape of ``latent``; ``step`` is from 0 to 999."""
        kept = self.kept[step].view(-1, 1, 1, 1)
        signal, spread = kept.sqrt(), (1 - kept).sqrt()
        with torch.no_grad():
            context = self.text_encoder(input_ids=tokens).last_hidden_state
        found: Tensor = self.net(signal * latent + spread * noise, step, context).sample
        return found, signal * noise - spread * latent


@final
class NoisedLatents:
    """Latents drawn from their moments, with noise and a step; in evaluation always the same."""

    def __init__(self, latents: CaptionedLatents, tokenizer: Tokenizer, size: int, length: int) -> None:
        self._latents, self._tokenizer, self._size, self._length = latents, tokenizer, size, length

    def __len__(self) -> int:
        return len(self._latents)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``latent`` and ``noise`` of shape (4, size, size), ``step``, and ``tokens``, filled up with zeros."""
        moments, caption = self._latents.read(index, (2 * CHANNELS, self._size, self._size))
        mean, log_variance = torch.from_numpy(moments).chunk(2)
        drawn, noise = torch.randn(2, *mean.shape, generator=random)
        ids = self._tokenizer.encode(caption).ids
        tokens = ids if len(ids) <= self._length else [*ids[: self._length - 1], ids[-1]]
        return {
            "latent": SCALE * (mean + (log_variance.clamp(*_LOG_VARIANCES) / 2).exp() * drawn),
            "noise": noise,
            "step": torch.randint(0, STEPS, (), generator=random),
            "tokens": torch.tensor(tokens + [0] * (self._length - len(tokens))),
        }


class Diffusion(VelocityPrediction):
    """Training on shards of captioned latents; the mean squared error of the velocity is also the evaluation's loss.

    Under ``model`` are ``latent_size``, ``vocab_size``, ``text_length`` and ``lr_batch_size``: ``optimizer.lr`` is the
    rate for a global batch of that size.
    """

    samples: ClassVar[str]
    """Name of the data set of latents."""
    weights: ClassVar[str]
    """Name of the data set with the text encoder and its tokenizer, in its folder ``hf``."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a network of diffusers that takes noised latents, steps and hidden states of the text."""

    @abstractmethod
    def text_encoder(self) -> PreTrainedModel:
        """Return the text encoder with its published weights."""

    def build_model(self) -> nn.Module:
        """Build the network with random weights."""
        return Denoiser(self.network(), self.text_encoder())

    def dataset(self, *, train: bool) -> NoisedLatents:
        """Return the latents of ``train`` or of ``val``."""
        latents = CaptionedLatents(self.data_dirs[self.samples] / ("train" if train else "val"))
        tokenizer = read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))
        return NoisedLatents(latents, tokenizer, self.number("latent_size"), self.number("text_length"))

    def synthetic_batch(self, size: int) -> Batch:
        """Return random latents, noise, steps and tokens."""
        random, side = generator_for(self.place.seed), self.number("latent_size")
        latent, noise = torch.randn(2, size, CHANNELS, side, side, generator=random)
        shape = size, self.number("text_length")
        return {
            "latent": latent,
            "noise": noise,
            "step": torch.randint(0, STEPS, (size,), generator=random),
            "tokens": torch.randint(0, self.number("vocab_size"), shape, generator=random),
        }

    def velocities(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predicted and actual velocities."""
        found, wanted = model(batch["latent"], batch["noise"], batch["step"], batch["tokens"])
        return found, wanted

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Scale the learning rate by global batch / ``lr_batch_size``."""
        rate = scaled_learning_rate(self.settings, self.place.world_size, self.number("lr_batch_size"))
        return build_optimizer(model, self.settings.optimizer.model_copy(update={"lr": rate}), self.place.device)
