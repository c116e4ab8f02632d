"""Moore Threads GPUs."""
