"""The standard cases, a folder each."""
