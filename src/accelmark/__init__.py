"""AccelMark: a benchmark for AI chips and the software stacks that drive them."""

from typing import Final

__version__: Final = "0.1.0"
