"""Cambricon MLUs."""
