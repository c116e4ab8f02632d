"""Contradictions between a journal and its data, its own clock, its networks and the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from math import inf
from typing import Final

from accelmark.automl import journal
from accelmark.automl.config import AutomlConfig, plan_of
from accelmark.automl.journal import SearchState
from accelmark.automl.model.counting import count
from accelmark.automl.model.morphs import Morph, MorphError, apply_morph
from accelmark.automl.model.network import Network, find_problems
from accelmark.automl.records import FAILURES, EpochRecord, Hyperparameters, OperationCost, Splits, TrialRecord
from accelmark.automl.search.schedule import stops_early
from accelmark.datasets.images import IMAGENET_HELD_OUT, IMAGENET_TRAINING

Check = tuple[bool, str, str, str]
"""Whether a fact agrees with a rule, the rule's name, what is expected, and the fact."""

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


def consistency_checks(config: AutomlConfig, events: Sequence[journal.Event], state: SearchState) -> Iterator[Check]:
    """Check everything that a journal records more than once, or that follows from the configuration."""
    yield from _sessions(config, state)
    yield from _bounds(config, state)
    yield from lineage(events, state)
    splits = {session.splits for session in state.sessions}
    yield len(splits) <= 1, "data", "equal splits in all sessions", "the sessions have different splits"
    known = splits.pop() if len(splits) == 1 else None
    if known is not None:
        yield from _splits(config, state, known)
    for record in state.attempts.values():
        epochs = state.epochs_of(record)
        yield from _counts(config, record, epochs, state)
        yield from _request(config, record, epochs, state)
        yield from _trial_times(record, epochs)
        if known is not None and record.status not in FAILURES:  # work of failed attempts is not scored
            yield from _work(config, record, epochs, known)
    delay_s = _REPORT_DELAY_S if config.training.devices_per_trial == 1 else _RANKS_START_S
    yield from _clock(events, delay_s)
    yield from _overlaps(state.attempts.values())


def _sessions(config: AutomlConfig, state: SearchState) -> Iterator[Check]:
    name, workers = config.dataset.name, config.schedule.concurrency
    yield bool(state.sessions), "request", "at least one session", "no session of this run began"
    for number, session in enumerate(state.sessions, start=1):
        identity, splits, which = session.dataset_identity, session.splits, f"session {number}"
        known = identity == name or name == "imagenet"
        yield known, "request", f"data set {name}", f"{which} used {identity}"
        if identity == "imagenet" and config.dataset.limit is None:
            sizes = splits.training + splits.validation, splits.held_out
            whole = sizes == (IMAGENET_TRAINING, IMAGENET_HELD_OUT)
            yield whole, "data", "the number of images of imagenet", f"{which} had {sizes} images"
        yield session.workers == workers, "request", f"{workers} workers", f"{which} had {session.workers} workers"
    fingerprints = {session.dataset_fingerprint for session in state.sessions}
    yield len(fingerprints) <= 1, "data", "equal data in all sessions", "the sessions used different data"


def _bounds(config: AutomlConfig, state: SearchState) -> Iterator[Check]:
    schedule, trials = config.schedule, state.trials
    allowed = schedule.max_trials is None or len(trials) <= schedule.max_trials
    yield allowed, "request", f"at most {schedule.max_trials} trials", f"{len(trials)} trials were started"
    in_order = sorted(trials) == list(range(len(trials)))
    yield in_order, "request", "trials 0, 1, 2 ...", "trials are not numbered consecutively"
    most = schedule.max_attempts + state.interruptions
    for trial, attempt in state.attempts:
        yield attempt <= most, "request", f"at most {most} attempts", f"trial {trial} has attempt {attempt}"
    end_s, last_s = schedule.max_duration or inf, max((totals.ended_s for totals in state.totals.values()), default=0.0)
    in_time = last_s <= end_s + _END_SLACK_S
    yield in_time, "request", f"end after {end_s:.1f} s", f"the last epoch ended at {last_s:.1f} s"
    used = sum(record.cost.operations(state.totals_of(record)) for record in state.useful())
    most_operations = schedule.max_operations or used
    yield used <= most_operations, "request", f"at most {most_operations:,} operations", f"{used:,} operations"


def _request(
    config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord], state: SearchState
) -> Iterator[Check]:
    """Compare a trial with the schedule and training settings."""
    number, length, tuned = plan_of(config, record.trial, state.individuals[record.individual])
    schedule, training, hyper = config.schedule, config.training, record.hyperparameters
    trial = f"trial {record.trial}"
    for name, wanted, actual in (
        ("round", number, record.round),
        ("planned epochs", length, record.epochs_planned),
        ("tuned", tuned, record.tuned),
        ("precision", training.precision, record.precision),
        ("ranks", training.devices_per_trial, record.ranks),
        ("learning rate", training.learning_rate, hyper.learning_rate if not record.tuned else None),
    ):
        yield actual in (None, wanted), "request", f"{name} {wanted}", f"{trial}: {name} {actual}"
    batches = sorted({training.batch_size, *(config.tuning.batch_size if record.tuned else ())})
    expected = f"batch {' or '.join(map(str, batches))}"
    yield hyper.batch_size in batches, "request", expected, f"{trial}: batch {hyper.batch_size}"
    expected, actual = f"{schedule.concurrency} workers", f"{trial}: ran on worker {record.worker}"
    yield record.worker < schedule.concurrency, "request", expected, actual
    trial = f"{trial}, attempt {record.attempt}"
    in_order = [epoch.epoch for epoch in epochs] == list(range(1, len(epochs) + 1))
    yield in_order, "request", "epochs 1, 2, 3 ...", f"{trial}: epochs are not numbered consecutively"
    whole = all(epoch.complete for epoch in epochs[:-1])
    yield whole, "request", "a cut epoch is the last one", f"{trial}: an epoch follows one that was cut"
    planned = record.epochs_planned
    yield len(epochs) <= planned, "request", f"{planned} epochs", f"{trial}: {len(epochs)} epochs"
    if record.status == "finished":
        losses = [epoch.validation_loss for epoch in epochs if epoch.validation_loss is not None]
        evaluated = bool(epochs) and epochs[-1].validation_loss is not None
        stopped_early = schedule.early_stop and evaluated and stops_early(record.round, losses)
        enough = len(epochs) >= planned or stopped_early
        done, actual = bool(epochs) and epochs[-1].complete and enough, f"{trial}: finished after {len(epochs)} epochs"
        yield done, "request", f"{planned} epochs or an early stop", actual


def _counts(
    config: AutomlConfig, record: TrialRecord, epochs: Sequence[EpochRecord], state: SearchState
) -> Iterator[Check]:
    """Count a trial's network and images again."""
    trial, network = f"trial {record.trial}", state.individuals[record.individual].network
    if find_problems(network):
        yield False, "network", "a network that can be built", f"{trial}: its network cannot be built"
        return
    trained, driver = sum(epoch.trained_images for epoch in epochs), record.trained_images
    equal = record.status in FAILURES or driver in (None, trained)
    yield equal, "data", f"{trained} images, the sum of its epochs", f"{trial}: the driver trained {driver} images"
    for epoch in epochs:
        most = epoch.steps * record.hyperparameters.batch_size
        actual = f"{trial}, epoch {epoch.epoch}: trained {epoch.trained_images} images, more than its steps hold"
        yield epoch.trained_images <= most, "data", f"at most {most} images in {epoch.steps} steps", actual
    if state.trials[record.trial].attempt == record.attempt:
        counted, flops = count(network, config.counting), record.flops_per_image
        equal = record.cost == OperationCost.of(counted)
        yield equal, "operations", "the operations of its network", f"{trial}: other operations are recorded"
        actual = f"{trial}: the driver counted {flops or 0:.0f} FLOPs per image"
        yield flops in (None, counted.matrix), "operations", f"{counted.matrix} FLOPs per image", actual


def _splits(config: AutomlConfig, state: SearchState, splits: Splits) -> Iterator[Check]:
    given, limit = splits.training + splits.validation, config.dataset.limit
    share = round(given * config.dataset.validation_share)
    actual = f"{splits.validation} of {given} images are the validation split"
    yield splits.validation == share, "data", f"{share} validation images, the configured share", actual
    within = limit is None or max(given, splits.held_out) <= limit
    yield within, "data", f"at most {limit} images", f"the splits have {given} and {splits.held_out} images"
    for one in state.individuals:
        fits, actual = one.network.classes == splits.classes, f"network {one.id} has {one.network.classes} classes"
        yield fits, "data", f"{splits.classes} classes, as the data", actual


def _work(config: AutomlConfig, record: TrialRecord, epochs: Iterable[EpochRecord], splits: Splits) -> Iterator[Check]:
    """Compare with the splits: an epoch trains on each full global batch, a cut one on fewer without evaluation."""
    ranks = record.ranks or config.training.devices_per_trial
    batch = max(1, min(record.hyperparameters.batch_size, splits.training) // ranks) * ranks
    steps = splits.training // batch
    recorded = record.status != "finished" or None not in (record.precision, record.trained_images)
    actual = f"trial {record.trial} finished without the driver's record"
    yield recorded, "data", "precision and images as the driver recorded them", actual
    for epoch in epochs:
        where, trained = f"trial {record.trial}, epoch {epoch.epoch}", epoch.trained_images
        actual = f"{where}: trained {trained} images"
        yield trained <= splits.training, "data", f"at most {splits.training} images, the training split", actual
        yield trained == epoch.steps * batch, "data", f"{epoch.steps} steps of {batch} images", actual
        right = epoch.steps == steps or (epoch.steps < steps and not epoch.complete)
        yield right, "data", f"{steps} steps per epoch", f"{where}: {epoch.steps} steps"
        whole, evaluated = splits.validation if epoch.complete else 0, epoch.evaluated_images
        yield evaluated == whole, "data", f"{whole} validation images", f"{where}: evaluated {evaluated} images"
        right = epoch.complete or epoch.validation_accuracy is None
        yield right, "data", "no evaluation of a cut epoch", f"{where}: has a validation accuracy, but was cut"
        yield from _accuracy(f"{where}: validation", epoch.validation_accuracy, splits.validation)
    yield from _accuracy(f"trial {record.trial}: held-out", record.held_out_accuracy, splits.held_out)


def _accuracy(where: str, accuracy: float | None, images: int) -> Iterator[Check]:
    if accuracy is not None:
        whole = abs(accuracy * images - round(accuracy * images)) <= _COUNT_SLACK
        yield whole, "data", f"a multiple of 1/{images}", f"{where} accuracy {accuracy:.8f}"


def _trial_times(record: TrialRecord, epochs: Sequence[EpochRecord]) -> Iterator[Check]:
    trial, began_s = f"trial {record.trial}", record.started_s - _SLACK_S
    for epoch in epochs:
        where, length_s = f"{trial}, epoch {epoch.epoch}", epoch.ended_s - epoch.begun_s
        in_order = length_s >= 0 and epoch.begun_s >= began_s
        yield in_order, "clock", "trial start <= epoch start <= epoch end", f"{where}: its times are not in order"
        worked_s = epoch.training_s + epoch.evaluating_s
        possible = worked_s <= length_s + _SLACK_S
        yield possible, "clock", f"at most {length_s:.1f} s of work", f"{where}: worked {worked_s:.1f} s"
    for one, other in pairwise(epochs):
        apart = other.begun_s >= one.ended_s - _SLACK_S
        yield apart, "clock", "consecutive epochs", f"{trial}: epochs {one.epoch} and {other.epoch} overlap"
    if record.status in FAILURES or record.ended_s is None or not epochs:
        return
    expected = "an end after the last epoch and the held-out evaluation"
    after = record.ended_s >= epochs[-1].ended_s + record.held_out_s - _SLACK_S
    yield after, "clock", expected, f"{trial} ended at {record.ended_s:.1f} s, before them"
    trained_s, computed_s = sum(epoch.training_s for epoch in epochs), record.computing_s or 0.0
    possible = computed_s <= trained_s * _COMPUTING + _SLACK_S
    actual = f"{trial}: the driver computed for {computed_s:.1f} s"
    yield possible, "clock", f"at most the {trained_s:.1f} s of training", actual


def _clock(events: Sequence[journal.Event], delay_s: float) -> Iterator[Check]:
    """Compare every time with the controller's clock in the events around it; workers report theirs late."""
    clock_s = latest_s = 0.0
    started: set[tuple[int, int]] = set()
    for event, bound_s in zip(events, _upper_bounds(events), strict=True):
        time_s: float | None = None
        match event:
            case journal.SessionBegan(clock_s=clock_s):
                expected = f"{latest_s:.1f} s, where the run's clock stopped"
                right = abs(clock_s - latest_s) <= _SLACK_S
                yield right, "clock", expected, f"a session began at {clock_s:.1f} s"
                time_s = clock_s
            case (
                journal.Heartbeat(clock_s=time_s)
                | journal.Remark(clock_s=time_s)
                | journal.SessionEnded(clock_s=time_s)
            ):
                clock_s = max(clock_s, time_s)
            case journal.TrialEvent(trial=record):
                where, key = f"trial {record.trial}, attempt {record.attempt}", (record.trial, record.attempt)
                time_s = record.started_s if record.ended_s is None else record.ended_s
                if key not in started:
                    started.add(key)
                    yield _between(f"{where}: its start", record.started_s, clock_s, bound_s)
                    clock_s = max(clock_s, record.started_s)
                elif record.ended_s is not None:
                    drift_s = _CLOCK_DRIFT * (record.ended_s - record.started_s)
                    # The duration of a failed trial may be unknown.
                    earliest_s = 0.0 if record.status in FAILURES else clock_s - delay_s - drift_s
                    yield _between(f"{where}: its end", record.ended_s, earliest_s, bound_s + drift_s)
            case journal.EpochEvent(epoch=epoch):
                time_s, drift_s = epoch.ended_s, _CLOCK_DRIFT * epoch.ended_s
                where = f"trial {epoch.trial}, epoch {epoch.epoch}: its end"
                yield _between(where, time_s, clock_s - delay_s - drift_s, bound_s + drift_s)
        latest_s = max(latest_s, time_s or 0.0)


def _between(what: str, time_s: float, earliest_s: float, latest_s: float) -> Check:
    expected = f"between {earliest_s:.1f} and {latest_s:.1f} s, by the heartbeats around it"
    right = earliest_s - _SLACK_S <= time_s <= latest_s + _SLACK_S
    return right, "clock", expected, f"{what} is at {time_s:.1f} s"


def _upper_bounds(events: Sequence[journal.Event]) -> list[float]:
    """Return for each event the latest time at which it can have been written; infinite before a kill."""
    bounds: list[float] = []
    # The later one of the next two clock readings: a heartbeat has the time at which its step began.
    first_s = second_s = inf
    for event in reversed(events):
        bounds.append(max(first_s, second_s))
        match event:
            case journal.SessionBegan():
                first_s = second_s = inf
            case journal.SessionEnded():
                first_s = second_s = event.clock_s
            case journal.Heartbeat() | journal.Remark():
                first_s, second_s = event.clock_s, first_s
    return bounds[::-1]


def _overlaps(records: Iterable[TrialRecord]) -> Iterator[Check]:
    """Check that no worker ran two trials at the same time, which would count its devices twice."""
    ran = sorted(records, key=lambda record: (record.worker, record.started_s))
    for one, other in pairwise(ran):
        if one.worker == other.worker:
            apart = one.ended_s is None or other.started_s >= one.ended_s - _SLACK_S
            actual = f"trials {one.trial} and {other.trial} ran on worker {one.worker} at the same time"
            yield apart, "clock", "one trial at a time per worker", actual


def lineage(events: Iterable[journal.Event], state: SearchState) -> Iterator[Check]:
    """Rebuild every network from its parent's morphs and from hyperparameters that were written into it.

    A child may have been proposed before those of its parent were written, so it may derive from any earlier form.
    """
    forms: dict[int, list[Network]] = {}
    tuned: dict[int, list[Hyperparameters]] = {}
    for record in state.attempts.values():
        tuned.setdefault(record.individual, []).append(record.hyperparameters)
    for one in (event.individual for event in events if isinstance(event, journal.Proposed)):
        earlier, actual = forms.setdefault(one.id, []), f"network {one.id} is another network"
        if earlier:
            follows = any(hyper.applied_to(earlier[-1]) == one.network for hyper in tuned.get(one.id, []))
            yield follows, "network", "its previous form with the hyperparameters of its trial", actual
        elif one.parent is not None:
            follows = any(_morphed(parent, one.morphs) == one.network for parent in forms.get(one.parent, []))
            yield follows, "network", "its parent with its morphs applied", actual
        elif one.id:
            yield one.network in forms[0], "network", "the seed network", actual
        earlier.append(one.network)


def _morphed(network: Network, morphs: Iterable[Morph]) -> Network | None:
    try:
        return reduce(apply_morph, morphs, network)
    except MorphError:
        return None
