"""Task families in JAX."""
