"""Audit results: rules over what a run stored, and one verdict from their findings. Imports no framework."""
