"""The model: blocks, attention, losses, initial weights, sharding, and its identity."""
