"""A thousand hosts that are one process: an SSH server that answers AccelMark's programs without running them.

Every address of 127.0.0.0/8 is this machine, so each host has an address of its own. What is measured is the
coordinator: its time, its processor time and its memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import asyncssh

from accelmark.spec.cluster import ClusterSpec
from benchmarks.fanout.steps import steadily, together

FACTS = {
    "time": 0.0, "hostname": "simulated", "boot_id": "x", "python": [3, 11, 2], "executable": "python3",
    "not_writable": None, "free_mib": 1e6, "memory_mib": 1e5, "cpus": 8, "load1": 0.1, "busy_ports": [],
    "refusals": {}, "missing_directories": [], "missing_files": [], "lacking_modules": [], "engine_problem": None,
    "held_by": None, "may_clear_caches": True,
}  # fmt: skip
_STEADY = re.compile(r"steady(?P<seconds>\d+)x(?P<ranks>\d+)")
STEP = b'[PerfLog] {"event": "STEP_END", "value": {"global_steps": 1, "loss": 1.0' + b" " * 330 + b"}}\n"
"""A line of a rank's log, 406 bytes as of the training loop."""
LOG = b"nothing to do\n"


async def _answer(process: asyncssh.SSHServerProcess[bytes]) -> None:
    # The end of what accelmark.run.onhost.command returns: PYTHON -I -S -c 'PROGRAM' VERB ARGUMENT ...
    verb, *arguments = (process.command or "").rpartition("' ")[2].split()
    if verb == "probe":
        await process.stdin.readline()
        process.stdout.write(json.dumps(FACTS).encode() + b"\n")
    elif verb == "follow" and (steady := _STEADY.search(arguments[0])) is not None:
        request = json.loads(await process.stdin.readline())
        await _steady(process, float(request["poll_s"]), int(steady["seconds"]), int(steady["ranks"]))
    elif verb == "follow":
        await process.stdin.readline()
        header = {"file": "agent.log", "offset": 0, "size": len(LOG)}
        end = {"end": "dead", "sha256": {"agent.log": hashlib.sha256(LOG).hexdigest()}, "left": {}}
        process.stdout.write(json.dumps(header).encode() + b"\n" + LOG + json.dumps(end).encode() + b"\n")
    elif verb == "files":
        await process.stdin.read()
    process.exit(0)


async def _steady(process: asyncssh.SSHServerProcess[bytes], poll_s: float, seconds: int, num_ranks: int) -> None:
    """Send what ``follow`` sends of ranks that write a line a second; hosts do not do so at the same time."""
    written, sent, begun = {f"rank{rank}.out.log": b"" for rank in range(num_ranks)}, 0, time.monotonic()
    await asyncio.sleep(random.random() * poll_s)
    while sent < seconds:
        due = min(seconds, int(time.monotonic() - begun))
        frames = []
        for name, log in written.items() if due > sent else ():
            new = STEP * (due - sent)
            frames.append(json.dumps({"file": name, "offset": len(log), "size": len(new)}).encode() + b"\n" + new)
            written[name] = log + new
        sent = max(sent, due)
        process.stdout.write(b"".join(frames))
        _sent.value += sum(map(len, frames))
        await asyncio.sleep(poll_s)
    sums = {name: hashlib.sha256(log).hexdigest() for name, log in written.items()}
    process.stdout.write(json.dumps({"end": "dead", "sha256": sums, "left": {}}).encode() + b"\n")


_sent: Any = None
"""Bytes of frames that simulated hosts have sent."""


class _Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


def _serve(key: str, port: Any, ready: Event, sent: Any) -> None:
    global _sent
    _sent = sent

    async def body() -> None:
        server = await asyncssh.listen(
            "0.0.0.0", 0, server_host_keys=[key], process_factory=_answer, encoding=None, server_factory=_Server,  # noqa: S104
            backlog=4096,
        )  # fmt: skip
        port.value = server.sockets[0].getsockname()[1]
        ready.set()
        await server.wait_closed()

    _raise_limit()
    asyncio.run(body())


def _raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Most:
    """The largest number of open descriptors of this process, looked at 50 times a second."""

    def __init__(self) -> None:
        self._most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._most = max(self._most, len(list(Path("/proc/self/fd").iterdir())))

    def value(self) -> int:
        """Stop looking, and return it."""
        self._ended.set()
        self._thread.join()
        return self._most


def _coordinate(home: Path, num_hosts: int, port: int, results: Any, steady: tuple[int, int] | None = None) -> None:
    """Put the figures of a coordinator into ``results``: of all steps, or with (seconds, ranks) of following a job."""
    hosts = [
        {"address": f"127.77.{index // 250}.{index % 250 + 1}", "label": f"h{index}"} for index in range(num_hosts)
    ]
    cluster = ClusterSpec.model_validate(
        {"name": "simulated", "launcher": "ssh", "hosts": hosts, "ssh_port": port, "user": "any",
         "known_hosts": home / "known_hosts", "python": "python3"}
    )  # fmt: skip
    before, begun = time.process_time(), time.monotonic()
    descriptors = _Most()
    base_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if steady is not None:
        phases = asyncio.run(steadily(cluster, home / f"steady{num_hosts}x{steady[0]}", "steady{}x{}".format(*steady)))
    else:
        phases = asyncio.run(together(cluster, home / f"of{num_hosts}", f"simulated{num_hosts}"))
    results.put(
        {
            "hosts": num_hosts,
            "phases": phases.figures,
            "wall_s": time.monotonic() - begun,
            "cpu_s": time.process_time() - before,
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "memory_before_mib": base_mib,
            "descriptors": descriptors.value(),
        }
    )


def measure(numbers: list[int], steady: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the coordinator's figures for each number of hosts, each in a process of its own.

    ``steady``: seconds and ranks of a job that writes a line per rank and second; None: all steps of a no-op.
    """
    context = multiprocessing.get_context("spawn")
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(home / "host_key")
        port, ready, sent = context.Value("i", 0), context.Event(), context.Value("q", 0)
        server = context.Process(target=_serve, args=(str(home / "host_key"), port, ready, sent))
        server.start()
        try:
            assert ready.wait(60)
            public = key.export_public_key().decode().strip()
            (home / "known_hosts").write_text(f"* {public}\n")
            for number in numbers:
                results: Any = context.Queue()
                sent.value = 0
                coordinator = context.Process(target=_coordinate, args=(home, number, port.value, results, steady))
                coordinator.start()
                row = results.get(timeout=600)
                coordinator.join()
                if steady is not None:
                    row |= {"seconds": steady[0], "ranks": steady[1], "sent_bytes": sent.value}
                    row["new_bytes"] = number * steady[0] * steady[1] * len(STEP)
                figures.append(row)
                print(figures[-1], file=sys.stderr, flush=True)
        finally:
            server.terminate()
            server.join()
    return figures
