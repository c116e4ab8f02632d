"""Pretraining of GPT-OSS 20B."""
