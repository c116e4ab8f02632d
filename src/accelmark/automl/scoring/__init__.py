"""Score a search from its journal, and find contradictions with its rules, data, clock and configuration."""
