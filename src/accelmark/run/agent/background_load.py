"""How much of a host's cores went to work that is not this job's."""

from __future__ import annotations

import resource
from typing import Final, final

import psutil

_NOT_WORK: Final = ("idle", "iowait", "steal", "guest", "guest_nice")


@final
class OtherWork:
    """Counts from when it is made, on behalf of a process that reaps all that it starts."""

    def __init__(self) -> None:
        self._began = _host_s(), _own_s()

    def cpu_s(self) -> float | None:
        """Return the CPU time of others up to now, in seconds; None where the kernel does not tell.

        What this process started counts as its own once it has ended and was waited for.
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
    # What guests use is counted in user and nice; stolen time was nobody's on this machine.
    return float(sum(spent for name, spent in times.items() if name not in _NOT_WORK))


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
