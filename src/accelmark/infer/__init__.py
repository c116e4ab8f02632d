"""Inference: the seven steps from a trained model to its speed and accuracy in a vendor's runtime."""
