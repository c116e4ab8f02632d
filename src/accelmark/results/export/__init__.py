"""Export results in the formats of other tools."""
