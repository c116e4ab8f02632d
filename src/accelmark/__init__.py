"""AccelMark: a benchmark for AI chips and the software stacks that drive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelmark.api import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import :func:`accelmark.api.load` when it is first used, so that importing the package stays fast."""
    if name == "load":
        from accelmark.api import load

        return load
    raise AttributeError(f"module 'accelmark' has no attribute {name!r}")
