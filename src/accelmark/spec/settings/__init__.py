"""Settings of training, inference and serving."""
