"""Check the hosts of a cluster file against its launcher."""

from __future__ import annotations

import ipaddress
import socket

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem
from accelmark.spec.plugins.catalog import folders
from accelmark.spec.plugins.launcher import load_launcher, options_model, options_of


def host_problems(cluster: ClusterSpec) -> list[Problem]:
    """Return a problem for each host that the cluster's launcher cannot use."""
    launcher, where = load_launcher(cluster.launcher), f"cluster {cluster.name!r}"
    options = options_of(options_model(cluster.launcher), cluster)
    problems = [Problem(where, "hosts", what) for what in options.host_problems(cluster.hosts)]
    if not launcher.is_localhost:
        return problems
    others = [name for name in folders("launchers") if not load_launcher(name).is_localhost]
    hint = f"set launcher to one of: {', '.join(others)}"
    starts = f"launcher: {launcher.name} starts everything on this machine"
    if len(cluster.hosts) > 1:
        problems.append(Problem(where, "hosts", f"there are {len(cluster.hosts)}, but {starts}", hint))
    for number, host in enumerate(cluster.hosts):
        if not is_localhost(host.address):
            what = f"{host.address} is not this machine, but {starts}"
            problems.append(Problem(where, f"hosts.{number}.address", what, f"{hint}; or use localhost"))
    return problems


def is_localhost(address: str) -> bool:
    """Return whether a name or address is this machine's, without a DNS lookup, which may take long."""
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
