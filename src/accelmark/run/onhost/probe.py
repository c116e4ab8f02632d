"""Report the state of a host: reads a request as one line of JSON, prints the facts as one line of JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time

HOST_LOCK = "accelmark-host"
"""Abstract socket address that is bound while a job runs; a second one, with the run after a slash, names it."""
CONNECT_S = 10.0
"""Time for a connection to a service that a job asks."""


def free_mib(path: str) -> float:
    """Return the free MiB of the file system of ``path``, which need not exist."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize / 2**20


def writable(path: str, mounted: str | None) -> str | None:
    """Return why ``path`` is not writable, or None; ``mounted`` is a directory above it that has to exist."""
    if mounted is not None and not os.path.isdir(mounted):
        return "%s is missing" % mounted
    name = os.path.join(path, ".probe.%d" % os.getpid())
    try:
        os.makedirs(path, exist_ok=True)
        if os.stat(path).st_uid not in (0, os.geteuid()):
            return "belongs to another user"
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


def text_of(path: str) -> str:
    """Return the content of a text file."""
    with open(path) as file:
        return file.read().strip()


def port_is_free(port: int) -> bool:
    """Return whether no process listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def refusal(url: str) -> str | None:
    """Return why nothing accepts connections at a URL, or None where something does."""
    from urllib.parse import urlsplit  # imported here: slow, and seldom needed

    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def holder() -> str | None:
    """Return the run that has locked this host, or None."""
    names = [line.split()[-1] for line in text_of("/proc/net/unix").splitlines() if "@" + HOST_LOCK in line]
    runs = [name.partition(HOST_LOCK + "/")[2] for name in names if HOST_LOCK + "/" in name]
    return (runs or ["another run"])[0] if names else None


def sees_lock(path: str) -> bool:
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


def engine(check: list[str]) -> str | None:
    """Return the problem of a container engine, which a command checks, or None."""
    import shutil
    import subprocess  # imported here: slow, and seldom needed

    if shutil.which(check[0]) is None:
        return "is not on the PATH"
    try:
        done = subprocess.run(check, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "does not answer (%s)" % error
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "does not work: %s" % (lines[-1] if lines else "exit code %d" % done.returncode)


def lacking(modules: list[str]) -> list[str]:
    """Return the modules that this Python lacks."""
    import importlib.machinery
    import site

    site.main()
    return [name for name in modules if importlib.machinery.PathFinder.find_spec(name) is None]


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    work = request["work_directory"]
    sys.path[:0] = request.get("python_path", ())
    found = {
        "time": time.time(),
        "hostname": socket.gethostname(),
        "boot_id": text_of("/proc/sys/kernel/random/boot_id"),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "not_writable": writable(work, request["mounted"]),
        "free_mib": free_mib(work),
        "memory_mib": int(text_of("/proc/meminfo").split("MemAvailable:")[1].split()[0]) / 1024,
        "cpus": len(os.sched_getaffinity(0)),
        "load1": os.getloadavg()[0],
        "busy_ports": [port for port in request["ports"] if not port_is_free(port)],
        "refusals": {url: why for url in request["urls"] if (why := refusal(url)) is not None},
        "missing_directories": [path for path in request["directories"] if not os.path.isdir(path)],
        "missing_files": [path for path in request["files"] if not os.path.exists(path)],
        "lacking_modules": lacking(request["modules"]),
        "engine_problem": engine(request["engine"]) if request["engine"] else None,
        "held_by": holder() if request["is_locked"] else None,
        "sees_lock": sees_lock(request["locked_file"]) if request["locked_file"] else None,
        "may_clear_caches": os.access("/proc/sys/vm/drop_caches", os.W_OK),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
