"""Contradictions between a journal and its data, its own clock, its networks and the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.controller import journal
from accelmark.automl.controller.state import SearchState
from accelmark.automl.dataset import IMAGENET_HELD_OUT, IMAGENET_TRAINING
from accelmark.automl.model.counting import count
from accelmark.automl.model.morphs import Morph, MorphError, apply_morph
from accelmark.automl.model.network import Network, find_problems
from accelmark.automl.records import FAILURES, EpochRecord, Hyperparameters, OperationCost, Splits, TrialRecord
from accelmark.automl.scoring.rules import violation
from accelmark.automl.search.schedule import EarlyStop
from accelmark.results.schema import Finding

_SLACK_S: Final = 0.5
_REPORT_DELAY_S: Final = 15.0
"""Longest delay of a worker's event before it is reported: a slow start, a busy network."""
_RANKS_START_S: Final = 600.0
"""The same for trials with several ranks, which may have to be restarted."""
_CLOCK_DRIFT: Final = 0.001
"""Largest drift between two hosts' clocks, relative to the time."""
_COMPUTING: Final = 1.1
"""Largest ratio of computing to training time: a device may still compute queued work when an epoch ends."""
_END_SLACK_S: Final = 150.0
"""A trial that does not end when cut is abandoned after 120 s; the rest allows for a busy machine."""
_COUNT_SLACK: Final = 1e-6
"""Rounding error of an accuracy times its number of images: correct predictions are summed in double precision."""


def contradictions(config: AutomlConfig, events: Sequence[journal.Event], state: SearchState) -> Iterator[Finding]:
    """Yield every contradiction of a journal."""
    epochs: dict[tuple[int, int], list[EpochRecord]] = {key: [] for key in state.attempts}
    for epoch in state.epochs:
        epochs[epoch.trial, epoch.attempt].append(epoch)
    yield from _sessions(config, state)
    yield from _bounds(config, state)
    yield from broken_lineage(events, state)
    splits = {session.splits for session in state.sessions if session.splits is not None}
    if len(splits) > 1:
        yield violation("data", "equal splits in all sessions", "the sessions have different splits")
    known = splits.pop() if len(splits) == 1 else None
    if known is not None:
        yield from _splits(config, state, known)
    for key, record in state.attempts.items():
        yield from _counts(config, record, epochs[key], state)
        yield from _request(config, record, epochs[key])
        yield from _trial_times(record, epochs[key])
        if known is not None and record.status not in FAILURES:  # work of failed attempts is not scored
            yield from _work(config, record, epochs[key], known)
    delay_s = _REPORT_DELAY_S if config.training.devices_per_trial == 1 else _RANKS_START_S
    yield from _clock(events, delay_s)
    yield from _overlaps(state.attempts.values())


def _sessions(config: AutomlConfig, state: SearchState) -> Iterator[Finding]:
    if not state.sessions:
        yield violation("request", "at least one session", "no session of this run began")
    for number, session in enumerate(state.sessions, start=1):
        name, identity, splits = config.dataset.name, session.dataset_identity, session.splits
        if identity is not None and name != "imagenet" and identity != name:
            yield violation("request", f"data set {name}", f"session {number} used {identity}")
        whole = identity == "imagenet" and splits is not None and config.dataset.limit is None
        sizes = splits and (splits.training + splits.validation, splits.held_out)
        if whole and sizes != (IMAGENET_TRAINING, IMAGENET_HELD_OUT):
            yield violation("data", "the number of images of imagenet", f"session {number} had {sizes} images")
        if session.workers != config.schedule.concurrency:
            actual = f"session {number} had {session.workers} workers"
            yield violation("request", f"{config.schedule.concurrency} workers", actual)
    if len({session.dataset_fingerprint for session in state.sessions}) > 1:
        yield violation("data", "equal data in all sessions", "the sessions used different data")


def _bounds(config: AutomlConfig, state: SearchState) -> Iterator[Finding]:
    schedule, trials = config.schedule, state.trials
    if schedule.max_trials is not None and len(trials) > schedule.max_trials:
        yield violation("request", f"at most {schedule.max_trials} trials", f"{len(trials)} trials were started")
    if sorted(trials) != list(range(len(trials))):
        yield violation("request", "trials 0, 1, 2 ...", "trials are not numbered consecutively")
    most = schedule.max_attempts + state.interruptions
    for trial, attempt in state.attempts:
        if attempt > most:
            yield violation("request", f"at most {most} attempts", f"trial {trial} has attempt {attempt}")
    last_s = max((epoch.ended_s for epoch in state.epochs), default=0.0)
    if schedule.max_duration is not None and last_s > schedule.max_duration + _END_SLACK_S:
        expected = f"end after {schedule.max_duration:.1f} s"
        yield violation("request", expected, f"the last epoch ended at {last_s:.1f} s")


def _request(config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord]) -> Iterator[Finding]:
    """Compare a trial with the schedule and training settings."""
    schedule, training, hyper = config.schedule, config.training, record.hyperparameters
    batches = {training.batch_size, *(config.tuning.batch_size if record.tuned else ())}
    planned = schedule.round_of(record.trial), schedule.epochs_of(record.trial), schedule.tunes(record.trial)
    trial = f"trial {record.trial}"
    for name, wanted, actual in (
        ("round", planned[0], record.round),
        ("planned epochs", planned[1], record.epochs_planned),
        ("tuned", planned[2], record.tuned),
        ("precision", training.precision, record.precision),
        ("ranks", training.devices_per_trial, record.ranks),
        ("learning rate", training.learning_rate, hyper.learning_rate if not record.tuned else None),
    ):
        if actual not in (None, wanted):
            yield violation("request", f"{name} {wanted}", f"{trial}: {name} {actual}")
    if hyper.batch_size not in batches:
        expected = f"batch {' or '.join(map(str, sorted(batches)))}"
        yield violation("request", expected, f"{trial}: batch {hyper.batch_size}")
    if record.worker >= schedule.concurrency:
        yield violation("request", f"{schedule.concurrency} workers", f"{trial}: ran on worker {record.worker}")
    trial = f"{trial}, attempt {record.attempt}"
    if [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
        yield violation("request", "epochs 1, 2, 3 ...", f"{trial}: epochs are not numbered consecutively")
    if any(not epoch.complete for epoch in epochs[:-1]):
        yield violation("request", "a cut epoch is the last one", f"{trial}: an epoch follows one that was cut")
    expected = f"{record.epochs_planned} epochs"
    if len(epochs) > record.epochs_planned:
        yield violation("request", expected, f"{trial}: {len(epochs)} epochs")
    if record.status == "finished":
        enough = len(epochs) >= record.epochs_planned or _stopped_early(config, record, epochs)
        if not epochs or not epochs[-1].complete or not enough:
            yield violation("request", f"{expected} or an early stop", f"{trial}: finished after {len(epochs)} epochs")


def _stopped_early(config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord]) -> bool:
    """Return whether the early stop, evaluated again, ends the trial with its last epoch."""
    stop = EarlyStop.for_round(record.round)
    losses = [epoch.validation_loss for epoch in epochs]
    return config.schedule.early_stop and [loss is not None and stop.should_stop(loss) for loss in losses][-1:] == [
        True
    ]


def _counts(
    config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord], state: SearchState
) -> Iterator[Finding]:
    """Count a trial's network and images again."""
    trial, network = f"trial {record.trial}", state.individuals[record.individual].network
    if find_problems(network):
        yield violation("network", "a network that can be built", f"{trial}: its network cannot be built")
        return
    trained = sum(epoch.trained_images for epoch in epochs)
    if record.status not in FAILURES and record.trained_images not in (None, trained):
        actual = f"{trial}: the driver trained {record.trained_images} images"
        yield violation("data", f"{trained} images, the sum of its epochs", actual)
    for epoch in epochs:
        most = epoch.steps * record.hyperparameters.batch_size
        if most < epoch.trained_images:
            actual = f"{trial}, epoch {epoch.epoch}: trained {epoch.trained_images} images, more than its steps hold"
            yield violation("data", f"at most {most} images in {epoch.steps} steps", actual)
    if state.trials[record.trial].attempt == record.attempt:
        counted = count(network, config.counting)
        if record.cost != OperationCost.of(counted):
            yield violation("operations", "the operations of its network", f"{trial}: other operations are recorded")
        if record.flops_per_image not in (None, counted.matrix):
            actual = f"{trial}: the driver counted {record.flops_per_image:.0f} FLOPs per image"
            yield violation("operations", f"{counted.matrix} FLOPs per image", actual)


def _splits(config: AutomlConfig, state: SearchState, splits: Splits) -> Iterator[Finding]:
    given = splits.training + splits.validation
    share = round(given * config.dataset.validation_share)
    if splits.validation != share:
        actual = f"{splits.validation} of {given} images are the validation split"
        yield violation("data", f"{share} validation images, the configured share", actual)
    limit = config.dataset.limit
    if limit is not None and max(given, splits.held_out) > limit:
        yield violation("data", f"at most {limit} images", f"the splits have {given} and {splits.held_out} images")
    for one in state.individuals:
        if one.network.classes != splits.classes:
            actual = f"network {one.id} has {one.network.classes} classes"
            yield violation("data", f"{splits.classes} classes, as the data", actual)


def _work(
    config: AutomlConfig, record: TrialRecord, epochs: Iterable[EpochRecord], splits: Splits
) -> Iterator[Finding]:
    """Compare images, steps and accuracies with the splits.

    A complete epoch trains on every full global batch once and evaluates the whole validation split; a part of an
    epoch trains on fewer batches and does not evaluate. An accuracy times the images of its split is an integer.
    """
    ranks = record.ranks or config.training.devices_per_trial
    batch = max(1, min(record.hyperparameters.batch_size, splits.training) // ranks) * ranks
    steps = splits.training // batch
    if record.status == "finished" and (record.precision is None or record.trained_images is None):
        actual = f"trial {record.trial} finished without the driver's record"
        yield violation("data", "precision and images as the driver recorded them", actual)
    for epoch in epochs:
        where = f"trial {record.trial}, epoch {epoch.epoch}"
        if epoch.trained_images > splits.training:
            actual = f"{where}: trained {epoch.trained_images} images"
            yield violation("data", f"at most {splits.training} images, the training split", actual)
        if epoch.trained_images != epoch.steps * batch:
            actual = f"{where}: trained {epoch.trained_images} images"
            yield violation("data", f"{epoch.steps} steps of {batch} images", actual)
        if epoch.steps > steps or (epoch.complete and epoch.steps != steps):
            yield violation("data", f"{steps} steps per epoch", f"{where}: {epoch.steps} steps")
        whole = splits.validation if epoch.complete else 0
        if epoch.evaluated_images != whole:
            actual = f"{where}: evaluated {epoch.evaluated_images} images"
            yield violation("data", f"{whole} validation images", actual)
        if not epoch.complete and epoch.validation_accuracy is not None:
            actual = f"{where}: has a validation accuracy, but was cut"
            yield violation("data", "no evaluation of a cut epoch", actual)
        yield from _accuracy(f"{where}: validation", epoch.validation_accuracy, splits.validation)
    yield from _accuracy(f"trial {record.trial}: held-out", record.held_out_accuracy, splits.held_out)


def _accuracy(where: str, accuracy: float | None, images: int) -> Iterator[Finding]:
    if accuracy is not None and abs(accuracy * images - round(accuracy * images)) > _COUNT_SLACK:
        yield violation("data", f"a multiple of 1/{images}", f"{where} accuracy {accuracy:.8f}")


def _trial_times(record: TrialRecord, epochs: Sequence[EpochRecord]) -> Iterator[Finding]:
    trial = f"trial {record.trial}"
    for epoch in epochs:
        where, length_s = f"{trial}, epoch {epoch.epoch}", epoch.ended_s - epoch.begun_s
        if length_s < 0 or epoch.begun_s < record.started_s - _SLACK_S:
            yield violation("clock", "trial start <= epoch start <= epoch end", f"{where}: its times are not in order")
        worked_s = epoch.training_s + epoch.evaluating_s
        if worked_s > length_s + _SLACK_S:
            yield violation("clock", f"at most {length_s:.1f} s of work", f"{where}: worked {worked_s:.1f} s")
    for one, other in pairwise(epochs):
        if other.begun_s < one.ended_s - _SLACK_S:
            yield violation("clock", "consecutive epochs", f"{trial}: epochs {one.epoch} and {other.epoch} overlap")
    if record.status in FAILURES or record.ended_s is None or not epochs:
        return
    if record.ended_s < epochs[-1].ended_s + record.held_out_s - _SLACK_S:
        expected = "an end after the last epoch and the held-out evaluation"
        yield violation("clock", expected, f"{trial} ended at {record.ended_s:.1f} s, before them")
    trained_s = sum(epoch.training_s for epoch in epochs)
    if record.computing_s is not None and record.computing_s > trained_s * _COMPUTING + _SLACK_S:
        actual = f"{trial}: the driver computed for {record.computing_s:.1f} s"
        yield violation("clock", f"at most the {trained_s:.1f} s of training", actual)


def _clock(events: Sequence[journal.Event], delay_s: float) -> Iterator[Finding]:
    """Compare every time with the controller's clock in the events before and after it.

    The journal is written in order, so the time of an event is between the heartbeats around it. A worker measures
    times (ends of epochs and trials) from its own start, slightly after the controller's, and reports them late.
    """
    clock_s = latest_s = 0.0
    started: set[tuple[int, int]] = set()
    for event, bound_s in zip(events, _upper_bounds(events), strict=True):
        match event:
            case journal.SessionBegan():
                if abs(event.clock_s - latest_s) > _SLACK_S:
                    actual = f"a session began at {event.clock_s:.1f} s"
                    yield violation("clock", f"{latest_s:.1f} s, where the run's clock stopped", actual)
                clock_s, latest_s = event.clock_s, max(latest_s, event.clock_s)
            case journal.Heartbeat() | journal.Note() | journal.SessionEnded():
                clock_s = max(clock_s, event.clock_s)
                latest_s = max(latest_s, event.clock_s)
            case journal.TrialEvent(trial=record):
                where = f"trial {record.trial}, attempt {record.attempt}"
                if (record.trial, record.attempt) not in started:
                    started.add((record.trial, record.attempt))
                    yield from _outside(f"{where}: its start", record.started_s, clock_s, bound_s)
                    clock_s = max(clock_s, record.started_s)
                elif record.ended_s is not None:
                    drift_s = _CLOCK_DRIFT * (record.ended_s - record.started_s)
                    # The duration of a failed trial may be unknown.
                    earliest_s = 0.0 if record.status in FAILURES else clock_s - delay_s - drift_s
                    yield from _outside(f"{where}: its end", record.ended_s, earliest_s, bound_s + drift_s)
                latest_s = max(latest_s, record.started_s if record.ended_s is None else record.ended_s)
            case journal.EpochEvent(epoch=epoch):
                drift_s = _CLOCK_DRIFT * epoch.ended_s
                where = f"trial {epoch.trial}, epoch {epoch.epoch}: its end"
                yield from _outside(where, epoch.ended_s, clock_s - delay_s - drift_s, bound_s + drift_s)
                latest_s = max(latest_s, epoch.ended_s)


def _outside(what: str, time_s: float, earliest_s: float, latest_s: float) -> Iterator[Finding]:
    if not earliest_s - _SLACK_S <= time_s <= latest_s + _SLACK_S:
        expected = f"between {earliest_s:.1f} and {latest_s:.1f} s, by the heartbeats around it"
        yield violation("clock", expected, f"{what} is at {time_s:.1f} s")


def _upper_bounds(events: Sequence[journal.Event]) -> list[float]:
    """Return for each event the latest time at which it can have been written; infinite before a kill.

    The limit is the later one of the session's next two clock readings: a heartbeat has the time at which its step
    began, notes and ends have the time at which they are written.
    """
    bounds: list[float] = []
    first_s = second_s = float("inf")
    for event in reversed(events):
        bounds.append(max(first_s, second_s))
        match event:
            case journal.SessionBegan():
                first_s = second_s = float("inf")
            case journal.SessionEnded():
                first_s = second_s = event.clock_s
            case journal.Heartbeat() | journal.Note():
                first_s, second_s = event.clock_s, first_s
    return bounds[::-1]


def _overlaps(records: Iterable[TrialRecord]) -> Iterator[Finding]:
    """Find trials that ran on one worker at the same time, which would count its devices twice."""
    by_worker: dict[int, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda record: record.started_s):
        by_worker.setdefault(record.worker, []).append(record)
    for worker, ran in by_worker.items():
        for one, other in pairwise(ran):
            if one.ended_s is not None and other.started_s < one.ended_s - _SLACK_S:
                actual = f"trials {one.trial} and {other.trial} ran on worker {worker} at the same time"
                yield violation("clock", "one trial at a time per worker", actual)


def broken_lineage(events: Iterable[journal.Event], state: SearchState) -> Iterator[Finding]:
    """Rebuild every network from its parent's morphs and from hyperparameters that were written into it.

    A child may be proposed before its parent's hyperparameters are written, so it may derive from any earlier form of
    the parent; each form must follow from the one before by the hyperparameters of one of its trials.
    """
    forms: dict[int, list[Network]] = {}
    tuned: dict[int, list[Hyperparameters]] = {}
    for record in state.attempts.values():
        tuned.setdefault(record.individual, []).append(record.hyperparameters)
    for event in events:
        if not isinstance(event, journal.Proposed):
            continue
        one = event.individual
        earlier = forms.setdefault(one.id, [])
        if earlier:
            if all(hyper.applied_to(earlier[-1]) != one.network for hyper in tuned.get(one.id, [])):
                expected = "its previous form with the hyperparameters of its trial"
                yield violation("network", expected, f"network {one.id} is another network")
        elif one.parent is not None and all(
            _morphed(parent, one.morphs) != one.network for parent in forms.get(one.parent, [])
        ):
            yield violation("network", "its parent with its morphs applied", f"network {one.id} is another network")
        earlier.append(one.network)


def _morphed(network: Network, morphs: Iterable[Morph]) -> Network | None:
    try:
        for morph in morphs:
            network = apply_morph(network, morph)
    except MorphError:
        return None
    return network
