"""Continued pretraining of DeepSeek-V3."""
