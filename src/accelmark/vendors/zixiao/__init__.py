"""Tencent Zixiao accelerators."""
