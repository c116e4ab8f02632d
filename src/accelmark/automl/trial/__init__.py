"""Train one network of the search with PyTorch and the training driver."""
