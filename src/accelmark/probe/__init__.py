"""Measure the peak rates of a device, the denominator of MFU if no datasheet peak is known."""
