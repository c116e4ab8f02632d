"""Measure how long the threads of this process waited for a CPU while they were ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

_TASKS: Final = Path("/proc/self/task")


@final
class CpuWait:
    """Counts from its creation; reading it costs some microseconds per thread."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._before = self._delays_ns()

    def longest_s(self) -> float | None:
        """Return the longest wait of any thread so far, in seconds; None where the kernel does not count it.

        The threads of a step wait for each other, so the longest wait is a lower bound of the time lost.
        """
        waits = [delay - self._before.get(thread, 0) for thread, delay in self._delays_ns().items()]
        return max(waits) / 1e9 if waits else None

    def _delays_ns(self) -> dict[str, int]:
        """Return the second number of each thread's ``schedstat`` (Linux, Documentation/scheduler/sched-stats.rst)."""
        delays: dict[str, int] = {}
        try:
            for task in self._tasks.iterdir():
                try:
                    delays[task.name] = int((task / "schedstat").read_text(encoding="ascii").split()[1])
                except (OSError, ValueError, IndexError):
                    continue  # the thread has ended, or the kernel does not count
        except OSError:
            pass
        return delays
