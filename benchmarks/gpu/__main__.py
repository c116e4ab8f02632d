"""``bash benchmarks/gpu.sh run``: measure the campaign's items in order of value, within a budget of seconds."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.session import BUDGET_S, RESERVE_S, ItemError, LeftOutError, ResultsFile, Session, pack_logs

if TYPE_CHECKING:
    from benchmarks.gpu.items import Item

REQUIRED: Final = (
    "jinja2",
    "numpy",
    "packaging",
    "plotly",
    "psutil",
    "pydantic",
    "rich",
    "scipy",
    "torch",
    "transformers",
    "typer",
    "yaml",
)
SLOW: Final = ("torch", "transformers")
"""Of those, the ones whose import takes seconds."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh run", description=__doc__)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds that the call may take")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="files to keep, and what earlier calls left"
    )
    parser.add_argument("--data", type=Path, help="directory with fashion_mnist/ and shakespeare/")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these items only")
    parser.add_argument("--list", action="store_true", help="print the items in order of value, with their limits")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script on any machine")
    return parser.parse_args()


def problem_of(package: str) -> str | None:
    """Return the name of a package that cannot be imported, with the package that it lacks; None where it can be."""
    if package in SLOW:
        return package if find_spec(package) is None else None
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        return package if error.name in (None, package) else f"{error.name} (for {package})"
    return None


def main() -> int:
    """Measure what fits into the budget; return 0 unless an item failed."""
    began = time.monotonic()
    options = parse_arguments()
    if missing := list(filter(None, map(problem_of, REQUIRED))):
        advice = "run from an archive made by `gpu.sh pack`"
        print(f"{sys.executable} lacks {', '.join(missing)}: {advice}", file=sys.stderr)
        return 2
    # Imported here: they need the packages above.
    from benchmarks.gpu.device import device_here
    from benchmarks.gpu.items import ITEMS

    if options.list:
        for item in ITEMS:
            print(f"{item.name}: at most {item.limit_s:.0f} s")
        return 0
    device = device_here()
    if not device.is_accelerator and not options.tiny:
        print("No accelerator was found here. `--tiny` tries the script on the CPU.")
        return 2
    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    deadline = began + options.budget_s - RESERVE_S
    session = Session(device, output, output / "work", deadline, options.tiny, options.data)
    record = ResultsFile(session)
    session.root = output / f"work{record.call}"
    for item in ITEMS:
        if record.is_done(item.name) or (options.only and item.name not in options.only):
            continue
        record.items[item.name] = measured(session, item)
        record.write()
        print(line_of(item.name, record.items[item.name]), flush=True)
    print(f"Written to {record.path} and {pack_logs(session, record.call)}")
    return 1 if any(entry["state"] == "failed" for entry in record.items.values()) else 0


def measured(session: Session, item: Item) -> dict[str, Any]:
    """Measure one item, and return its entry; an item that does not fit is left out with the reason."""
    if item.memory_gib > session.device.memory_gib and not session.tiny:
        reason = f"needs {item.memory_gib:g} GiB of device memory, there are {session.device.memory_gib:.0f}"
        return {"state": "left out", "reason": reason}
    needed_s = min(item.about_s, 5.0) if session.tiny else item.about_s
    if session.left_s() < needed_s:
        reason = f"takes about {needed_s:.0f} s, {max(session.left_s(), 0):.0f} are left: call again"
        return {"state": "left out", "reason": reason}
    began = time.monotonic()
    session.begin(item.name, float("inf") if session.tiny else item.limit_s)
    try:
        entry = {"state": "succeeded", **item.measure(session, item.name)}
    except LeftOutError as error:
        entry = {"state": "left out", "reason": str(error)}
    except (ItemError, OSError, ValueError, KeyError, TypeError) as error:
        entry = {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:1500]}
    took_s = round(time.monotonic() - began, 1)
    session.end()
    return {**entry, "commands": list(session.commands), "took_s": took_s}


def line_of(name: str, entry: dict[str, Any]) -> str:
    """Return one line about an item."""
    parts = [f"{name}: {entry['state']}", entry.get("verdict", ""), entry.get("reason", "")]
    for one in entry.get("rounds", ()):
        steady = one["steady"]
        if steady is not None:
            mfu = "" if steady["mfu"] is None else f", MFU {steady['mfu']:.1%}"
            parts.append(f"{steady['units_per_s']:,.0f} {entry['unit']}/s, {steady['step_ms']:.1f} ms a step{mfu}")
    return "; ".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
