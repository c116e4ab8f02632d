"""Sandboxes: run a node agent and its ranks natively or in a container."""
