"""Frameworks, one folder each: how ranks are started, and the training backend."""
