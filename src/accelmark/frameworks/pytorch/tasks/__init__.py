"""Task families in PyTorch: what the cases of a family share besides their models and data."""
