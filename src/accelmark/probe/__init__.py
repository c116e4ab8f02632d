"""The job side of probing: measured ceilings of a device, as a second denominator beside datasheet peaks."""
