"""Measure start-up time: modules with slow imports, and the time of ``--help`` of every verb.

Run ``python -m benchmarks.startup``; it prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from typing import Final

PROGRAM: Final = [sys.executable, "-c", "from accelmark.cli import main; main()"]
COMMAND: Final = [*PROGRAM, "--help"]
REPEATS: Final = 7
SLOW_MS: Final = 20.0
_LINE: Final = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)")


def profile() -> dict[str, tuple[float, float]]:
    """Return module -> (own time, time with imports) in ms, the minimum of several runs."""
    least: dict[str, tuple[float, float]] = {}
    for _ in range(REPEATS):
        command = [COMMAND[0], "-X", "importtime", *COMMAND[1:]]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for own, all_below, _, name in _LINE.findall(told):
            found = (int(own) / 1e3, int(all_below) / 1e3)
            least[name] = min(least.get(name, found), found, key=lambda pair: pair[1])
    return least


def verbs() -> list[str]:
    """Return the names of all verbs."""
    from typer.main import get_group

    from accelmark.cli.main import app

    return sorted(get_group(app).commands)


def seconds(command: list[str]) -> list[float]:
    """Return the wall times of a command in seconds, over several runs."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    times = seconds(COMMAND)
    of_verbs = {verb: min(seconds([*PROGRAM, verb, "--help"])) for verb in verbs()}
    found = profile()
    date, version = time.strftime("%Y-%m-%d", time.gmtime()), platform.python_version()
    print(f"{date}, {platform.machine()}, {os.cpu_count()} cores, Python {version}, load {os.getloadavg()[0]:.1f}\n")
    print(f"`accelmark --help`: least {min(times):.3f} s, median {statistics.median(times):.3f} s of {REPEATS}\n")
    slowest = max(of_verbs, key=lambda verb: of_verbs[verb])
    print(f"The slowest of {len(of_verbs)} verbs, `{slowest} --help`: least {of_verbs[slowest]:.3f} s. All, in ms:")
    print(", ".join(f"{verb} {time_s * 1000:.0f}" for verb, time_s in of_verbs.items()) + ".\n")
    print("| Module | With all below, ms | Own, ms |\n| --- | ---: | ---: |")
    ranked = sorted(found.items(), key=lambda entry: -entry[1][1])
    for name, (own, below) in ranked:
        if below >= SLOW_MS:
            print(f"| `{name}` | {below:.1f} | {own:.1f} |")
    slow = [name for name, (own, _) in ranked if own >= SLOW_MS]
    print(f"\nModules whose own code takes {SLOW_MS:g} ms or more: {', '.join(slow) or 'none'}.")
    heavy = [name for name in ("numpy", "scipy", "plotly", "pydantic", "duckdb", "jinja2", "torch") if name in found]
    print(f"Heavy libraries imported: {', '.join(heavy) or 'none'}.")


if __name__ == "__main__":
    main()
