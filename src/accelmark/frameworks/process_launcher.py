"""``python -m accelmark.frameworks.process_launcher ... -- COMMAND``: start the ranks of one host as processes.

When a rank fails, the others get SIGTERM, and SIGKILL after a grace
period; SIGTERM and SIGINT are passed on. ``ranks.json`` records how each rank ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch, LaunchRecord, RankPlace, module_command

COORDINATOR: Final = "ACCELMARK_COORDINATOR"
"""Variable with ``HOST:PORT`` of rank 0, where the ranks of a framework meet."""
_GRACE_S: Final = 30.0
_POLL_S: Final = 0.05


def launch_ranks(
    place: HostPlace,
    *,
    coordinator: str = COORDINATOR,
    defaults: Mapping[str, str] | None = None,
    interfaces: Sequence[str] = (),
    between_hosts: Mapping[str, str] | None = None,
) -> Launch:
    """Return the rank's own command for a single rank, else this launcher around it.

    ``coordinator`` is the variable for ``HOST:PORT`` of rank 0; on a single host, a free port is chosen. ``interfaces``
    are variables for the network interface.
    """
    environment, defaults = {coordinator: f"{place.master_address}:{place.master_port}"}, defaults or {}
    if place.interface is not None:
        defaults = {**defaults, **dict.fromkeys(interfaces, place.interface)}
    if place.nnodes * place.num_ranks == 1:
        return Launch(place.rank_command, {**environment, **RankPlace().variables()}, defaults)
    command = module_command(place.python, "accelmark.frameworks.process_launcher", "--nproc", str(place.num_ranks))
    command += ["--nnodes", str(place.nnodes), "--node-rank", str(place.noderank)]
    if place.nnodes == 1:
        return Launch([*command, "--free-port", coordinator, "--", *place.rank_command], {}, defaults)
    return Launch([*command, "--", *place.rank_command], {**environment, **(between_hosts or {})}, defaults)


def built_for(title: str, needed: Sequence[str], module: str, file: str, otherwise: str) -> DeviceSupport:
    """Read from a file of an installed framework whether it was built with one of ``needed``, without importing it.

    The file assigns versions to names, ``'0'`` where a part is absent; no ``needed`` names: any build will do.
    """
    if not needed:
        return DeviceSupport(True, title)
    spec = importlib.util.find_spec(module)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    versions = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*'(\d[^']*)'", text, re.MULTILINE))
    have = [f"{name.removesuffix('_version')} {versions[name]}" for name in needed if versions.get(name, "0") != "0"]
    built = f"{title}, built for {', '.join(have)}"
    return DeviceSupport(True, built) if have else DeviceSupport(False, f"{title} is a build without {otherwise}")


def main(arguments: Sequence[str]) -> int:
    """Start this host's ranks, wait for their end, and write ``ranks.json``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accelmark.frameworks.process_launcher", description=__doc__)
    parser.add_argument("command", nargs="+", help="the command of each rank, after --")
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="this host's number, from 0")
    parser.add_argument("--free-port", metavar="VARIABLE", help="set it to 127.0.0.1:PORT with a port that is free")
    options = parser.parse_args(arguments)
    if options.free_port is not None:
        # Bound until the end, so that no other process gets the port before rank 0 listens.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        os.environ[options.free_port] = f"127.0.0.1:{reserved.getsockname()[1]}"
    received: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
    first, nproc = options.node_rank * options.nproc, options.nproc
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    problem: str | None = None
    for local in range(nproc):
        place = RankPlace(first + local, local, options.nnodes * nproc, nproc)
        try:
            ranks[place.rank] = subprocess.Popen(options.command, env={**os.environ, **place.variables()})
        except OSError as error:
            problem = f"rank {place.rank} could not be started: {error}"
            break
    deadline: float | None = None
    killed: set[int] = set()
    while None in (codes := [process.poll() for process in ranks.values()]):
        failed = problem is not None or any(codes)
        if deadline is None and (received or failed):
            deadline = time.monotonic() + _GRACE_S
            _signal_all(ranks, signal.SIGTERM)
        elif len(received) > 1 or (deadline is not None and time.monotonic() > deadline):
            killed |= {rank for rank, process in ranks.items() if process.poll() is None}
            _signal_all(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    ended = {rank: process.returncode for rank, process in ranks.items() if rank not in killed}
    exit_codes = {rank: ended.get(rank) for rank in range(first, first + nproc)}
    record = LaunchRecord(exit_codes=exit_codes, signal=received[0] if received else None, problem=problem)
    record.write()
    return record.exit_code()


def _signal_all(ranks: dict[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks.values():
        if process.poll() is None:
            process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
