"""Write, remove and send the files of a run on a host.

``wheel PATH SHA256 SIZE`` unpacks a wheel from standard input at PATH, unless it is there. ``files`` reads a line of
JSON, ``[[path, sha256, size], ...]``, and then their contents; each file appears complete or not at all.

``clear RUN_DIRECTORY NODE_DIRECTORY KEEP_DAYS OWNER`` removes an earlier attempt: it ends agents of the run that still
run on this host, after a lost connection for example, and renames the node directory. Agents of other runs continue.
Directories of other runs next to RUN_DIRECTORY are removed where nothing in them changed for KEEP_DAYS (empty: they
are kept).

``started DIRECTORY OWNER`` has exit code 1 where no agent was started in a node directory.

OWNER names the coordinator's machine and run directory. ``clear``, ``started`` and ``follow`` fail with exit code 5
where another owner follows the job: a copy of the run directory does not take it over.

``follow DIRECTORY OWNER`` sends the files of a node directory while they grow, until its agent has ended. Files of
subdirectories follow at the end, unless they are large. Standard input: first a line of JSON,
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

REFUSED = 5
"""Exit code where content is damaged, or another coordinator follows a job."""
_CLEAR_TIMEOUT_S = 60.0
_SETTLE_S = 0.3
_HEARTBEAT_TIMEOUT_S = 45.0
_CHUNK = 1 << 18
_GROWING = (".log", ".jsonl")
_HEARTBEAT = "coordinator.heartbeat"
_LARGEST_FILE = 32 << 20
_LARGEST_TOTAL = 256 << 20
"""Bytes of a file in a subdirectory, and of all of them, up to which they are sent."""
_OWNER = ".coordinator"
"""Names the owner that follows the job, and is locked while it does."""
_HIDDEN = ("agent.lock", "agent.code", "stop.requested", "stop.now", _HEARTBEAT)


class _RefusedError(Exception):
    """The content of a file does not match its checksum, or another coordinator follows a job."""


class _Follower:
    """Sends the files of a directory, and records which bytes of each were sent."""

    def __init__(self, directory: str, have: dict[str, int], start_timeout_s: float) -> None:
        self.directory = directory
        self.sent: dict[str, tuple[int | None, int, int]] = {
            name: (None, size, 0) for name, size in have.items() if name.endswith(_GROWING)
        }
        self.started_by = time.monotonic() + start_timeout_s

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def scan(self) -> None:
        for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name in _HIDDEN or not entry.is_file(follow_symlinks=False):
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
                if stat.st_size > _LARGEST_FILE or total + stat.st_size > _LARGEST_TOTAL:
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
            if name.endswith(_GROWING) or modified == stat.st_mtime_ns:
                return
            offset = 0
        with open(self.path(name), "rb") as file:
            file.seek(offset)
            while True:
                chunk = file.read(_CHUNK)
                if chunk or offset == 0:
                    _emit({"file": name, "offset": offset, "size": len(chunk)}, chunk)
                offset += len(chunk)
                if len(chunk) < _CHUNK:
                    break
        self.sent[name] = (stat.st_ino, offset, stat.st_mtime_ns)

    def end(self) -> str | None:
        """Return how the agent ended, or None while it runs or may still start."""
        locked = is_locked(self.path("agent.lock"))
        if locked:
            return None
        for name, end in (("exit.json", "exit"), ("agent.code", "dead")):
            if os.path.exists(self.path(name)):
                return end
        if not os.path.exists(self.path(".started")):
            return "never"
        if locked is False:
            time.sleep(_SETTLE_S)
            return "exit" if os.path.exists(self.path("exit.json")) else "dead"
        return "dead" if time.monotonic() > self.started_by else None

    def checksums(self) -> dict[str, str]:
        sums = {}
        for name in sorted(self.sent):
            digest = hashlib.sha256()
            try:
                with open(self.path(name), "rb") as file:
                    for chunk in iter(lambda: file.read(_CHUNK), b""):
                        digest.update(chunk)
            except FileNotFoundError:
                continue
            sums[name] = digest.hexdigest()
        return sums


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


def _require_owner(directory: str, owner: str) -> None:
    """Raise RefusedError where a coordinator with another run directory follows the job in a node directory."""
    path = os.path.join(directory, _OWNER)
    if is_locked(path):
        with open(path, "rb") as file:
            other = os.fsdecode(file.read())
        if other != owner:
            where = other.partition(" ")[2]
            raise _RefusedError("another coordinator follows this run, from %s: use that directory" % where)


def _hold(directory: str, owner: str) -> None:
    """Name the owner that follows the job, until this program ends; not where the disk is full or read-only."""
    try:
        descriptor = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the program of a lost connection may still hold it, too
        name = os.fsencode(owner)
        if os.read(descriptor, len(name) + 1) != name:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, name, 0)
    except OSError:
        return


def _emit(header: dict[str, object], content: bytes = b"") -> None:
    """Write one frame; :func:`main` flushes after several, which saves packets."""
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + content)


def _listen(directory: str, timeout: float) -> bool:
    """Read requests for ``timeout`` seconds; returns whether any came. Exits where the connection was closed."""
    ready, _, _ = select.select([0], [], [], timeout)
    if not ready:
        return False
    requests = os.read(0, 4096)
    if not requests:
        sys.exit(0)
    _touch(os.path.join(directory, _HEARTBEAT))
    for letter, name in ((b"s", "stop.requested"), (b"k", "stop.now")):
        if letter in requests:
            _touch(os.path.join(directory, name))
    return True


def _touch(path: str) -> None:
    """Create a file or update its time; errors are ignored, as the agent ends by itself on a full disk."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
        os.utime(path)
    except OSError:
        return


def _follow(directory: str, owner: str) -> None:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: the rest is for _listen
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    request = json.loads(line)
    if not os.path.isdir(directory):
        _emit({"end": "never", "sha256": {}, "left": {}})
        sys.stdout.buffer.flush()
        return
    _require_owner(directory, owner)
    _hold(directory, owner)
    follower = _Follower(directory, request["have"], request["start_timeout_s"])
    last_heartbeat = time.monotonic()
    while True:
        end = follower.end()
        if request["send"]:
            follower.scan()
        elif end == "exit":
            follower.sent["exit.json"] = (None, 0, 0)
        if end is not None:
            left = follower.scan_subdirectories(request["skip"]) if request["send"] else {}
            _emit({"end": end, "sha256": follower.checksums(), "left": left})
            sys.stdout.buffer.flush()
            return
        sys.stdout.buffer.flush()
        if _listen(directory, request["poll_s"]):
            last_heartbeat = time.monotonic()
            _emit({"heard": True})
        elif time.monotonic() - last_heartbeat > _HEARTBEAT_TIMEOUT_S:
            return


def _content_of(digest: str, size: int) -> bytes:
    content = sys.stdin.buffer.read(size)
    if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
        raise _RefusedError("damaged in transfer: %d of %d bytes" % (len(content), size))
    return content


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = "%s.%d.part" % (path, os.getpid())
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def _receive_wheel(path: str, digest: str, size: int) -> None:
    import shutil
    import zipfile  # imported here: slow, and seldom needed

    archive = "%s.%d.whl" % (path, os.getpid())
    directory = "%s.%d.tree" % (path, os.getpid())
    _write(archive, _content_of(digest, size))
    try:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(directory)
        os.rename(directory, path)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.unlink(archive)
        shutil.rmtree(directory, ignore_errors=True)


def _remove_old_runs(runs: str, keep: str, newer_than: float) -> None:
    """Remove ended runs that have not changed since a time; errors are ignored."""
    import shutil

    for entry in os.scandir(runs) if os.path.isdir(runs) else ():
        if entry.path == keep or not entry.is_dir(follow_symlinks=False):
            continue
        places = [place for place, _, _ in os.walk(entry.path)]
        try:
            changed = max(os.lstat(place).st_mtime for place in places)
        except OSError:
            continue
        if changed < newer_than and not any(is_locked(os.path.join(place, "agent.lock")) for place in places):
            shutil.rmtree(entry.path, ignore_errors=True)


def _clear(run: str, node: str, keep_days: str, owner: str) -> int:
    """Remove the attempt; returns the exit code."""
    deadline = time.monotonic() + _CLEAR_TIMEOUT_S
    stopped: set[str] = set()
    while True:
        left = [place for place, _, _ in os.walk(run) if is_locked(os.path.join(place, "agent.lock"))]
        if not left:
            break
        for place in set(left) - stopped:
            _require_owner(place, owner)
            os.close(os.open(os.path.join(place, "stop.now"), os.O_WRONLY | os.O_CREAT, 0o644))
        stopped.update(left)
        if time.monotonic() > deadline:
            sys.stderr.write("an earlier attempt does not end: %s\n" % left[0])
            return 7
        time.sleep(0.1)
    if node and os.path.isdir(node):
        number = 1
        while os.path.exists("%s.attempt%d" % (node, number)):
            number += 1
        os.rename(node, "%s.attempt%d" % (node, number))
    if keep_days:
        _remove_old_runs(os.path.dirname(run), run, time.time() - float(keep_days) * 86400)
    sys.stdout.write("%d\n" % len(stopped))
    return 0


def main(verb: str, *arguments: str) -> int:
    """Carry out one form; returns the exit code."""
    try:
        if verb == "follow":
            _follow(*arguments)
        elif verb == "started":
            _require_owner(*arguments)
            return 0 if os.path.isdir(os.path.join(arguments[0], ".started")) else 1
        elif verb == "clear":
            return _clear(*arguments)
        elif verb == "wheel":
            _receive_wheel(arguments[0], arguments[1], int(arguments[2]))
        else:
            for path, digest, size in json.loads(sys.stdin.buffer.readline()):
                _write(path, _content_of(digest, size))
    except BrokenPipeError:
        os._exit(0)
    except _RefusedError as error:
        sys.stderr.write("%s\n" % error)
        return REFUSED
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (error.filename or "disk", error.strerror))
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
