"""Carrying out a plan: the coordinator, the node agents it starts, and the run directory they write."""
