"""Offline generation with Qwen2.5 7B: given weights in Hugging Face's layout, perplexity of Shakespeare's plays."""

from __future__ import annotations

from accelmark.infer.generation.case import Generation


class Case(Generation):
    """The model of the given directory, in transformers."""
