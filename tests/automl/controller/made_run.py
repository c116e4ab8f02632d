"""A consistent synthetic search of two trials, whose journal tests can change line by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from accelmark.automl.config import AutomlConfig, DatasetConfig, ScheduleConfig, SearchConfig, TrainingConfig
from accelmark.automl.journal import (
    JOURNAL_FILE,
    EpochEvent,
    Event,
    Heartbeat,
    Journal,
    Proposed,
    SearchDirectory,
    SessionBegan,
    SessionEnded,
    TrialEvent,
    Valued,
    read_journal,
)
from accelmark.automl.model.counting import count
from accelmark.automl.records import EpochRecord, Hyperparameters, Individual, OperationCost, Splits, TrialRecord
from tests.automl.images import tiny_network

Lines = list[dict[str, Any]]


def made_config(**changes: object) -> AutomlConfig:
    plain = AutomlConfig(
        network="net.json",
        dataset=DatasetConfig(name="arrays", directory=Path("images.npz"), validation_share=0.2),
        search=SearchConfig(method="none"),
        schedule=ScheduleConfig(max_trials=2, max_duration=100.0, round_epochs=(2,), tuning_round=None),
        training=TrainingConfig(batch_size=32, learning_rate=0.05),
    )
    return plain.model_copy(update=changes)


def _trial(number: int, began_s: float) -> list[tuple[float, Event]]:
    counted = count(tiny_network(), "accelmark")
    record = TrialRecord(
        trial=number,
        individual=number,
        round=number + 1,
        attempt=1,
        worker=0,
        parent=number - 1 if number else None,
        morphs=(),
        hyperparameters=Hyperparameters(batch_size=32, learning_rate=0.05),
        tuned=False,
        weights="from-scratch",
        epochs_planned=2,
        cost=OperationCost(
            forward=counted.forward, backward=counted.backward, evaluation=counted.evaluation, update=counted.update
        ),
        parameters=counted.parameters,
        started_s=began_s,
    )
    epochs = [
        EpochRecord(
            trial=number,
            epoch=epoch,
            begun_s=began_s + 18 * epoch - 17,
            ended_s=began_s + 18 * epoch + 1,
            trained_images=256,
            evaluated_images=64,
            steps=8,
            training_s=16.0,
            evaluating_s=2.0,
            train_loss=1.0,
            validation_loss=1.0 / epoch,
            validation_accuracy=(40 + epoch) / 64,
            complete=True,
        )
        for epoch in (1, 2)
    ]
    result = {"ended_s": began_s + 40, "status": "finished", "held_out_accuracy": 50 / 80, "held_out_s": 2.0}
    driver = {"precision": "fp32", "ranks": 1, "trained_images": 512, "computing_s": 30.0}
    done = record.model_copy(update=result | driver)
    return [
        (began_s, TrialEvent(trial=record)),
        *((epoch.ended_s, EpochEvent(epoch=epoch)) for epoch in epochs),
        (began_s + 40, TrialEvent(trial=done)),
        (began_s + 40, Valued(individual=number, status="observed", value=42 / 64)),
    ]


def made_run(folder: Path, config: AutomlConfig | None = None) -> SearchDirectory:
    """Write the run; it was asked for ``config``."""
    network = tiny_network()
    run = SearchDirectory.create(folder, config or made_config(), network)
    session = SessionBegan(
        at="2026-11-21T00:00:00+00:00",
        clock_s=0.0,
        monotonic_s=0.0,
        host="host",
        pid=1,
        experiment=run.name,
        dataset_fingerprint="f",
        dataset_identity="arrays",
        splits=Splits(training=256, validation=64, held_out=80, classes=network.classes),
        workers=1,
    )
    beats: list[tuple[float, Event]] = [(float(second), Heartbeat(clock_s=second)) for second in range(86)]
    timed = sorted([*_trial(0, 1.5), *_trial(1, 42.5), *beats], key=lambda one: one[0])
    with closing(Journal(run.path)) as journal:
        journal.write(Proposed(individual=Individual(id=0, network=network), searcher="seed"))
        journal.write(Proposed(individual=Individual(id=1, network=network, parent=0), searcher="none"))
        journal.write(session)
        for _, event in timed:
            journal.write(event)
        journal.write(SessionEnded(clock_s=86.0, reason="trials", over=True))
    return run


def forge(run: SearchDirectory, change: Callable[[Lines], None]) -> None:
    """Change a journal's lines, and write it anew as if it had been so from the beginning."""
    path = run.path / JOURNAL_FILE
    lines: Lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = list(read_journal(run.path))
    path.unlink()
    with closing(Journal(run.path)) as journal:
        for event in events:
            journal.write(event)
