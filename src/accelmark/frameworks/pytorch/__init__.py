"""PyTorch: launch by torchrun, the training backend and its hooks."""
