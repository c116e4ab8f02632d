"""Low-rank adaptation of Llama 2 70B."""
