"""PyTorch: launch through torchrun, the training backend and its hooks."""
