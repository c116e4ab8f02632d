"""Measure the ceilings of a device, the denominator of MFU where no datasheet peak is known."""
