"""CPU time that a host spent on processes outside this job."""

from __future__ import annotations

import resource
from typing import Final, final

import psutil

_EXCLUDED: Final = ("idle", "iowait", "steal", "guest", "guest_nice")


@final
class BackgroundLoad:
    """Measures from its creation; this process has to reap all processes of the job."""

    def __init__(self) -> None:
        self._began = _host_s(), _own_s()

    def cpu_s(self) -> float | None:
        """Return the CPU time of other processes, in seconds; None where the kernel does not report it.

        Child processes count as part of the job once they have been reaped.
        """
        host, own = _host_s(), _own_s()
        if host is None or self._began[0] is None:
            return None
        return max(0.0, (host - self._began[0]) - (own - self._began[1]))


def _host_s() -> float | None:
    try:
        times = psutil.cpu_times()._asdict()
    except (OSError, RuntimeError):
        return None
    # Time of guests is included in user and nice; stolen time was used by no process of this machine.
    return float(sum(spent for name, spent in times.items() if name not in _EXCLUDED))


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
