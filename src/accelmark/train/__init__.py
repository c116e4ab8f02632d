"""The job side of training: one driver loop, a backend file a framework, hooks for vendors."""
