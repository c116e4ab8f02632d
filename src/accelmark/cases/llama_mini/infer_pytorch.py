"""Offline generation with the small Llama: packaged weights, perplexity per byte of the held-out plays."""

from __future__ import annotations

from accelmark.infer.language_model import LanguageModelCase


class Case(LanguageModelCase):
    """The model that ``serve.py`` writes, in transformers."""
