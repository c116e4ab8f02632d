"""Read events, telemetry, runs and bundles."""
