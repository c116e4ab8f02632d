"""CPU time of a process and its children is not background load."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from accelmark.run.agent.host import BackgroundLoad

TICK_S = 0.1
"""Resolution of the kernel's counters over all cores, with a margin."""


def test_cpu_time_of_this_process_and_its_children_is_subtracted() -> None:
    others, began = BackgroundLoad(), time.monotonic()
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    until = time.process_time() + 0.4
    while time.process_time() < until:
        pass
    counted = others.cpu_s()
    all_there_was = (os.cpu_count() or 1) * (time.monotonic() - began)
    assert counted is not None
    assert counted <= all_there_was - 0.8 + TICK_S
