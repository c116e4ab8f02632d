"""Transformer (big) for translation."""
