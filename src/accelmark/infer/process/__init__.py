"""The process of an engine, which has no labels and no data set, and the shared memory through which it gets inputs."""
