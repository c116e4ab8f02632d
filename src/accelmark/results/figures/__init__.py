"""Compute figures from events and telemetry."""
