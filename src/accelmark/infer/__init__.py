"""Inference benchmarks: seven steps that measure the speed and accuracy of a trained model in a vendor's runtime."""
