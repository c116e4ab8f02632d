"""Servers that a framework has on each host of a job: what tells it where they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Server:
    """One host's server."""

    address: str
    port: int


def server_variables(servers: Sequence[Server], noderank: int) -> dict[str, str]:
    """Return the variables that tell a host of a job about the servers of all its hosts, one each, in their order.

    ``TF_CONFIG`` is TensorFlow's (tf.distribute, multi-worker); the others are FlagPerf's, for code that comes from
    there. Nothing where there are no servers.
    """
    if not servers:
        return {}
    workers = [f"{server.address}:{server.port}" for server in servers]
    return {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": noderank}}),
        "FLAGPERF_HOSTS": ",".join(server.address for server in servers),
        "FLAGPERF_HOSTS_PORTS": ",".join(str(server.port) for server in servers),
    }
