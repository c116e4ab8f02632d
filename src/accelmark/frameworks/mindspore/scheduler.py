"""``python -m accelmark.frameworks.mindspore.scheduler``: the process through which MindSpore's ranks find each other.

It ends when all ranks have left, or with rank 0, which starts it.
"""

from __future__ import annotations

import ctypes
import signal
from typing import Final

from mindspore.communication import init

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    init("mccl")  # with MS_ROLE=MS_SCHED it returns when the ranks have left
