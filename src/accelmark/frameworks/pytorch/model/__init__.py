"""The model: blocks, attention, losses, initial weights, and its identity."""
