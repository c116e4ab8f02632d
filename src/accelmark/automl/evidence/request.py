"""Trials, epochs, precision, data set and workers against the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.data.imagenet import HELD_OUT, TRAINING
from accelmark.automl.engine.state import RunState
from accelmark.automl.records import EpochRecord, TrialRecord
from accelmark.automl.schedule import EarlyStop

_END_SLACK_S: Final = 150.0
"""A trial that does not end when it is told to is given up after 120 s; the rest is for a busy machine."""


def against_request(config: AutomlConfig, state: RunState) -> list[str]:
    """Hold the run against what it was asked for."""
    found = [*_sessions(config, state), *_bounds(config, state)]
    epochs: dict[tuple[int, int], list[EpochRecord]] = {}
    for epoch in state.epochs:
        epochs.setdefault((epoch.trial, epoch.attempt), []).append(epoch)
    for key, record in state.attempts.items():
        found.extend(_scheduled(config, record))
        found.extend(_trained_as_asked(config, record))
        found.extend(_epochs(config, record, epochs.get(key, [])))
    return found


def _sessions(config: AutomlConfig, state: RunState) -> list[str]:
    found: list[str] = []
    if not state.sessions:
        return ["no session of this run began"]
    for number, session in enumerate(state.sessions, start=1):
        name, identity = config.dataset.name, session.dataset_identity
        if identity is not None and name != "imagenet" and identity != name:
            found.append(f"session {number} worked on {identity}, where {name} was asked for")
        if identity == "imagenet" and session.splits is not None and config.dataset.limit is None:
            splits = session.splits
            if (splits.training + splits.validation, splits.held_out) != (TRAINING, HELD_OUT):
                found.append(f"session {number}: {splits.training:,} pictures to train on are not imagenet's")
        if session.workers != config.schedule.concurrency:
            found.append(
                f"session {number} had {session.workers} workers, {config.schedule.concurrency} were asked for"
            )
    if len({session.dataset_fingerprint for session in state.sessions}) > 1:
        found.append("its sessions worked on different data")
    return found


def _bounds(config: AutomlConfig, state: RunState) -> list[str]:
    found: list[str] = []
    schedule, trials = config.schedule, state.trials
    if schedule.max_trials is not None and len(trials) > schedule.max_trials:
        found.append(f"{len(trials)} trials were started, {schedule.max_trials} were asked for")
    if sorted(trials) != list(range(len(trials))):
        found.append("its trials are not numbered one after another")
    most = schedule.max_attempts + state.interruptions
    found.extend(
        f"trial {trial}: attempt {attempt}, where {most} are the most"
        for trial, attempt in state.attempts
        if attempt > most
    )
    last_s = max((epoch.ended_s for epoch in state.epochs), default=0.0)
    if schedule.max_duration is not None and last_s > schedule.max_duration + _END_SLACK_S:
        found.append(f"its last epoch ended at {last_s:.1f} s, where {schedule.max_duration:.1f} s were asked for")
    return found


def _scheduled(config: AutomlConfig, record: TrialRecord) -> list[str]:
    schedule = config.schedule.schedule
    found: list[str] = []
    planned = schedule.round_of(record.trial), schedule.epochs_of(record.trial), schedule.tunes(record.trial)
    if (record.round, record.epochs_planned, record.tuned) != planned:
        searched = "searched" if planned[2] else "as configured"
        found.append(
            f"trial {record.trial}: the schedule gives it round {planned[0]}, {planned[1]} epochs and hyperparameters"
            f" {searched}"
        )
    if record.worker >= schedule.concurrency:
        found.append(f"trial {record.trial}: ran on worker {record.worker} of {schedule.concurrency}")
    return found


def _trained_as_asked(config: AutomlConfig, record: TrialRecord) -> list[str]:
    found: list[str] = []
    training, hyper = config.training, record.hyperparameters
    if record.precision not in (None, training.precision):
        found.append(f"trial {record.trial}: computed in {record.precision}, {training.precision} was asked for")
    if record.ranks not in (None, training.devices_per_trial):
        found.append(f"trial {record.trial}: {record.ranks} ranks, {training.devices_per_trial} were asked for")
    batches = {training.batch_size, *(config.tuning.batch_size if record.tuned else ())}
    if hyper.batch_size not in batches:
        found.append(f"trial {record.trial}: a batch of {hyper.batch_size} was not asked for")
    if not record.tuned and hyper.learning_rate != training.learning_rate:
        found.append(f"trial {record.trial}: a learning rate of {hyper.learning_rate} was not asked for")
    return found


def _epochs(config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord]) -> list[str]:
    where = f"trial {record.trial}, attempt {record.attempt}"
    found: list[str] = []
    if [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
        found.append(f"{where}: its epochs are not numbered one after another")
    if any(not epoch.complete for epoch in epochs[:-1]):
        found.append(f"{where}: an epoch follows one that was cut off")
    if len(epochs) > record.epochs_planned:
        found.append(f"{where}: {len(epochs)} epochs, {record.epochs_planned} were planned")
    if record.status == "finished":
        whole = bool(epochs) and epochs[-1].complete
        if not whole or (len(epochs) < record.epochs_planned and not _stopped_early(config, record, epochs)):
            found.append(f"{where}: finished after {len(epochs)} of {record.epochs_planned} epochs without a reason")
    return found


def _stopped_early(config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord]) -> bool:
    """Tell whether the early stop, asked again, ends the trial with its last epoch."""
    if not config.schedule.early_stop:
        return False
    judge = EarlyStop.for_round(record.round)
    asked = [epoch.validation_loss is not None and judge.should_stop(epoch.validation_loss) for epoch in epochs]
    return asked[-1]
