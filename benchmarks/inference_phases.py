"""Print where the time of inference runs went: ``python -m benchmarks.inference_phases RUN_DIR...``.

A row has the seconds of each round from the state ``running`` until its node agent ended (start of agent and ranks,
records at the end), those of steps 3 to 6, and the measured windows of the framework's and of the engine's passes:
their calls by the rank's clock, without what is read, perturbed, staged, evaluated and compared between windows.
``share`` is that of both, ``engine`` that of the engine's windows alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from accelmark.results.read.rank_log import InferLog, read_log
from accelmark.results.read.round_dir import ledger_events
from accelmark.spec.settings.inference import InferStep

STEPS = (InferStep.VALIDATE, InferStep.EXPORT, InferStep.COMPILE, InferStep.INFER)
WINDOWS = ("framework's windows, s", "engine's windows, s", "share", "engine")
HEADS = ("round", "in all, s", *(f"{step}, s" for step in STEPS), *WINDOWS)


def rows(run: Path) -> list[list[str]]:
    """Return a row for each round of a run."""
    found = []
    events = list(ledger_events(run))
    for log_path in sorted(run.glob("*/round*/*_noderank0/rank0.out.log")):
        name = str(log_path.parent.parent.relative_to(run))
        own = [event for event in events if event.get("job") == name]
        began = next(event["mono_s"] for event in own if event.get("state") == "running")
        ended = next(event["mono_s"] for event in own if event.get("kind") == "agents_ended")
        log = read_log(log_path, InferLog)
        measured_s = [
            sum(each.computed_ms or sum(each.latency_ms) for each in log.windows.get(phase, [])) / 1000
            for phase in ("validation", "inference")
        ]
        steps_s = [stage.duration_s if (stage := log.stage(step)) is not None else 0.0 for step in STEPS]
        seconds = [f"{each:.1f}" for each in (ended - began, *steps_s, *measured_s)]
        shares = [f"{each / (ended - began):.0%}" for each in (sum(measured_s), measured_s[1])]
        found.append([name, *seconds, *shares])
    return found


def main() -> None:
    """Print a table."""
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for path in map(Path, sys.argv[1:]):
        for row in rows(path):
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
