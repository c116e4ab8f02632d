"""AccelMark: a benchmark for AI chips and the software stacks that drive them."""

__version__ = "0.1.0"
