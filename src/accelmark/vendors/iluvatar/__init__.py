"""Iluvatar CoreX GPUs."""
