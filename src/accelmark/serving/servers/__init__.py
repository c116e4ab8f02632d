"""Servers of language models, a folder each."""
