"""Print where the time of inference runs went: ``python -m benchmarks.inference_phases RUN_DIR...``.

A row has the seconds of each round from the state ``running`` until its node agent ended (start of agent and ranks,
records at the end), those of steps 3 to 6, and the measured windows: their calls by the rank's clock, without what is
read, perturbed, staged, evaluated and compared between windows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from accelmark.results.read.rank_log import read_infer_log
from accelmark.results.read.round_dir import ledger_events
from accelmark.spec.settings.inference import InferStep

STEPS = (InferStep.VALIDATE, InferStep.EXPORT, InferStep.COMPILE, InferStep.INFER)
HEADS = ("round", "in all, s", *(f"{step}, s" for step in STEPS), "measured windows of the engine, s", "share")


def rows(run: Path) -> list[list[str]]:
    """Return a row for each round of a run."""
    found = []
    events = list(ledger_events(run))
    for log_path in sorted(run.glob("*/round*/*_noderank0/rank0.out.log")):
        name = str(log_path.parent.parent.relative_to(run))
        own = [event for event in events if event.get("job") == name]
        began = next(event["mono_s"] for event in own if event.get("state") == "running")
        ended = next(event["mono_s"] for event in own if event.get("kind") == "agents_ended")
        log = read_infer_log(log_path)
        windows = log.windows.get("inference", [])
        measured_s = sum(each.computed_ms or sum(each.latency_ms) for each in windows) / 1000
        steps_s = [stage.duration_s if (stage := log.stage(step)) is not None else 0.0 for step in STEPS]
        seconds = [f"{each:.1f}" for each in (ended - began, *steps_s, measured_s)]
        found.append([name, *seconds, f"{measured_s / (ended - began):.0%}"])
    return found


def main() -> None:
    """Print a table."""
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for path in map(Path, sys.argv[1:]):
        for row in rows(path):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
