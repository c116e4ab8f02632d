"""Reaching hosts over SSH."""
