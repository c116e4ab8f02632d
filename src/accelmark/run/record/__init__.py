"""The run directory: layout, event log, source record."""
