"""Serving benchmarks: start a server of a language model, load it, and record every request."""
