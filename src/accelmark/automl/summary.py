"""How a run stands: every figure that a screen, a report or a program asks for, computed from its journal."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from accelmark.automl.config import AutomlConfig
from accelmark.automl.counting import Mode
from accelmark.automl.engine.journal import Note
from accelmark.automl.engine.recording import Consumption, consumption_of
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.engine.state import RunState
from accelmark.automl.records import Record
from accelmark.automl.rules import Facts, Verdict, judge, preset
from accelmark.automl.score import ScorePoint

Standing = Literal["running", "over", "stopped", "interrupted"]

SMOKE_STEP_S = 30.0
FULL_STEP_S = 360.0


class PointRow(Record):
    """One row of the table: the figures at one moment."""

    time_h: float
    operations: float
    score: float
    error: float | None
    search_error: float | None
    regulated_score: float | None
    regulated_search_score: float | None

    @staticmethod
    def of(point: ScorePoint, started_s: float) -> PointRow:
        """Make a row, its time counted in hours from the first trial's start."""
        return PointRow(
            time_h=(point.time_s - started_s) / 3600,
            operations=point.operations,
            score=point.score,
            error=point.error,
            search_error=point.search_error,
            regulated_score=point.regulated_score,
            regulated_search_score=point.regulated_search_score,
        )


class JudgementRecord(Record):
    """VALID or INVALID by which rules, with all reasons and disclosures."""

    rules: str
    version: int
    verdict: Verdict
    reasons: tuple[str, ...]
    disclosures: tuple[str, ...]


class UtilisationRecord(Record):
    """How the workers' time was spent, in seconds over all workers; ``idle_share`` None before anything ran."""

    workers: int
    available_s: float
    training_s: float
    evaluating_s: float
    idle_share: float | None


class Summary(Record):
    """All figures of a run, versioned."""

    schema_version: Literal[1] = 1
    run: str
    standing: Standing
    ended_because: str | None
    duration_s: float
    counting: Mode
    dataset: str
    method: str
    trials: dict[str, int]
    trials_started: int
    epochs: int
    trained_images: int
    final: PointRow
    series: tuple[PointRow, ...]
    utilisation: UtilisationRecord
    best_trial: int | None
    consumption: Consumption
    judgement: JudgementRecord
    interruptions: int
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def summarise(run: RunDirectory, *, state: RunState | None = None) -> Summary:
    """Compute a run's figures; raises RunError or JournalError when it cannot be read."""
    config = run.config()
    known = state or run.state()
    board = known.scoreboard()
    final = board.final()
    judged = judge(preset(config.rules), facts_of(config, known))
    used = known.utilisation()
    epochs = known.useful_epochs()
    best = board.best_trial_at(known.clock_s + 1)
    step_s = FULL_STEP_S if config.rules == "aiperf-v1" else SMOKE_STEP_S
    return Summary(
        run=run.name,
        standing=_standing(run, known),
        ended_because=known.ended.reason if known.ended is not None else None,
        duration_s=board.ended_s - board.started_s,
        counting=config.counting,
        dataset=config.dataset.name,
        method=config.search.method,
        trials=dict(Counter(record.status for record in known.trials.values())),
        trials_started=len(known.trials),
        epochs=len(epochs),
        trained_images=sum(epoch.trained_images for epoch in epochs),
        final=PointRow.of(final, board.started_s),
        series=tuple(PointRow.of(point, board.started_s) for point in board.series(step_s)),
        utilisation=UtilisationRecord(
            workers=known.workers,
            available_s=used.available_s,
            training_s=used.training_s,
            evaluating_s=used.evaluating_s,
            idle_share=used.idle_share,
        ),
        consumption=consumption_of(run.path, known),
        best_trial=best.trial if best is not None else None,
        judgement=JudgementRecord(
            rules=judged.rules,
            version=judged.version,
            verdict=judged.verdict,
            reasons=judged.reasons,
            disclosures=judged.disclosures,
        ),
        interruptions=known.interruptions,
        failures=tuple(
            f"trial {record.trial}, attempt {record.attempt}: {record.status}: {record.reason}"
            for record in known.attempts.values()
            if record.status not in ("running", "finished", "cut")
        ),
        notes=tuple(_told(note) for note in known.notes),
    )


def facts_of(config: AutomlConfig, state: RunState) -> Facts:
    """Return what a run is judged by, from what was recorded."""
    board = state.scoreboard()
    final = board.final()
    trials = state.trials.values()
    return Facts(
        duration_s=board.ended_s - board.started_s,
        precisions=frozenset(record.precision for record in trials if record.precision is not None),
        held_out_accuracy=None if final.error is None else 1 - final.error,
        search_accuracy=None if final.search_error is None else 1 - final.search_error,
        dataset=_dataset(config, state) + ("" if config.dataset.limit is None else " (a part of it)"),
        pretrained=config.search.initial_weights is not None,
        finished_trials=sum(record.status == "finished" for record in trials),
        interruptions=state.interruptions,
    )


def _dataset(config: AutomlConfig, state: RunState) -> str:
    """Return which data set the workers found; what the configuration calls it where none was recorded."""
    found = {session.dataset_identity for session in state.sessions if session.dataset_identity is not None}
    return " or ".join(sorted(found)) or config.dataset.name


def _standing(run: RunDirectory, state: RunState) -> Standing:
    if run.is_running():
        return "running"
    if state.ended is None:
        return "interrupted"
    return "over" if state.ended.over else "stopped"


def _told(note: Note) -> str:
    return f"{note.clock_s:.1f} s: {note.text}"
