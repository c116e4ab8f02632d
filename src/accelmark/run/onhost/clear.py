"""Remove an earlier attempt: ``clear RUN_DIRECTORY NODE_DIRECTORY KEEP_DAYS``.

Ends agents of the run that still run on this host, after a lost connection for example, and renames the node directory
of an earlier attempt. Agents of other runs continue. Directories of other runs next to RUN_DIRECTORY are removed where
nothing in them changed for KEEP_DAYS (empty: they are kept).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time

TIMEOUT_S = 60.0


def is_running(lock: str) -> bool:
    """Return whether an agent has locked ``lock``."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_old_runs(runs: str, keep: str, newer_than: float) -> None:
    """Remove ended runs that have not changed since a time; errors are ignored."""
    for entry in os.scandir(runs) if os.path.isdir(runs) else ():
        if entry.path == keep or not entry.is_dir(follow_symlinks=False):
            continue
        places = [place for place, _, _ in os.walk(entry.path)]
        try:
            changed = max(os.lstat(place).st_mtime for place in places)
        except OSError:
            continue
        if changed < newer_than and not any(is_running(os.path.join(place, "agent.lock")) for place in places):
            shutil.rmtree(entry.path, ignore_errors=True)


def main(run: str, node: str, keep_days: str) -> int:
    """Remove the attempt; returns the exit code."""
    deadline = time.monotonic() + TIMEOUT_S
    stopped: set[str] = set()
    while True:
        left = [place for place, _, _ in os.walk(run) if is_running(os.path.join(place, "agent.lock"))]
        if not left:
            break
        for place in set(left) - stopped:
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
        remove_old_runs(os.path.dirname(run), run, time.time() - float(keep_days) * 86400)
    sys.stdout.write("%d\n" % len(stopped))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
