"""Send the files of a node directory while they grow, until its agent has ended: ``follow DIRECTORY``.

Files of subdirectories follow at the end, unless they are large. Standard input: first a line of JSON,
``{"have": {name: bytes}, "start_timeout_s": seconds, "poll_s": seconds, "send": bool, "skip": [subdirectory]}``
(``send`` is false where the coordinator shares the file system); then one letter per line: ``p`` is a heartbeat, ``s``
asks the agent to end, ``k`` to kill its ranks; each touches the heartbeat file. Standard output: frames, each a line of
JSON and the bytes that it announces, ``{"heard": true}`` after requests, and last
``{"end": ..., "sha256": {...}, "left": {name: bytes}}``, where ``left`` are the files that were too large. The program
ends without heartbeats.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import sys
import time

SETTLE_S = 0.3
HEARTBEAT_TIMEOUT_S = 45.0
CHUNK = 1 << 18
GROWING = (".log", ".jsonl")
HEARTBEAT = "coordinator.heartbeat"
LARGEST_FILE = 32 << 20
LARGEST_TOTAL = 256 << 20
"""Bytes of a file in a subdirectory, and of all of them, up to which they are sent."""
HIDDEN = ("agent.lock", "agent.code", "stop.requested", "stop.now", HEARTBEAT)


class Follower:
    """Tracks which bytes of which file were sent."""

    def __init__(self, directory: str, have: dict[str, int], start_timeout_s: float) -> None:
        self.directory = directory
        self.sent: dict[str, tuple[int | None, int, int]] = {
            name: (None, size, 0) for name, size in have.items() if name.endswith(GROWING)
        }
        self.started_by = time.monotonic() + start_timeout_s

    def path(self, name: str) -> str:
        """Return the path of a file of the directory."""
        return os.path.join(self.directory, name)

    def scan(self) -> None:
        """Send new bytes of all files."""
        for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name in HIDDEN or not entry.is_file(follow_symlinks=False):
                continue
            try:
                self.send(entry.name, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue

    def scan_subdirectories(self, skip: list[str]) -> dict[str, int]:
        """Send the files of subdirectories; returns those that are too large, and their sizes."""
        left: dict[str, int] = {}
        total = 0
        for place, directories, names in os.walk(self.directory):
            top = place == self.directory
            directories[:] = sorted(d for d in directories if not d.startswith(".") and not (top and d in skip))
            for name in () if top else sorted(names):
                path = os.path.join(place, name)
                short = os.path.relpath(path, self.directory)
                if name.startswith(".") or os.path.islink(path) or not os.path.isfile(path):
                    continue
                stat = os.stat(path)
                if stat.st_size > LARGEST_FILE or total + stat.st_size > LARGEST_TOTAL:
                    left[short] = stat.st_size
                else:
                    total += stat.st_size
                    self.send(short, stat)
        return left

    def send(self, name: str, stat: os.stat_result) -> None:
        """Send new bytes of one file: those after the known ones where it grew, else all."""
        inode, offset, modified = self.sent.get(name, (stat.st_ino, 0, 0))
        if inode not in (None, stat.st_ino) or stat.st_size < offset:
            offset = 0
        elif name in self.sent and stat.st_size == offset:
            if name.endswith(GROWING) or modified == stat.st_mtime_ns:
                return
            offset = 0
        with open(self.path(name), "rb") as file:
            file.seek(offset)
            while True:
                chunk = file.read(CHUNK)
                if chunk or offset == 0:
                    emit({"file": name, "offset": offset, "size": len(chunk)}, chunk)
                offset += len(chunk)
                if len(chunk) < CHUNK:
                    break
        self.sent[name] = (stat.st_ino, offset, stat.st_mtime_ns)

    def end(self) -> str | None:
        """Return how the agent ended, or None while it runs or may still start."""
        there = os.path.exists
        locked = is_locked(self.path("agent.lock"))
        if locked:
            return None
        if there(self.path("exit.json")):
            return "exit"
        if there(self.path("agent.code")):
            return "dead"
        if not there(self.path(".started")):
            return "never"
        if locked is False:
            time.sleep(SETTLE_S)
            return "exit" if there(self.path("exit.json")) else "dead"
        return "dead" if time.monotonic() > self.started_by else None

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of every sent file."""
        found = {}
        for name in sorted(self.sent):
            digest = hashlib.sha256()
            try:
                with open(self.path(name), "rb") as file:
                    for chunk in iter(lambda: file.read(CHUNK), b""):
                        digest.update(chunk)
            except FileNotFoundError:
                continue
            found[name] = digest.hexdigest()
        return found


def is_locked(path: str) -> bool | None:
    """Return True while an agent runs, False after its end, None before its start."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def emit(header: dict[str, object], content: bytes = b"") -> None:
    """Write one frame; :func:`main` flushes after several, which saves packets."""
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + content)


def listen(directory: str, timeout: float) -> bool:
    """Read requests for ``timeout`` seconds; returns whether any came. Exits where the connection was closed."""
    ready, _, _ = select.select([0], [], [], timeout)
    if not ready:
        return False
    requests = os.read(0, 4096)
    if not requests:
        sys.exit(0)
    touch(os.path.join(directory, HEARTBEAT))
    for letter, name in ((b"s", "stop.requested"), (b"k", "stop.now")):
        if letter in requests:
            touch(os.path.join(directory, name))
    return True


def touch(path: str) -> None:
    """Create a file or update its time; errors are ignored, as the agent ends by itself on a full disk."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
        os.utime(path)
    except OSError:
        return


def read_line() -> bytes:
    """Read the first line byte by byte, leaving the rest to :func:`listen`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    return line


def main(directory: str) -> None:
    """Follow one directory until its agent has ended."""
    request = json.loads(read_line())
    if not os.path.isdir(directory):
        emit({"end": "never", "sha256": {}, "left": {}})
        sys.stdout.buffer.flush()
        return
    follower = Follower(directory, request["have"], request["start_timeout_s"])
    last_heartbeat = time.monotonic()
    while True:
        end = follower.end()
        if request["send"]:
            follower.scan()
        elif end == "exit":
            follower.sent["exit.json"] = (None, 0, 0)
        if end is not None:
            left = follower.scan_subdirectories(request["skip"]) if request["send"] else {}
            emit({"end": end, "sha256": follower.checksums(), "left": left})
            sys.stdout.buffer.flush()
            return
        sys.stdout.buffer.flush()
        if listen(directory, request["poll_s"]):
            last_heartbeat = time.monotonic()
            emit({"heard": True})
        elif time.monotonic() - last_heartbeat > HEARTBEAT_TIMEOUT_S:
            return


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BrokenPipeError:
        os._exit(0)
