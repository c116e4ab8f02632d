"""``python -m accelmark.frameworks.mindspore.scheduler PID``: the process through which the ranks find each other.

It ends when all ranks have left, or with rank 0, the process PID, which starts it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("rank 0 has ended")

    from mindspore.communication import init

    init("mccl")  # with MS_ROLE=MS_SCHED it returns when the ranks have left
