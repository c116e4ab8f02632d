"""T5-small fine-tuned to summarize."""
