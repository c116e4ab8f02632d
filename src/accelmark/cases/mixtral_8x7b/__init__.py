"""Pretraining of Mixtral 8x7B."""
