"""Integrity checks of a PyTorch rank: monkey-patch detection, probes, equivalence, reference model."""
