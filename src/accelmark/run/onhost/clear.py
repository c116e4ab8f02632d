"""Remove an earlier attempt: ``clear RUN_DIRECTORY NODE_DIRECTORY``.

Ends agents of the run that still run on this host, after a lost connection for example, and renames the node directory
of an earlier attempt. Agents of other runs continue.
"""

from __future__ import annotations

import fcntl
import os
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


def main(run: str, node: str) -> int:
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
    sys.stdout.write("%d\n" % len(stopped))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
