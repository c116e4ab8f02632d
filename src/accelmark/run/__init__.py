"""Execute a plan: the coordinator, the node agents that it starts, and the run directory that they write."""
