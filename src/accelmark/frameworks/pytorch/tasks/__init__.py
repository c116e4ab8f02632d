"""Task families in PyTorch: code that the cases of a family share."""
