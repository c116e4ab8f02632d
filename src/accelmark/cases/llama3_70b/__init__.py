"""Pretraining of Llama 3 70B."""
