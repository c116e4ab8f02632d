"""Offline generation with Llama 2 7B: given weights in Hugging Face's layout, perplexity of Shakespeare's plays."""

from __future__ import annotations

from accelmark.infer.language_model import LanguageModelCase


class Case(LanguageModelCase):
    """The model of the given directory, in transformers."""
