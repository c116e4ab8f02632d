"""What a node agent and its ranks run in: nothing, or a container."""
