"""Compute the result of a round from the files that its processes wrote."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.read.round_dir import ledger_states, node_dirs, read_job
from accelmark.results.schema import JobState, RoundResult
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import RESULT_FILE
from accelmark.spec.errors import RunError
from accelmark.spec.job import InferJob, TrainingWork


def round_result(round_dir: Path, *, state: JobState | None = None, reason: str | None = None) -> RoundResult:
    """Compute the result of one round, whether it succeeded, failed, was lost or is incomplete.

    Args:
        round_dir: ``<run>/<key slug>/round<N>``.
        state: the state that the coordinator recorded; None reads it from the run's ``events.jsonl``.
        reason: the reason for ``state``.

    Raises:
        RunError: ``job.json`` or a rank's log cannot be read, or the kind of work has no figures.
    """
    job = read_job(round_dir)
    name = f"{round_dir.parent.name}/{round_dir.name}"
    ledger = (state, reason) if state else ledger_states(round_dir.parents[1]).get(name)
    nodes = node_dirs(round_dir)
    match job.work:
        case InferJob():
            from accelmark.results.rounds.inference import infer_round

            return infer_round(job, job.work, nodes, ledger)
        case TrainingWork():
            from accelmark.results.rounds.training import train_round

            return train_round(job, job.work, nodes, ledger)
    raise RunError(f"{round_dir}: no figures are defined for work of kind {job.work.kind!r}")


def write_round(round_dir: Path, *, state: JobState | None = None, reason: str | None = None) -> RoundResult:
    """Compute the result of one round and write its ``result.json``; arguments as for :func:`round_result`."""
    result = round_result(round_dir, state=state, reason=reason)
    write_atomic(round_dir / RESULT_FILE, result.model_dump_json() + "\n")
    return result
