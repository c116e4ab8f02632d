"""Record host and device telemetry during a run, outside the ranks. Imports no framework."""
