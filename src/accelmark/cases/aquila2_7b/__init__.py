"""Pretraining of Aquila2 7B."""
