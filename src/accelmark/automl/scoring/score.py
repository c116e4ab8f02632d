"""Score, error, regulated score and other figures of a search, and its verdict by versioned rules.

Score = operations / seconds from the first attempt's start to the last recorded epoch of any attempt; operations are
those of attempts that gave a result. Error = 1 - accuracy. Regulated score = -ln(Error) x Score.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import inf, log
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from accelmark.audit.verdict import verdict_of
from accelmark.automl.config import AutomlConfig
from accelmark.automl.journal import SearchDirectory, SearchState, first_broken_line, read_journal
from accelmark.automl.records import FAILURES, TrialRecord
from accelmark.automl.scoring.consistency import Check, consistency_checks
from accelmark.results.rounds import search
from accelmark.results.schema import Finding, finding
from accelmark.spec.number_format import counted, percent

Vector = NDArray[np.float64]

_NONE: Final = -1.0
"""Accuracy of what was not evaluated: below all others."""
PRECISION_BITS: Final = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}


def regulated(score: float, error: float | None) -> float | None:
    """Return -ln(error) x score; None without an error, or with an error of 0, whose logarithm is infinite."""
    return None if error is None or error <= 0 else -log(error) * score


def _known(accuracy: float | None) -> float:
    return _NONE if accuracy is None else accuracy


class Scoreboard:
    """The scored records of a search: attempts that gave a result or are running.

    trials     the latest attempt of each trial
    started_s  start of the first attempt of any trial
    ended_s    end of the last recorded epoch (or part of one) of any attempt
    """

    def __init__(self, state: SearchState) -> None:
        self.trials = state.trials
        self._state: Final = state
        self.started_s = min((record.started_s for record in state.attempts.values()), default=0.0)
        self.ended_s = max((totals.ended_s for totals in state.totals.values() if totals.ended_s), default=0.0)
        self.ended_s = max(self.ended_s, self.started_s)

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
                leader = max(record, best[-1][1] if best else record, key=self._validated)
                best.append((record.ended_s, leader))
        return best

    def _validated(self, record: TrialRecord) -> tuple[float, int]:
        return _known(self.best_validation(record.trial)), -record.trial

    def operations_until(self, time_s: float) -> float:
        """Return the operations until ``time_s``; an epoch under way counts by its share of time."""
        begun, ended, operations, _ = self._epochs
        shares = (time_s - begun) / np.maximum(ended - begun, 1e-9)
        return float(np.where(ended <= time_s, 1.0, np.clip(shares, 0.0, 1.0)) @ operations)

    def best_trial_at(self, time_s: float) -> TrialRecord | None:
        """Return the trial with the best validation accuracy among those with a held-out accuracy."""
        number = bisect_right(self._bests, time_s, key=itemgetter(0))
        return self._bests[number - 1][1] if number else None

    def best_validation(self, trial: int) -> float | None:
        """Return a trial's best validation accuracy."""
        record = self.trials[trial]
        return None if record.status in FAILURES else self._state.totals_of(record).accuracy

    def at(self, time_s: float) -> search.SearchPoint:
        """Return all figures at ``time_s``.

        The search's error is that of the best epoch that ended by then, the held-out error that of the best trial.
        """
        _, ended, _, accuracies = self._epochs
        number = int(np.searchsorted(ended, time_s, "right"))
        accuracy = float(accuracies[number - 1]) if number else _NONE
        return self._point(time_s, self.operations_until(time_s), accuracy, time_s)

    def final(self) -> search.SearchPoint:
        """Return the figures of the whole run: the score ends with the last epoch, held-out evaluations may follow."""
        totals = [(record.cost, self._state.totals_of(record)) for record in self._state.useful()]
        operations = float(sum(cost.operations(each) for cost, each in totals))
        accuracy = max((_known(each.accuracy) for _, each in totals), default=_NONE)
        return self._point(self.ended_s, operations, accuracy, inf)

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
    """Return the use of the workers' time from the first trial's start to the last one's end, all attempts included.

    While trials run, it is the use until the latest event; the epochs that have not ended then count as work.
    """
    records, totals = list(state.attempts.values()), list(state.totals.values())
    end_s = max([*(record.ended_s or record.started_s for record in records), *(each.ended_s for each in totals), 0.0])
    available_s = state.workers * (end_s - Scoreboard(state).started_s)
    begun_s = [
        max(record.started_s, state.totals_of(record).ended_s) for record in records if record.status == "running"
    ]
    training_s = sum(each.training_s for each in totals)
    evaluating_s = sum(each.evaluating_s for each in totals) + sum(record.held_out_s for record in records)
    waited_s = sum(each.data_wait_s for each in totals)
    began = any(each.ended_s for each in totals)
    worked_s = training_s + evaluating_s - waited_s + sum(end_s - begin_s for begin_s in begun_s if began)
    return search.SearchUtilisation(
        workers=state.workers,
        available_s=available_s,
        training_s=training_s,
        evaluating_s=evaluating_s,
        data_wait_s=waited_s,
        idle_share=max(0.0, 1 - worked_s / available_s) if worked_s > 0 and available_s > 0 else None,
    )


def _pinned(config: AutomlConfig) -> Iterator[Finding]:
    """Yield what differs from the search that the rules fix: its score cannot be compared with others of the rules."""
    values = config.by_key()
    for key, expected in config.rules.pinned.items():
        actual = values[key]
        if _listed(actual) != _listed(expected):
            yield finding("open", "search-altered", f"{key} {_listed(expected)}", f"{key} is {_listed(actual)}")


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


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
    wanted, found = f"held-out accuracy above {rules.min_accuracy:.2f}", "no held-out accuracy was measured"
    if error is not None:
        found = f"the held-out accuracy is {1 - error:.4f}"
    enough = error is not None and (1 - error > rules.min_accuracy or not rules.min_accuracy)
    yield enough, "accuracy", wanted, found
    finished = any(record.status == "finished" for record in board.trials.values())
    yield finished, "trials", "at least one finished trial", "no trial finished"
    identities = {session.dataset_identity for session in state.sessions}
    dataset = " or ".join(sorted(identities)) or config.dataset.name
    dataset += "" if config.dataset.limit is None else " (a part of it)"
    allowed = not rules.datasets or dataset in rules.datasets
    yield allowed, "dataset", f"data set {' or '.join(rules.datasets)}", f"the data set is {dataset!r}"


def _disclosures(config: AutomlConfig, state: SearchState, board: Scoreboard) -> Iterator[str]:
    """Yield what has to be disclosed, valid or not."""
    pretrained, search_error = config.search.initial_weights is not None, board.final().search_error
    yield f"the search started from {'pretrained' if pretrained else 'random'} weights"
    if search_error is not None:
        yield f"best error on the validation split, which the search optimizes: {percent(search_error, 3)}"
    if state.interruptions:
        yield f"the run was interrupted and resumed {counted(state.interruptions, 'time')}"


def summarise(
    directory: SearchDirectory, *, state: SearchState | None = None, series: bool = True
) -> search.SearchSummary:
    """Compute the figures of a search, without ``series`` at its end only; raises RunError where it is not readable."""
    config, known = directory.config(), state or directory.state()
    board, ended = Scoreboard(known), known.ended
    best, useful = board.best_trial_at(known.clock_s + 1), [known.totals_of(record) for record in known.useful()]
    return search.SearchSummary(
        run=directory.name,
        status="over" if ended and ended.over
        else "stopped" if ended
        else "running" if directory.is_running() else "interrupted",
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
        failures=tuple(
            f"trial {record.trial}, attempt {record.attempt}: {record.status}: {record.reason}"
            for record in known.attempts.values()
            if record.status not in ("running", "finished", "cut")
        ),
        notes=tuple(f"{note.clock_s:.1f} s: {note.text}" for note in known.notes),
        journal_bytes=directory.journal_bytes,
    )  # fmt: skip


def verdict(config: AutomlConfig, state: SearchState, checks: Iterable[Check] = ()) -> search.SearchVerdict:
    """Return the audit's verdict by the rules and by further checks."""
    rules, board = config.rules, Scoreboard(state)
    findings = [
        Finding(severity="error", rule=f"search-{rule}", expected=expected, actual=actual)
        for agrees, rule, expected, actual in (*_rule_checks(config, state, board), *checks)
        if not agrees
    ]
    findings += _pinned(config)
    return search.SearchVerdict(
        rules=rules.name,
        version=rules.version,
        rules_sha256=rules.sha256,
        verdict=verdict_of(findings),
        reasons=tuple(dict.fromkeys(map(str, findings))),
        disclosures=tuple(_disclosures(config, state, board)),
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
        **dict(verdict(config, state, [linked, *consistency_checks(config, events, state)])),
        checked=(
            f"{len(state.trials)} trials and {epochs} epochs read; {total:,} operations counted again",
            f"{len(state.individuals)} networks rebuilt from their parents",
            f"{len(events) if broken is None else broken - 1} journal lines have the hash of the line before",
        ),
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
