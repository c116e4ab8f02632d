"""Conversations about images."""
