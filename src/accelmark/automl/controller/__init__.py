"""Run a search: its record, its state, and the controller that starts trials on workers."""
