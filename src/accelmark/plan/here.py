"""Whether an address means this machine: what is launched locally must not be told as another host's."""

from __future__ import annotations

import ipaddress
import socket

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem


def check_hosts(cluster: ClusterSpec) -> list[Problem]:
    """Return a problem for each host that is launched locally and is not this machine."""
    if cluster.launcher != "local":
        return []
    return [
        Problem(
            f"cluster {cluster.name!r}",
            f"hosts.{number}.address",
            f"{host.address} is not this machine, and launcher: local starts everything here",
            "set launcher: ssh, or name localhost",
        )
        for number, host in enumerate(cluster.hosts)
        if not is_here(host.address)
    ]


def is_here(address: str) -> bool:
    """Whether a name or address is this machine's; names are not looked up, since that may take long."""
    try:
        numeric = ipaddress.ip_address(address)
    except ValueError:
        own = socket.gethostname().lower()
        return address.lower() in {"localhost", own, own.partition(".")[0]}
    family = socket.AF_INET if numeric.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
