"""Swin-T on ImageNet."""
