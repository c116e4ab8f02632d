"""``python -m accelmark.run.agent.sweep NODE_DIR``: end the processes that a killed agent left; prints how many."""

from __future__ import annotations

import sys
from pathlib import Path

from accelmark.run.agent.processes import sweep

if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))
