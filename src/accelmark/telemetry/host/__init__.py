"""Host telemetry: CPU, memory, pressure, I/O, processes, power and system information."""
