"""TensorFlow: launch, backend, tasks."""
