"""Checks of an engine during measured passes: its answers against the framework's, and whether it keeps answers."""
