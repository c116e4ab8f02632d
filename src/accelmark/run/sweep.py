"""``python -m accelmark.run.sweep NODE_DIR``: end what a killed agent left behind on this host; prints how many."""

from __future__ import annotations

import sys
from pathlib import Path

from accelmark.run.processes import sweep

if __name__ == "__main__":
    print(sweep(Path(sys.argv[1])))
