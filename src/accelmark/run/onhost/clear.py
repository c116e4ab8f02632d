"""Makes room for a new attempt: ``clear RUN_DIRECTORY NODE_DIRECTORY``.

Ends agents of the run that still live on this host (an earlier attempt that was out of reach, say), and puts the node
directory of an earlier attempt aside. Agents of other runs are left alone.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

PATIENCE_S = 60.0


def lives(lock: str) -> bool:
    """Tell whether the agent that locks ``lock`` lives."""
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


def living(run: str) -> list[str]:
    """Return the directories of the run's living agents."""
    places = [place for place, _, files in os.walk(run) if "agent.lock" in files]
    return [place for place in places if lives(os.path.join(place, "agent.lock"))]


def main(run: str, node: str) -> int:
    """Make room; returns the exit code."""
    deadline = time.monotonic() + PATIENCE_S
    asked: set[str] = set()
    while True:
        left = living(run)
        if not left:
            break
        for place in left:
            if place not in asked:
                asked.add(place)
                os.close(os.open(os.path.join(place, "stop.now"), os.O_WRONLY | os.O_CREAT, 0o644))
        if time.monotonic() > deadline:
            sys.stderr.write("an earlier attempt does not end: %s\n" % left[0])
            return 7
        time.sleep(0.1)
    if node and os.path.isdir(node):
        number = 1
        while os.path.exists("%s.attempt%d" % (node, number)):
            number += 1
        os.rename(node, "%s.attempt%d" % (node, number))
    sys.stdout.write("%d\n" % len(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
