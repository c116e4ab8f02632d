"""The training loop, independent of the framework."""
