"""What a process and its children spend is not the work of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from accelmark.run.agent.background_load import BackgroundLoad

TICK_S = 0.1
"""Of the kernel's counters, over all cores, and some room."""


def test_what_this_process_and_those_it_waited_for_spend_is_taken_off() -> None:
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
