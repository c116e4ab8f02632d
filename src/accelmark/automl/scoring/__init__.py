"""Score a search from its journal, and find what contradicts its rules, data, clock and configuration."""
