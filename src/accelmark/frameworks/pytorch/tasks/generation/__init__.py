"""Families of generative models."""
