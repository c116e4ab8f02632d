"""The case aquila_7b."""
