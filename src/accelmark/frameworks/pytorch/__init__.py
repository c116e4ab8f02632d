"""PyTorch: launch, the training backend and its hooks."""
