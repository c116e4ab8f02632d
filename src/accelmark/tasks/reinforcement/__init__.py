"""Reinforcement learning of language models."""
