"""The host's own processor."""
