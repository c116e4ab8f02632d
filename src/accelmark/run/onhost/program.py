"""Programs that run on a host, for preflight and for the files of a run, as one file of standard library.

``probe`` reads a request as one line of JSON, ``packages REQUEST`` has it as its argument; they report the state of the
host and the packages of this Python. ``state DIRECTORY`` reports possible causes of the end of a node agent that left
no record in its directory. ``listen PORT TOKEN`` answers connections with the token until standard input ends; ``reach
ADDRESS PORT TOKEN TIMEOUT`` checks that this listener answers. Each prints its answer as one line of JSON.

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

import errno
import fcntl
import hashlib
import json
import os
import re
import select
import socket
import sys
import time
from typing import Any

HOST_LOCK = "accelmark-host"
"""Abstract socket address that is bound while a job runs; a second one, with the run after a slash, names it."""
KILLED_FOR_MEMORY = "ut of memory: Killed process"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  where ranks share memory
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_KERNEL_LOG = "/dev/kmsg"
_TYPES = ["eval_type_backport"] if sys.version_info < (3, 10) else []
"""pydantic reads types of Python 3.10 with this module."""
REFUSED = 5
"""Exit code where content is damaged, or another coordinator follows a job."""
_CLEAR_TIMEOUT_S = 60.0
_SETTLE_S = 0.3
_CHUNK = 1 << 18
_GROWING = (".log", ".jsonl")
_HEARTBEAT = "coordinator.heartbeat"
_LARGEST_FILE = 32 << 20
_LARGEST_TOTAL = 256 << 20
"""Bytes of a file in a subdirectory, and of all of them, up to which they are sent."""
_OWNER = ".coordinator"
"""Names the owner that follows the job, and is locked while it does."""
_HIDDEN = ("agent.lock", "agent.code", "stop.requested", "stop.now", _HEARTBEAT)


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _free_mib(path: str) -> float:
    stat = os.statvfs(_existing(path))
    return stat.f_bavail * stat.f_frsize / 2**20


def _write_problem(path: str, mounted: str | None) -> str | None:
    """Return why ``path`` cannot be written, or None; ``mounted`` is a directory above it that must exist."""
    if mounted is not None and not os.path.isdir(mounted):
        return "%s is missing" % mounted
    if os.path.exists(path) and os.stat(path).st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    name = os.path.join(_existing(path), ".probe.%d" % os.getpid())
    try:
        with open(name, "wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return None


def _text(raw: bytes) -> str:
    """Return bytes as text that JSON can hold, whatever their encoding."""
    return raw.decode("utf-8", "backslashreplace")


def _text_of(path: str) -> str:
    with open(path, "rb") as file:
        return _text(file.read()).strip()


def _last_line(errors: bytes, code: int) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "exit code %d" % code


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _refusal(url: str) -> str | None:
    """Return why nothing accepts connections at a URL, or None where something does."""
    from urllib.parse import urlsplit  # imported here: slow, and seldom needed

    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), 10.0).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def holder() -> str | None:
    """Return the run that has locked this host, or None."""
    lines = [line.partition("@" + HOST_LOCK) for line in _text_of("/proc/net/unix").split("\n")]
    runs = [rest[1:] for _, lock, rest in lines if lock and rest[:1] in ("", "/")]
    return (max(runs) or "another run") if runs else None


def _sees_lock(path: str) -> bool:
    """Return whether a file that another machine has locked is locked here, too; True where it is missing."""
    try:
        return is_locked(path) is not False
    except OSError:
        return True


def _engine_problem(check: list[str]) -> str | None:
    """Return the problem of a container engine, which a command checks, or None."""
    import shutil
    import subprocess  # imported here: slow, and seldom needed

    if shutil.which(check[0]) is None:
        return "is not on the PATH"
    try:
        done = subprocess.run(check, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "does not answer (%s)" % error
    return "does not work: %s" % _last_line(done.stderr, done.returncode) if done.returncode else None


def _lacking(modules: list[str]) -> list[str]:
    import importlib.machinery
    import site

    site.main()
    return [name for name in modules if importlib.machinery.PathFinder.find_spec(name) is None]


def _probe(request: dict[str, Any]) -> dict[str, object]:
    work = request["work_directory"]
    sys.path[:0] = request.get("python_path", ())
    return {
        "time": time.time(),
        "hostname": _text(os.fsencode(socket.gethostname())),
        "boot_id": _text_of(_BOOT_ID),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "not_writable": _write_problem(work, request["mounted"]),
        "free_mib": _free_mib(work),
        "memory_mib": int(_text_of("/proc/meminfo").split("MemAvailable:")[1].split()[0]) / 1024,
        "shared_memory_mib": _free_mib(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else None,
        "cpus": len(os.sched_getaffinity(0)),
        "load1": os.getloadavg()[0],
        "busy_ports": [port for port in request["ports"] if not _is_free(port)],
        "refusals": {url: why for url in request["urls"] if (why := _refusal(url)) is not None},
        "missing_directories": [path for path in request["directories"] if not os.path.isdir(path)],
        "missing_files": [path for path in request["files"] if not os.path.exists(path)],
        "lacking_modules": _lacking([*request["modules"], *_TYPES]),
        "engine_problem": _engine_problem(request["engine"]) if request["engine"] else None,
        "held_by": holder() if request["is_locked"] else None,
        "sees_lock": _sees_lock(request["locked_file"]) if request["locked_file"] else None,
        "may_clear_caches": os.access("/proc/sys/vm/drop_caches", os.W_OK),
    }


def _broken(modules: dict[str, list[str]]) -> dict[str, str]:
    """Import the modules of each name in a separate process; return the failures, with the error's last line."""
    import subprocess

    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = {}
    for name, imported in modules.items():
        if imported:
            command = [sys.executable, "-W", "ignore", "-c", "import %s" % ", ".join(imported)]
            processes[name] = subprocess.Popen(command, stdin=null, stdout=null, stderr=pipe, env=environment)
    problems = {}
    for name, process in processes.items():
        _, errors = process.communicate()
        if process.returncode != 0:
            problems[name] = _last_line(errors, process.returncode)
    return problems


def _packages(request: dict[str, Any]) -> dict[str, object]:
    import importlib.machinery
    import importlib.metadata  # imported here: slow
    import site

    site.main()
    sys.path[:0] = request["python_path"]
    versions: dict[str, str | None] = {}
    for name in request["distributions"]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    modules = {name: [name] for name in request["modules"] if importlib.machinery.PathFinder.find_spec(name)}
    for name in request["imports"]:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
        modules[name] = sorted(folders | {file.stem for file in files if len(file.parts) == 1 and file.suffix == ".py"})
    return {
        "executable": sys.executable,
        "python": list(sys.version_info[:3]),
        "versions": versions,
        "broken": _broken(modules),
    }


def _report(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def kernel_messages(since_s: float, pattern: re.Pattern[str]) -> tuple[list[str], str | None]:
    """Return the kernel's messages since a time after boot that match, and why they cannot be read, or None."""
    messages: list[str] = []
    try:
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return messages, "%s: %s" % (_KERNEL_LOG, error.strerror)
    try:
        while True:
            try:
                header, _, message = os.read(log, 8192).decode(errors="replace").partition(";")
            except BrokenPipeError:  # overwritten while it was read
                continue
            stamp = header.split(",")[2] if header.count(",") > 1 else ""
            line = message.partition("\n")[0]
            if stamp.isdigit() and int(stamp) / 1e6 >= since_s and pattern.search(line):
                messages.append(line)
    except BlockingIOError:
        return messages, None
    except OSError as error:
        return messages, "%s: %s" % (_KERNEL_LOG, error.strerror)
    finally:
        os.close(log)


def _state(directory: str) -> dict[str, object]:
    """Return possible causes of the end of an agent without a record in its directory."""
    code, task = (os.path.join(directory, name) for name in ("agent.code", "agent.json"))
    age_s = time.time() - os.stat(task).st_mtime if os.path.exists(task) else 0.0
    killed, _ = kernel_messages(time.monotonic() - age_s, re.compile(KILLED_FOR_MEMORY))
    return {
        "boot_id": _text_of(_BOOT_ID),
        "exit_code": _text_of(code) if os.path.exists(code) else "",
        "messages": [why for why in (_write_problem(directory, None), *killed[-1:]) if why is not None],
    }


def _answer(port: int, token: str) -> None:
    """Answer connections with the token, for a minute at most."""
    server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        if server.family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
    except OSError as error:
        _report(ok=False, why=error.strerror)
        return
    server.listen(128)
    _report(ok=True)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ready, _, _ = select.select([server.fileno(), 0], [], [], 1)
        if 0 in ready and not os.read(0, 4096):
            return
        if server.fileno() in ready:
            peer, _ = server.accept()
            with peer:
                peer.sendall(token.encode())


def _reach(address: str, port: int, token: str, timeout: float) -> None:
    try:
        with socket.create_connection((address, port), timeout) as peer:
            ok = peer.makefile("rb").read(len(token)) == token.encode()
        _report(ok=ok, why=None if ok else "another program answers")
    except OSError as error:
        _report(ok=False, why=error.strerror or str(error))


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
        elif time.monotonic() - last_heartbeat > 45.0:
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
    import io
    import shutil
    import zipfile  # imported here: slow, and seldom needed

    directory, content = "%s.%d.tree" % (path, os.getpid()), _content_of(digest, size)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as wheel:
            wheel.extractall(directory)
        os.rename(directory, path)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
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
        if verb == "probe":
            _report(**_probe(json.loads(sys.stdin.readline())))
        elif verb == "packages":
            _report(**_packages(json.loads(arguments[0])))
        elif verb == "state":
            _report(**_state(arguments[0]))
        elif verb == "listen":
            _answer(int(arguments[0]), arguments[1])
        elif verb == "reach":
            _reach(arguments[0], int(arguments[1]), arguments[2], float(arguments[3]))
        elif verb == "follow":
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
