"""Measure a server of language models under load."""
