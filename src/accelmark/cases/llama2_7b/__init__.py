"""Pretraining of Llama 2 7B."""
