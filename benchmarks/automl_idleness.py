"""Compute the share of the workers' time in a search that was neither training nor evaluation.

accelmark automl run -c fashion --runs runs
python -m benchmarks.automl_idleness RUN_DIRECTORY
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from accelmark.automl.journal import SearchDirectory
from accelmark.automl.scoring import summarise, verify_search
from benchmarks.automl_figures import stamp, write_figures


def main() -> None:
    """Read a search and write its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    run = SearchDirectory(parser.parse_args().run)
    summary, verified = summarise(run), verify_search(run)
    state = run.state()
    gaps: list[float] = []
    for worker in range(summary.utilisation.workers):
        spans = sorted(
            (record.started_s, record.ended_s)
            for record in state.attempts.values()
            if record.worker == worker and record.ended_s is not None
        )
        gaps += [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    starts = [epochs[0].begun_s - state.attempts[key].started_s for key, epochs in state.epochs.items()]
    used = summary.utilisation
    figures = {
        **stamp(),
        "command": "accelmark automl run -c fashion; python -m benchmarks.automl_idleness RUN",
        "run_began": state.sessions[0].at,
        "duration_s": summary.duration_s,
        "workers": used.workers,
        "idle_share": used.idle_share,
        "training_s": used.training_s,
        "evaluating_s": used.evaluating_s,
        "available_s": used.available_s,
        "mean_gap_between_trials_s": sum(gaps) / len(gaps) if gaps else None,
        "mean_start_of_a_trial_s": sum(starts) / len(starts) if starts else None,
        "trials": summary.trials,
        "score": summary.final.score,
        "error": summary.final.error,
        "search_error": summary.final.search_error,
        "verdict": verified.verdict,
    }
    del figures["load_average"]
    table = [
        "| Workers | Duration | Idle | Training | Evaluating | Mean start of a trial | Mean gap between trials | Trials"
        " | Held-out error |",
        "|---:|---:|---:|---:|---:|---:|---:|---|---:|",
        f"| {used.workers} | {summary.duration_s:.1f} s | {used.idle_share or 0:.3%} | {used.training_s:.1f} s"
        f" | {used.evaluating_s:.1f} s | {_seconds(starts)} | {_seconds(gaps)}"
        f" | {', '.join(f'{number} {status}' for status, number in summary.trials.items())}"
        f" | {summary.final.error if summary.final.error is not None else float('nan'):.4f} |",
        "",
        "A trial's start is building the network, carrying weights over and the driver's preparation, up to its first"
        " step; with the gap to the trial before it, it is idle time.",
    ]
    write_figures("automl_idleness", figures, table)
    print(json.dumps(figures, indent=2))


def _seconds(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f} s" if values else "none"


if __name__ == "__main__":
    main()
