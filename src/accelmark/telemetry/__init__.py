"""What the hardware did while a run was on it: host and devices, read from outside the ranks. Imports no framework."""
