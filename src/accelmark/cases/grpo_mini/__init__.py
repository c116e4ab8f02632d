"""Group relative policy optimization of a small Llama on additions."""
