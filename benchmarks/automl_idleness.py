"""How much of the workers' time inside a real run was neither training nor evaluating.

accelmark automl run -c examples/automl-fashion.yaml --runs runs
python -m benchmarks.automl_idleness RUN_DIRECTORY
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.summary import summarise
from accelmark.automl.verify import verify_run
from benchmarks.automl_figures import stamp, write_figures


def main() -> None:
    """Read a run and write its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    run = RunDirectory(parser.parse_args().run)
    summary, verified = summarise(run), verify_run(run)
    state = run.state()
    gaps: list[float] = []
    for worker in range(summary.utilisation.workers):
        spans = sorted(
            (record.started_s, record.ended_s)
            for record in state.attempts.values()
            if record.worker == worker and record.ended_s is not None
        )
        gaps += [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    used = summary.utilisation
    figures = {
        **stamp(),
        "command": "accelmark automl run -c examples/automl-fashion.yaml; python -m benchmarks.automl_idleness RUN",
        "run_began": state.sessions[0].at,
        "duration_s": summary.duration_s,
        "workers": used.workers,
        "idle_share": used.idle_share,
        "training_s": used.training_s,
        "evaluating_s": used.evaluating_s,
        "available_s": used.available_s,
        "mean_gap_between_trials_s": sum(gaps) / len(gaps) if gaps else None,
        "trials": summary.trials,
        "score": summary.final.score,
        "error": summary.final.error,
        "search_error": summary.final.search_error,
        "verdict": verified.verdict,
    }
    del figures["load_average"]
    table = [
        "| Workers | Duration | Idle | Training | Evaluating | Mean gap between trials | Trials | Held-out error |",
        "|---:|---:|---:|---:|---:|---:|---|---:|",
        f"| {used.workers} | {summary.duration_s:.1f} s | {used.idle_share or 0:.3%} | {used.training_s:.1f} s"
        f" | {used.evaluating_s:.1f} s | {figures['mean_gap_between_trials_s']:.3f} s"
        f" | {', '.join(f'{number} {status}' for status, number in summary.trials.items())}"
        f" | {summary.final.error if summary.final.error is not None else float('nan'):.4f} |",
        "",
        "Other work ran on the same two cores meanwhile (load average around 9): the score is not the machine's best.",
    ]
    write_figures("automl_idleness", figures, table)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
