"""Hygon DCUs."""
