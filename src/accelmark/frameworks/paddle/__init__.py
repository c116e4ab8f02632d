"""PaddlePaddle: launch, backend, tasks."""
