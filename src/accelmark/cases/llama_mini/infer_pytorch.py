"""Offline generation with the small Llama: packaged weights, perplexity per byte of the held-out plays."""

from __future__ import annotations

from accelmark.infer.generation.case import Generation


class Case(Generation):
    """The model that ``serve.py`` writes, in transformers."""
