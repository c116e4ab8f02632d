"""A small mixture of experts on the bytes of Shakespeare."""
