"""Swin-B on ImageNet."""
