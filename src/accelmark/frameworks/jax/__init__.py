"""JAX with Flax NNX models and Optax optimizers."""
