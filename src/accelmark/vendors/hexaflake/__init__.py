"""Hexaflake accelerators."""
