"""From captions to images: text encoder, denoising with guidance, and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn

from accelmark.infer.case import IterativeModel
from accelmark.tasks.generation.pytorch import BETAS, SCALE, STEPS


@final
class TextToImage(IterativeModel):
    """Deterministic denoising (DDIM, Song et al. 2020, arXiv:2010.02502) of a network that predicts the noise.

    Each step computes the prediction with the caption and without (Ho & Salimans 2022, arXiv:2207.12598).
    """

    times: Tensor
    empty: Tensor

    def __init__(
        self,
        unet: nn.Module,
        text_encoder: nn.Module,
        autoencoder: Any,
        empty: Sequence[int],
        steps: int,
        guidance: float,
    ) -> None:
        """Take the networks; ``empty`` are the tokens of an empty caption, padding included."""
        super().__init__()
        self.unet: Any = unet
        self.text_encoder: Any = text_encoder
        self.from_latent = nn.Sequential(autoencoder.post_quant_conv, autoencoder.decoder)
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
        """Return the three networks."""
        return [self.text_encoder, self.unet, self.from_latent]

    def forward(
        self, tokens: Tensor, noise: Tensor, predictions: Tensor | None = None, images: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the network's predictions and the images.

        With ``predictions`` of an earlier call, each step starts from the latent that follows from those before it, and
        the images from the last one.

        Args:
            tokens: captions with padding, (items, length).
            noise: initial latents, (items, 4, side, side).
            predictions: as returned: (items, steps, 2, 4, side, side), without caption and with it.
            images: as returned: (items, 3, 8 side, 8 side), values from -1 to 1; not used.
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
