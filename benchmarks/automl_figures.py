"""Write the figures of the AutoML benchmarks to ``results``."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def stamp() -> dict[str, Any]:
    """Return the date, the machine and the command of a measurement."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores of {model}, {platform.system()}",
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_without_place, sys.argv[1:])]
        ),
    }


def _without_place(word: str) -> str:
    """Shorten an absolute path to its last part, since its directories exist on the measuring machine only."""
    return Path(word).name if word.startswith("/") else word


def write_figures(name: str, figures: dict[str, Any], table: list[str]) -> None:
    """Write figures as JSON, and as a table in Markdown."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    told = f"Measured {figures['measured_at']} on {figures['machine']} with `{figures['command']}`."
    (RESULTS / f"{name}.md").write_text("\n".join([told, "", *table]) + "\n", encoding="utf-8")
