"""Offline generation with DeepSeek LLM 7B: given weights, perplexity of Shakespeare's plays."""

from __future__ import annotations

from accelmark.infer.generation.case import Generation


class Case(Generation):
    """The model of the given directory, in transformers."""
