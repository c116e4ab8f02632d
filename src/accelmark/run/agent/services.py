"""FlagPerf's variables that list the servers of all hosts of a job."""

from __future__ import annotations

from collections.abc import Sequence

from accelmark.spec.framework import Server


def server_variables(servers: Sequence[Server]) -> dict[str, str]:
    """Return FlagPerf's variables with addresses and ports of all servers, by noderank; empty without servers."""
    if not servers:
        return {}
    return {
        "FLAGPERF_HOSTS": ",".join(server.address for server in servers),
        "FLAGPERF_HOSTS_PORTS": ",".join(str(server.port) for server in servers),
    }
