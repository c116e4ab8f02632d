"""The coordinator raises its limit of open files for the hosts that it connects to."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
from accelmark.run.launchers.ssh.launcher import raise_descriptor_limit
from accelmark.spec.errors import RequestError
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
try:
    raise_descriptor_limit(1000)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except RequestError as error:
    print(error)
"""


def limit(hard: int) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(hard)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_is_raised_or_refused_with_what_to_do() -> None:
    assert limit(4000) == "2256"
    assert limit(500) == (
        "1000 hosts need 2256 open files, this machine allows 500: raise the hard limit (ulimit -Hn 2256, or nofile in"
        " limits.conf)"
    )
