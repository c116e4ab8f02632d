"""Pretraining of Llama 3.1 8B."""
