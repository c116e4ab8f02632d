"""Batches: cut from a data set, copied to the device ahead of their use, or synthetic."""
