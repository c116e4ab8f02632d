"""Qwen1.5-MoE-A2.7B."""
