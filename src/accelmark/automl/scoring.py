"""Score, error and other figures of a search, its verdict by versioned rules, and contradictions in its journal.

Score = operations / seconds from the first attempt's start to the last recorded epoch of any attempt; operations are
those of attempts that gave a result. Error = 1 - accuracy. Regulated score = -ln(Error) x Score.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, reduce
from itertools import pairwise
from math import inf, log
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from accelmark.audit.verdict import verdict_of
from accelmark.automl import journal
from accelmark.automl.config import AutomlConfig
from accelmark.automl.journal import SearchDirectory, SearchState, first_broken_line, read_journal
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Network, find_problems
from accelmark.automl.model.morphs import MorphError, apply_morph
from accelmark.automl.records import FAILURES, EpochRecord, Hyperparameters, OperationCost, Splits, TrialRecord, plan_of
from accelmark.automl.search.schedule import stops_early
from accelmark.datasets.images import IMAGENET_HELD_OUT, IMAGENET_TRAINING
from accelmark.results.rounds import search
from accelmark.results.schema import Finding, finding
from accelmark.spec.number_format import counted, percent

Vector = NDArray[np.float64]
Epochs = Sequence[EpochRecord]
Check = tuple[bool, str, str, str]
"""Whether a fact agrees with a rule, the rule's name, what is expected, and the fact."""

_NONE: Final = -1.0
"""Accuracy of what was not evaluated: below all others."""
PRECISION_BITS: Final = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}
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


def regulated(score: float, error: float | None) -> float | None:
    """Return -ln(error) x score; None without an error, or with an error of 0, whose logarithm is infinite."""
    return None if error is None or error <= 0 else -log(error) * score


def _known(accuracy: float | None) -> float:
    return _NONE if accuracy is None else accuracy


class Scoreboard:
    """The scored records of a search: attempts that gave a result or are running; ``trials`` are the latest attempts.

    ``started_s`` is the start of the first attempt, ``ended_s`` the end of the last recorded epoch of any attempt.
    """

    def __init__(self, state: SearchState) -> None:
        self.trials = state.trials
        self._state: Final = state
        self.started_s = min((record.started_s for record in state.attempts.values()), default=0.0)
        ended_s = max((totals.ended_s for totals in state.totals.values() if totals.ended_s), default=0.0)
        self.ended_s = max(ended_s, self.started_s)

    @cached_property
    def _epochs(self) -> tuple[Vector, Vector, Vector, Vector]:
        """Begin, end, operations and best accuracy until then of the scored epochs, in the order of their ends."""
        rows = [
            (epoch.ended_s, epoch.begun_s, record.cost.operations(epoch), _known(epoch.validation_accuracy))
            for record in self._state.useful()
            for epoch in self._state.epochs_of(record)
        ]
        ended, begun, operations, accuracy = np.array(sorted(rows), np.float64).reshape(-1, 4).T
        return begun, ended, operations, np.maximum.accumulate(accuracy)

    @cached_property
    def _bests(self) -> list[tuple[float, TrialRecord]]:
        """The end of each trial with a held-out accuracy, and the best trial until then, in the order of ends."""
        best: list[tuple[float, TrialRecord]] = []
        for record in sorted(self.trials.values(), key=lambda record: record.ended_s or 0.0):
            if record.held_out_accuracy is not None and record.ended_s is not None:
                compared = [record, *(leader for _, leader in best[-1:])]
                leader = max(compared, key=lambda one: (_known(self.best_validation(one.trial)), -one.trial))
                best.append((record.ended_s, leader))
        return best

    def best_trial_at(self, time_s: float) -> TrialRecord | None:
        """Return the trial with the best validation accuracy among those with a held-out accuracy."""
        number = bisect_right(self._bests, time_s, key=itemgetter(0))
        return self._bests[number - 1][1] if number else None

    def best_validation(self, trial: int) -> float | None:
        """Return a trial's best validation accuracy."""
        record = self.trials[trial]
        return None if record.status in FAILURES else self._state.totals_of(record).accuracy

    def at(self, time_s: float) -> search.SearchPoint:
        """Return all figures at ``time_s``; an epoch under way counts by its share of time."""
        begun, ended, operations, accuracies = self._epochs
        shares = np.clip((time_s - begun) / np.maximum(ended - begun, 1e-9), 0.0, 1.0)
        done = float(np.where(ended <= time_s, 1.0, shares) @ operations)
        number = int(np.searchsorted(ended, time_s, "right"))
        return self._point(time_s, done, float(accuracies[number - 1]) if number else _NONE, time_s)

    def final(self) -> search.SearchPoint:
        """Return the figures of the whole run: the score ends with the last epoch, held-out evaluations may follow."""
        totals = [(record.cost, self._state.totals_of(record)) for record in self._state.useful()]
        accuracy = max((_known(each.accuracy) for _, each in totals), default=_NONE)
        return self._point(self.ended_s, float(sum(cost.operations(each) for cost, each in totals)), accuracy, inf)

    def _point(self, time_s: float, operations: float, accuracy: float, errors_at_s: float) -> search.SearchPoint:
        elapsed_s, best = time_s - self.started_s, self.best_trial_at(errors_at_s)
        score = operations / elapsed_s if elapsed_s > 0 else 0.0
        error = 1 - best.held_out_accuracy if best is not None and best.held_out_accuracy is not None else None
        search_error = None if accuracy == _NONE else 1 - accuracy
        return search.SearchPoint(
            time_h=elapsed_s / 3600,
            operations=operations,
            score=score,
            error=error,
            search_error=search_error,
            regulated_score=regulated(score, error),
            regulated_search_score=regulated(score, search_error),
        )

    def series(self, step_s: float) -> tuple[search.SearchPoint, ...]:
        """Return the figures every ``step_s`` and at the end."""
        length_s = self.ended_s - self.started_s
        if length_s <= 0:
            return ()
        times = [self.started_s + step_s * number for number in range(1, int(length_s / step_s) + 1)]
        return (*(self.at(time) for time in times if self.ended_s - time > 1e-9), self.final())


def utilisation(state: SearchState) -> search.SearchUtilisation:
    """Return the use of the workers' time since the first trial's start; epochs that have not ended count as work."""
    records, totals = list(state.attempts.values()), list(state.totals.values())
    end_s = max([*(record.ended_s or record.started_s for record in records), *(each.ended_s for each in totals), 0.0])
    workers = state.sessions[-1].workers if state.sessions else 0
    available_s = workers * (end_s - Scoreboard(state).started_s)
    training_s = sum(each.training_s for each in totals)
    evaluating_s = sum(each.evaluating_s for each in totals) + sum(record.held_out_s for record in records)
    waited_s = sum(each.data_wait_s for each in totals)
    worked_s = training_s + evaluating_s - waited_s
    if any(each.ended_s for each in totals):
        running = [record for record in records if record.status == "running"]
        worked_s += sum(end_s - max(record.started_s, state.totals_of(record).ended_s) for record in running)
    return search.SearchUtilisation(
        workers=workers,
        available_s=available_s,
        training_s=training_s,
        evaluating_s=evaluating_s,
        data_wait_s=waited_s,
        idle_share=max(0.0, 1 - worked_s / available_s) if worked_s > 0 and available_s > 0 else None,
    )


def _consumption(directory: SearchDirectory, state: SearchState, board: Scoreboard) -> search.SearchConsumption:
    """Return power and utilization of the last session, from its first trial's start to its last epoch's end."""
    if not state.sessions:
        return search.search_consumption(None, "", (0.0, 0.0), 0)
    session = state.sessions[-1]
    offset = session.monotonic_s - session.clock_s
    window = (offset + max(session.clock_s, board.started_s), offset + board.ended_s)
    images = sum(state.totals_of(record).trained_images for record in state.useful())
    found = search.search_consumption(directory.telemetry(len(state.sessions)), session.host, window, images)
    if len(state.sessions) == 1:
        return found
    remark = {"sessions": "the search was resumed; the figures are of its last session"}
    return found.model_copy(update={"reasons": found.reasons | remark})


def summarise(
    directory: SearchDirectory, *, state: SearchState | None = None, series: bool = True
) -> search.SearchSummary:
    """Compute the figures of a search, without ``series`` at its end only; raises RunError where it is not readable."""
    config, known = directory.config(), state or directory.state()
    board, ended = Scoreboard(known), known.ended
    best, useful = board.best_trial_at(known.clock_s + 1), [known.totals_of(record) for record in known.useful()]
    failed = [record for record in known.attempts.values() if record.status not in ("running", "finished", "cut")]
    return search.SearchSummary(
        run=directory.name,
        status=("over" if ended.over else "stopped")
        if ended
        else ("running" if directory.is_running() else "interrupted"),
        ended_because=None if ended is None else ended.reason,
        duration_s=board.ended_s - board.started_s,
        counting=config.counting,
        dataset=config.dataset.name,
        method=config.search.method,
        trials=dict(Counter(record.status for record in known.trials.values())),
        trials_started=len(known.trials),
        epochs=sum(totals.epochs for totals in useful),
        trained_images=sum(totals.trained_images for totals in useful),
        final=board.final(),
        series=board.series(config.rules.sample_s) if series else (),
        utilisation=utilisation(known),
        consumption=_consumption(directory, known, board),
        best_trial=best.trial if best is not None else None,
        judgement=verdict(config, known),
        interruptions=known.interruptions,
        failures=tuple(f"trial {one.trial}, attempt {one.attempt}: {one.status}: {one.reason}" for one in failed),
        notes=tuple(f"{note.clock_s:.1f} s: {note.text}" for note in known.notes),
        journal_bytes=directory.journal_bytes,
    )


def _rule_checks(config: AutomlConfig, state: SearchState, board: Scoreboard) -> Iterator[Check]:
    """Check a search as recorded, not as configured, by each rule."""
    rules, error = config.rules, board.final().error
    least_s, lasted_s = rules.min_duration_s, board.ended_s - board.started_s
    yield lasted_s >= least_s, "duration", f"at least {least_s:.0f} s", f"the search ran {lasted_s:.1f} s"
    bits = f"at least {rules.min_precision_bits} bits"
    precisions = {record.precision for record in board.trials.values() if record.precision is not None}
    yield bool(precisions), "precision", bits, "no precision was recorded"
    for name in sorted(precisions):
        known = "" if name in PRECISION_BITS else ", whose bits are unknown"
        enough = PRECISION_BITS.get(name, 0) >= rules.min_precision_bits
        yield enough, "precision", bits, f"trials computed in {name!r}{known}"
    actual = "no held-out accuracy was measured" if error is None else f"the held-out accuracy is {1 - error:.4f}"
    enough = error is not None and (1 - error > rules.min_accuracy or not rules.min_accuracy)
    yield enough, "accuracy", f"held-out accuracy above {rules.min_accuracy:.2f}", actual
    finished = any(record.status == "finished" for record in board.trials.values())
    yield finished, "trials", "at least one finished trial", "no trial finished"
    dataset = " or ".join(sorted({session.dataset_identity for session in state.sessions})) or config.dataset.name
    dataset += "" if config.dataset.limit is None else " (a part of it)"
    allowed = not rules.datasets or dataset in rules.datasets
    yield allowed, "dataset", f"data set {' or '.join(rules.datasets)}", f"the data set is {dataset!r}"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def verdict(config: AutomlConfig, state: SearchState, checks: Iterable[Check] = ()) -> search.SearchVerdict:
    """Return the audit's verdict by the rules and by further checks, with what has to be disclosed, valid or not."""
    rules, board, values = config.rules, Scoreboard(state), config.by_key()
    findings = [
        Finding(severity="error", rule=f"search-{rule}", expected=expected, actual=actual)
        for agrees, rule, expected, actual in (*_rule_checks(config, state, board), *checks)
        if not agrees
    ]
    # Another search than the one that the rules fix has a score that cannot be compared with others of the rules.
    pinned = [(key, _listed(expected), _listed(values[key])) for key, expected in rules.pinned.items()]
    findings += [
        finding("open", "search-altered", f"{key} {expected}", f"{key} is {actual}")
        for key, expected, actual in pinned
        if actual != expected
    ]
    pretrained, search_error = config.search.initial_weights is not None, board.final().search_error
    disclosures = [f"the search started from {'pretrained' if pretrained else 'random'} weights"]
    if search_error is not None:
        what = "best error on the validation split, which the search optimizes"
        disclosures.append(f"{what}: {percent(search_error, 3)}")
    if state.interruptions:
        disclosures.append(f"the run was interrupted and resumed {counted(state.interruptions, 'time')}")
    return search.SearchVerdict(
        rules=rules.name,
        version=rules.version,
        rules_sha256=rules.sha256,
        verdict=verdict_of(findings),
        reasons=tuple(dict.fromkeys(map(str, findings))),
        disclosures=tuple(disclosures),
    )


class Verified(search.SearchVerdict):
    """A verdict, and a description of what was recomputed."""

    checked: tuple[str, ...]


def verify_search(directory: SearchDirectory) -> Verified:
    """Recompute what can be recomputed; a contradiction makes the search INVALID. Raises RunError if unreadable."""
    config, events = directory.config(), list(read_journal(directory.path))
    state, broken = SearchState.of(events), first_broken_line(directory.path, events)
    before = "configuration and seed network" if broken == 1 else f"line {(broken or 0) - 1}"
    actual = f"line {broken} of the journal does not follow from {before}: something was changed"
    linked = broken is None, "journal", "each line has the hash of the one before", actual
    useful = [(record.cost, state.totals_of(record)) for record in state.useful()]
    total, epochs = sum(cost.operations(one) for cost, one in useful), sum(one.epochs for _, one in useful)
    return Verified(
        **dict(verdict(config, state, [linked, *_consistency(config, events, state)])),
        checked=(
            f"{len(state.trials)} trials and {epochs} epochs read; {total:,} operations counted again",
            f"{len(state.individuals)} networks rebuilt from their parents",
            f"{len(events) if broken is None else broken - 1} journal lines have the hash of the line before",
        ),
    )


def _consistency(config: AutomlConfig, events: Sequence[journal.Event], state: SearchState) -> Iterator[Check]:
    """Check everything that a journal records more than once, or that follows from the configuration."""
    yield from _sessions_and_limits(config, state)
    yield from lineage(events, state)
    splits = {session.splits for session in state.sessions}
    yield len(splits) <= 1, "data", "equal splits in all sessions", "the sessions have different splits"
    known = splits.pop() if len(splits) == 1 else None
    if known is not None:
        given, limit = known.training + known.validation, config.dataset.limit
        share = round(given * config.dataset.validation_share)
        actual = f"{known.validation} of {given} images are the validation split"
        yield known.validation == share, "data", f"{share} validation images, the configured share", actual
        within = limit is None or max(given, known.held_out) <= limit
        yield within, "data", f"at most {limit} images", f"the splits have {given} and {known.held_out} images"
        for each in state.individuals:
            classes = each.network.classes
            actual = f"network {each.id} has {classes} classes"
            yield classes == known.classes, "data", f"{known.classes} classes, as the data", actual
    for record in state.attempts.values():
        epochs = state.epochs_of(record)
        yield from _counts(config, record, epochs, state)
        yield from _request(config, record, epochs, state)
        yield from _trial_times(record, epochs)
        if known is not None and record.status not in FAILURES:  # work of failed attempts is not scored
            yield from _work(config, record, epochs, known)
    yield from _clock(events, _REPORT_DELAY_S if config.training.devices_per_trial == 1 else _RANKS_START_S)
    # A worker that ran two trials at the same time would count its devices twice.
    for one, other in pairwise(sorted(state.attempts.values(), key=lambda record: (record.worker, record.started_s))):
        if one.worker == other.worker:
            apart = one.ended_s is None or other.started_s >= one.ended_s - _SLACK_S
            actual = f"trials {one.trial} and {other.trial} ran on worker {one.worker} at the same time"
            yield apart, "clock", "one trial at a time per worker", actual


def _sessions_and_limits(config: AutomlConfig, state: SearchState) -> Iterator[Check]:
    name, schedule, trials = config.dataset.name, config.schedule, state.trials
    yield bool(state.sessions), "request", "at least one session", "no session of this run began"
    for number, session in enumerate(state.sessions, start=1):
        identity, splits, which = session.dataset_identity, session.splits, f"session {number}"
        yield identity == name or name == "imagenet", "request", f"data set {name}", f"{which} used {identity}"
        if identity == "imagenet" and config.dataset.limit is None:
            sizes = splits.training + splits.validation, splits.held_out
            whole = sizes == (IMAGENET_TRAINING, IMAGENET_HELD_OUT)
            yield whole, "data", "the number of images of imagenet", f"{which} had {sizes} images"
        expected = f"{schedule.concurrency} workers"
        yield session.workers == schedule.concurrency, "request", expected, f"{which} had {session.workers} workers"
    fingerprints = {session.dataset_fingerprint for session in state.sessions}
    yield len(fingerprints) <= 1, "data", "equal data in all sessions", "the sessions used different data"
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


def _request(config: AutomlConfig, record: TrialRecord, epochs: Epochs, state: SearchState) -> Iterator[Check]:
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
        done = bool(epochs) and epochs[-1].complete and (len(epochs) >= planned or stopped_early)
        yield done, "request", f"{planned} epochs or an early stop", f"{trial}: finished after {len(epochs)} epochs"


def _counts(config: AutomlConfig, record: TrialRecord, epochs: Epochs, state: SearchState) -> Iterator[Check]:
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
        again, flops = count(network, config.counting), record.flops_per_image
        equal = record.cost == OperationCost.of(again)
        yield equal, "operations", "the operations of its network", f"{trial}: other operations are recorded"
        actual = f"{trial}: the driver counted {flops or 0:.0f} FLOPs per image"
        yield flops in (None, again.matrix), "operations", f"{again.matrix} FLOPs per image", actual


def _work(config: AutomlConfig, record: TrialRecord, epochs: Epochs, splits: Splits) -> Iterator[Check]:
    """Compare with the splits: an epoch trains on each full global batch, a cut one on fewer without evaluation."""
    ranks = record.ranks or config.training.devices_per_trial
    batch = max(1, min(record.hyperparameters.batch_size, splits.training) // ranks) * ranks
    steps, trial = splits.training // batch, f"trial {record.trial}"
    recorded = record.status != "finished" or None not in (record.precision, record.trained_images)
    actual = f"{trial} finished without the driver's record"
    yield recorded, "data", "precision and images as the driver recorded them", actual
    accuracies = [(f"{trial}: held-out", record.held_out_accuracy, splits.held_out)]
    for epoch in epochs:
        where, trained = f"{trial}, epoch {epoch.epoch}", epoch.trained_images
        actual = f"{where}: trained {trained} images"
        yield trained <= splits.training, "data", f"at most {splits.training} images, the training split", actual
        yield trained == epoch.steps * batch, "data", f"{epoch.steps} steps of {batch} images", actual
        right = epoch.steps == steps or (epoch.steps < steps and not epoch.complete)
        yield right, "data", f"{steps} steps per epoch", f"{where}: {epoch.steps} steps"
        whole, evaluated = splits.validation if epoch.complete else 0, epoch.evaluated_images
        yield evaluated == whole, "data", f"{whole} validation images", f"{where}: evaluated {evaluated} images"
        right = epoch.complete or epoch.validation_accuracy is None
        yield right, "data", "no evaluation of a cut epoch", f"{where}: has a validation accuracy, but was cut"
        accuracies.append((f"{where}: validation", epoch.validation_accuracy, splits.validation))
    for where, accuracy, images in accuracies:
        if accuracy is not None:
            right = abs(accuracy * images - round(accuracy * images)) <= _COUNT_SLACK
            yield right, "data", f"a multiple of 1/{images}", f"{where} accuracy {accuracy:.8f}"


def _trial_times(record: TrialRecord, epochs: Epochs) -> Iterator[Check]:
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
        at_s: float | None = None
        match event:
            case journal.SessionBegan(clock_s=clock_s):
                expected = f"{latest_s:.1f} s, where the run's clock stopped"
                yield abs(clock_s - latest_s) <= _SLACK_S, "clock", expected, f"a session began at {clock_s:.1f} s"
                at_s = clock_s
            case journal.Heartbeat(clock_s=at_s) | journal.Remark(clock_s=at_s) | journal.SessionEnded(clock_s=at_s):
                clock_s = max(clock_s, at_s)
            case journal.TrialEvent(trial=record):
                where, key = f"trial {record.trial}, attempt {record.attempt}", (record.trial, record.attempt)
                at_s = record.started_s if record.ended_s is None else record.ended_s
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
                at_s, drift_s = epoch.ended_s, _CLOCK_DRIFT * epoch.ended_s
                where = f"trial {epoch.trial}, epoch {epoch.epoch}: its end"
                yield _between(where, at_s, clock_s - delay_s - drift_s, bound_s + drift_s)
        latest_s = max(latest_s, at_s or 0.0)


def _between(what: str, time_s: float, earliest_s: float, latest_s: float) -> Check:
    expected = f"between {earliest_s:.1f} and {latest_s:.1f} s, by the heartbeats around it"
    return earliest_s - _SLACK_S <= time_s <= latest_s + _SLACK_S, "clock", expected, f"{what} is at {time_s:.1f} s"


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


def lineage(events: Iterable[journal.Event], state: SearchState) -> Iterator[Check]:
    """Rebuild every network from its parent's morphs and from hyperparameters that were written into it."""
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
            derived: list[Network] = []
            for parent in forms.get(one.parent, []):
                with suppress(MorphError):
                    derived.append(reduce(apply_morph, one.morphs, parent))
            yield one.network in derived, "network", "its parent with its morphs applied", actual
        elif one.id:
            yield one.network in forms[0], "network", "the seed network", actual
        earlier.append(one.network)
