"""A small Llama on the bytes of Shakespeare."""
