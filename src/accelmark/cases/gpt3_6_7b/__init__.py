"""Pretraining of GPT-3 6.7B."""
