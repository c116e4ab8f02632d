"""Launch on this machine, natively or in a container."""
