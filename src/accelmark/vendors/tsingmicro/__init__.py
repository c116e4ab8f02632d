"""Tsingmicro accelerators."""
