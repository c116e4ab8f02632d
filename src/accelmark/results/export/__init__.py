"""Results in the formats of tools that people already use."""
