"""How long the threads of this process, ready to run, waited for a core: what other work took from it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

_TASKS: Final = Path("/proc/self/task")


@final
class CoreWait:
    """Counts from when it is made; reading costs some microseconds a thread, and nothing in between."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        self._before = self._delays_ns()

    def longest_s(self) -> float | None:
        """Return the longest wait of any thread up to now, in seconds; None where the kernel does not tell.

        Threads of a step wait for one another, so that the longest wait is the least that the steps lost.
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
                    continue  # it ended since, or the kernel does not count
        except OSError:
            pass
        return delays
