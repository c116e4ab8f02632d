"""Check a host, for preflight. Each form prints its answer as one line of JSON.

``probe`` reads a request as one line of JSON, ``packages REQUEST`` has it as its argument; they report the state of the
host and the packages of this Python. ``state DIRECTORY`` reports possible causes of the end of a node agent that left
no record in its directory. ``listen PORT TOKEN`` answers connections with the token until standard input ends; ``reach
ADDRESS PORT TOKEN TIMEOUT`` checks that this listener answers.
"""

from __future__ import annotations

import errno
import fcntl
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
_CONNECT_S = 10.0
"""Time for a connection to a service of a job."""


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
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def holder() -> str | None:
    """Return the run that has locked this host, or None."""
    lines = [line.partition("@" + HOST_LOCK) for line in _text_of("/proc/net/unix").split("\n")]
    runs = [rest[1:] for _, lock, rest in lines if lock and rest[:1] in ("", "/")]
    return (max(runs) or "another run") if runs else None


def _sees_lock(path: str) -> bool:
    """Return whether a file that another machine has locked is locked here, too."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return True  # the file is missing, which is reported
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


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


def _listen(port: int, token: str) -> None:
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


def main(verb: str, *arguments: str) -> None:
    """Carry out one form."""
    if verb == "listen":
        _listen(int(arguments[0]), arguments[1])
    elif verb == "reach":
        _reach(arguments[0], int(arguments[1]), arguments[2], float(arguments[3]))
    elif verb == "state":
        _report(**_state(arguments[0]))
    elif verb == "packages":
        _report(**_packages(json.loads(arguments[0])))
    else:
        _report(**_probe(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main(*sys.argv[1:])
