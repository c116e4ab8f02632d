"""The node agent: supervises the ranks of one job on one host."""
