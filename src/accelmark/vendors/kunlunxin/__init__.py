"""Kunlunxin XPUs."""
