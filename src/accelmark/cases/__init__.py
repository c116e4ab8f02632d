"""The standard cases, one folder each."""
