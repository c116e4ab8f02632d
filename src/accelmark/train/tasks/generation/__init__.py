"""Data of generative models."""
