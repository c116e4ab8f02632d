"""LLaVA-1.5 7B on its instruction data in PyTorch."""

from __future__ import annotations

from typing import Any

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from accelmark.frameworks.pytorch.model.causal_attention import CAUSAL
from accelmark.frameworks.pytorch.tasks.vision.conversation import IMAGE, InstructionTuning


class Case(InstructionTuning):
    """Vicuna 7B v1.5, CLIP's ViT-L/14 for images of 336 x 336 pixels, and a projector of two layers between them."""

    samples = "llava_instruct"
    weights = "llava_parts"

    def config(self) -> LlavaConfig:
        """Return the configuration that the settings describe."""
        vision = CLIPVisionConfig(
            hidden_size=self.number("vision_width"),
            intermediate_size=self.number("vision_intermediate_size"),
            num_hidden_layers=self.number("vision_layers"),
            num_attention_heads=self.number("vision_heads"),
            image_size=self.number("image_size"),
            patch_size=self.number("patch_size"),
        )
        text = LlamaConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            intermediate_size=self.number("intermediate_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            rms_norm_eps=1e-5,
            max_position_embeddings=4096,
        )
        attention = {"text_config": CAUSAL, "vision_config": "sdpa"}
        config: Any = LlavaConfig  # which does not declare attn_implementation
        found: LlavaConfig = config(
            vision_config=vision, text_config=text, image_token_index=IMAGE, attn_implementation=attention
        )
        return found
