"""LLaVA-1.5 7B on its instruction data in PyTorch."""

from __future__ import annotations

from accelmark.tasks.conversation.pytorch import InstructionTuning


class Case(InstructionTuning):
    """Vicuna 7B v1.5, CLIP's ViT-L/14 for images of 336 x 336 pixels, and a projector of two layers between them."""

    samples = "llava_instruct"
    weights = "llava_parts"
