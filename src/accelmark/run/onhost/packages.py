"""Report packages of a Python: reads a request as one line of JSON, prints the facts as one line of JSON."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import site
import subprocess
import sys


def versions(distributions: list[str]) -> dict[str, str | None]:
    """Return the installed versions of packages; None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def broken(modules: list[str]) -> dict[str, str]:
    """Import each installed module in a process of its own; return those that fail, with the last line of the error."""
    present = [name for name in modules if importlib.machinery.PathFinder.find_spec(name) is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", "import %s" % name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for name in present
    }
    found = {}
    for name, process in processes.items():
        _, errors = process.communicate()
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            found[name] = lines[-1] if lines else "exit code %d" % process.returncode
    return found


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.readline())
    site.main()
    sys.path[:0] = request["python_path"]
    found = {
        "executable": sys.executable,
        "python": list(sys.version_info[:3]),
        "versions": versions(request["distributions"]),
        "broken": broken(request["modules"]),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
