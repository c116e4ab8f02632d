"""Compute the result of one round, and of a run."""
