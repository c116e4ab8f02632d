"""The baseline of ``benchmarks/overhead.py``: minimal loops, as one writes them by hand in each framework.

``bare_loop(backend, batches)`` trains the objects of the driver's backend (model, optimizer, their state), since speed
depends on memory addresses. It neither logs nor times anything. Batches are what the case yields: NumPy arrays, except
in PyTorch. Where the driver computes the learning rate on the host, the loop takes the framework's own schedule.
"""

from __future__ import annotations

from typing import Final

SCHEDULED_STEPS: Final = 10**9
"""Length of schedules, longer than any measurement."""
