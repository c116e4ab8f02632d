"""Images, steps and accuracies against the sizes of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.journal import Splits
from accelmark.automl.engine.state import RunState
from accelmark.automl.records import FAILURES, EpochRecord, TrialRecord

_PICTURES_SLACK: Final = 1e-6
"""How far an accuracy times its pictures may be from a whole number: right answers are added in double precision."""


def against_data(config: AutomlConfig, state: RunState) -> list[str]:
    """Hold what was worked against the splits that the sessions wrote down; without splits, nothing can be held.

    A whole epoch trains every full global batch of the training split once, and validates on the whole validation
    split; a part of one trains no more and validates nothing. An accuracy is a whole number of pictures of its split.
    What failed attempts worked is not scored, and may have ended anywhere.
    """
    known = {session.splits for session in state.sessions if session.splits is not None}
    if len(known) > 1:
        return ["its sessions found differently split data"]
    if not known:
        return []
    splits = known.pop()
    found = _splits(config, splits)
    for one in state.individuals:
        if one.network.classes != splits.classes:
            found.append(f"network {one.id} tells {one.network.classes} classes apart, the data have {splits.classes}")
    epochs: dict[tuple[int, int], list[EpochRecord]] = {}
    for epoch in state.epochs:
        epochs.setdefault((epoch.trial, epoch.attempt), []).append(epoch)
    for key, record in state.attempts.items():
        if record.status not in FAILURES:
            found.extend(_trial(config, record, epochs.get(key, ()), splits))
    return found


def _splits(config: AutomlConfig, splits: Splits) -> list[str]:
    found: list[str] = []
    given = splits.training + splits.validation
    if splits.validation != round(given * config.dataset.validation_share):
        found.append(f"{splits.validation} of {given} pictures to validate on are not the share that was asked for")
    limit = config.dataset.limit
    if limit is not None and max(given, splits.held_out) > limit:
        found.append(f"the data have more pictures than the {limit} that were asked for")
    return found


def _trial(config: AutomlConfig, record: TrialRecord, epochs: Iterable[EpochRecord], splits: Splits) -> list[str]:
    ranks = record.ranks or config.training.devices_per_trial
    batch = max(1, min(record.hyperparameters.batch_size, splits.training) // ranks) * ranks
    steps = splits.training // batch
    found: list[str] = []
    if record.status == "finished" and (record.precision is None or record.trained_images is None):
        found.append(f"trial {record.trial}: finished, and the driver's record of it is missing")
    for epoch in epochs:
        where = f"trial {record.trial}, epoch {epoch.epoch}"
        if epoch.trained_images > splits.training:
            found.append(f"{where}: trained {epoch.trained_images} images, the training split has {splits.training}")
        if epoch.trained_images != epoch.steps * batch:
            found.append(f"{where}: {epoch.steps} steps of {batch} images are not the {epoch.trained_images} trained")
        if epoch.steps > steps or (epoch.complete and epoch.steps != steps):
            found.append(f"{where}: {epoch.steps} steps, where an epoch has {steps}")
        whole = splits.validation if epoch.complete else 0
        if epoch.evaluated_images != whole:
            found.append(f"{where}: evaluated {epoch.evaluated_images} images, not the {whole} to validate on")
        if not epoch.complete and epoch.validation_accuracy is not None:
            found.append(f"{where}: has a validation accuracy, and was not validated")
        if not _countable(epoch.validation_accuracy, splits.validation):
            found.append(
                f"{where}: no number of {splits.validation} pictures is {epoch.validation_accuracy:.8f} of them"
            )
    if not _countable(record.held_out_accuracy, splits.held_out):
        found.append(
            f"trial {record.trial}: no number of {splits.held_out} held-out pictures is"
            f" {record.held_out_accuracy:.8f} of them"
        )
    return found


def _countable(accuracy: float | None, pictures: int) -> bool:
    return accuracy is None or abs(accuracy * pictures - round(accuracy * pictures)) <= _PICTURES_SLACK
