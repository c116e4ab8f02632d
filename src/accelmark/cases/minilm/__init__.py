"""MiniLM sentence encoder with a linear probe."""
