"""LLaVA-1.5 7B on its instruction data."""
