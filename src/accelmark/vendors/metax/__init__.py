"""MetaX GPUs."""
