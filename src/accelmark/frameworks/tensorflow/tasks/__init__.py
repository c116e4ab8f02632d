"""Task families in TensorFlow."""
