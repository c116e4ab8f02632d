"""Low-rank adaptation of the trained small Llama."""
