"""Audit results: rules over a run's records, and one verdict from their findings. Imports no framework."""
