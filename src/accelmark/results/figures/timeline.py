"""Merge the logs of all ranks of a round into one timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from accelmark.results.read.train_log import Attempt, TrainLog, read_train_log
from accelmark.spec.events import Compiled, Evaluation, Finished, Inspected, Started

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]
    Indices = NDArray[np.integer[Any]]
    Column = Sequence[float] | Floats


@final
@dataclass(frozen=True, slots=True)
class RankEnd:
    """The parts of a rank's log that are not merged."""

    rank: int
    started: Started | None
    finished: Finished | None
    inspected: Inspected | None
    compiled: Compiled | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    malformed: int
    malformed_lines: tuple[int, ...]
    truncated: bool
    """The last line of its log is incomplete."""


@final
@dataclass(frozen=True, slots=True)
class TimedEvaluation:
    """An evaluation of the lead rank and the raw training time at its end."""

    time_s: float
    evaluation: Evaluation


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """One round over all its ranks; job-wide times are those of the lead rank.

    The lead is the lowest rank whose log has windows of steps, else the lowest rank with a log.
    """

    lead: int
    ranks: tuple[RankEnd, ...]
    num_attempts: int
    e2e_s: float
    """From the start of the process to its last event, summed over attempts."""
    init_s: float | None
    """From the start of the process to TRAIN_START, summed over attempts; None if training never started."""
    train_s: float
    """Raw training time, summed over attempts."""
    eval_s: float
    train_ended: bool
    """Whether the last attempt wrote TRAIN_END."""
    compute_s: float
    """Computation of all steps on the slowest rank."""
    data_wait_s: float
    """Time waiting for data, mean over ranks."""
    num_steps: int
    num_samples: int
    evaluations: tuple[TimedEvaluation, ...]
    step_ms: Floats
    """Every step of every rank, unsorted."""
    losses: Floats
    """Loss by optimizer step (entry 0 is step 1), mean over ranks; NaN where any is not finite or missing."""
    nonfinite_step: int | None
    """The first step at which a rank's loss was not finite."""
    window_steps: Floats
    """Optimizer steps completed at the end of each window of the lead rank."""
    window_time_s: Floats
    """Raw training time at the end of each window."""
    window_samples: Floats
    window_wall_s: Floats
    window_lengths: Floats
    train_spans: dict[str, tuple[tuple[float, float], ...]]
    """Node directory -> (begin, end) of raw training of each attempt, in seconds of that host's monotonic clock."""

    @property
    def lead_end(self) -> RankEnd:
        """The lead rank."""
        return next(end for end in self.ranks if end.rank == self.lead)

    @property
    def final_loss(self) -> float | None:
        """Mean loss of the last step over ranks; None where it is not finite or nothing was trained."""
        if not len(self.losses):
            return None
        last = float(self.losses[-1])
        return last if last == last else None


@final
@dataclass(slots=True)
class _Losses:
    """Sum over ranks of the loss of each step."""

    total: Floats
    count: Floats

    def fold(self, attempts: Iterable[Attempt]) -> None:
        import numpy as np

        own = np.full(len(self.total), np.nan)
        seen = np.zeros(len(self.total), dtype=bool)
        for attempt in attempts:
            if not len(attempt.losses):
                continue
            lengths = np.asarray(attempt.num_losses).astype(np.int64)
            first = np.asarray(attempt.window_steps).astype(np.int64) - lengths
            starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
            index = np.repeat(first - starts, lengths) + np.arange(int(lengths.sum()))
            needed = int(index.max()) + 1
            if needed > len(own):
                own = np.concatenate((own, np.full(needed - len(own), np.nan)))
                seen = np.concatenate((seen, np.zeros(needed - len(seen), dtype=bool)))
            kept = index >= 0
            own[index[kept]] = np.asarray(attempt.losses)[kept]
            seen[index[kept]] = True
        grow = len(own) - len(self.total)
        if grow > 0:
            self.total = np.concatenate((self.total, np.zeros(grow)))
            self.count = np.concatenate((self.count, np.zeros(grow)))
        self.total[: len(own)] += np.where(seen, own, 0.0)
        self.count[: len(own)] += seen

    def mean(self) -> Floats:
        import numpy as np

        with np.errstate(invalid="ignore", divide="ignore"):
            return self.total / self.count

    def nonfinite_step(self) -> int | None:
        import numpy as np

        bad = np.flatnonzero(~np.isfinite(self.total))
        return int(bad[0]) + 1 if len(bad) else None


@final
@dataclass(slots=True)
class _Fold:
    """Accumulates the logs of the ranks."""

    lead: TrainLog | None = None
    has_windows: bool = False
    ends: list[RankEnd] = field(default_factory=list)
    step_ms: list[Floats] = field(default_factory=list)
    compute_ms: float = 0.0
    data_wait_ms: float = 0.0
    spans: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


def read_timeline(logs: Iterable[tuple[int, Path]]) -> Timeline | None:
    """Merge the logs of all ranks, given as (global rank, path); None where no log has an event.

    Raises:
        RunError: a log cannot be read.
    """
    import numpy as np

    fold = _Fold()
    losses = _Losses(np.zeros(0), np.zeros(0))
    for rank, path in sorted(logs):
        log = read_train_log(path, rank)
        if not log.attempts:
            continue
        has_windows = any(attempt.window_steps for attempt in log.attempts)
        if fold.lead is None or (has_windows and not fold.has_windows):
            fold.lead, fold.has_windows = log, has_windows
            fold.spans.pop(str(path.parent), None)
        fold.ends.append(_end_of(log))
        fold.step_ms.append(np.frombuffer(log.step_ms, dtype=np.float32))
        fold.compute_ms = max(fold.compute_ms, log.compute_ms)
        fold.data_wait_ms += log.data_wait_ms
        fold.spans.setdefault(str(path.parent), _spans(log))
        losses.fold(log.attempts)
    if fold.lead is None:
        return None
    return _timeline(fold, fold.lead, losses)


def _end_of(log: TrainLog) -> RankEnd:
    return RankEnd(
        log.rank,
        log.started,
        log.finished,
        log.inspected,
        log.compiled,
        tuple(log.warnings),
        tuple(log.errors),
        log.report.malformed + log.invalid,
        log.report.malformed_lines,
        log.report.truncated,
    )


def _spans(log: TrainLog) -> tuple[tuple[float, float], ...]:
    return tuple(
        (attempt.train_start_ms / 1e3, (attempt.train_start_ms + attempt.train_ms) / 1e3)
        for attempt in log.attempts
        if attempt.train_start_ms is not None
    )


def _timeline(fold: _Fold, lead: TrainLog, losses: _Losses) -> Timeline:
    import numpy as np

    attempts = lead.attempts
    begun = [attempt for attempt in attempts if attempt.train_start_ms is not None]
    inits = [(attempt.train_start_ms or 0.0) - attempt.begin_ms for attempt in begun]
    windows = _windows(begun)
    return Timeline(
        lead=lead.rank,
        ranks=tuple(fold.ends),
        num_attempts=len(attempts),
        e2e_s=sum(attempt.last_ms - attempt.begin_ms for attempt in attempts) / 1e3,
        init_s=sum(inits) / 1e3 if begun else None,
        train_s=sum(attempt.train_ms for attempt in begun) / 1e3,
        eval_s=sum(attempt.eval_s for attempt in begun),
        train_ended=bool(begun) and begun[-1].train_end_ms is not None,
        compute_s=fold.compute_ms / 1e3,
        data_wait_s=fold.data_wait_ms / 1e3 / len(fold.ends),
        num_steps=int(windows["steps"][-1]) if len(windows["steps"]) else 0,
        num_samples=int(windows["samples"][-1]) if len(windows["samples"]) else 0,
        evaluations=_evaluations(begun),
        step_ms=np.concatenate(fold.step_ms),
        losses=losses.mean(),
        nonfinite_step=losses.nonfinite_step(),
        window_steps=windows["steps"],
        window_time_s=windows["time_s"],
        window_samples=windows["samples"],
        window_wall_s=windows["wall_s"],
        window_lengths=windows["lengths"],
        train_spans=fold.spans,
    )


def _windows(begun: list[Attempt]) -> dict[str, Floats]:
    import numpy as np

    columns: dict[str, list[Floats]] = {"steps": [], "samples": [], "time_s": [], "wall_s": [], "lengths": []}
    before_ms = 0.0
    for attempt in begun:
        start = attempt.train_start_ms or 0.0
        columns["steps"].append(np.asarray(attempt.window_steps, dtype=np.float64))
        columns["samples"].append(np.asarray(attempt.window_samples, dtype=np.float64))
        columns["time_s"].append((np.asarray(attempt.window_ms, dtype=np.float64) - start + before_ms) / 1e3)
        columns["wall_s"].append(np.asarray(attempt.window_wall_ms, dtype=np.float64) / 1e3)
        columns["lengths"].append(np.asarray(attempt.window_lengths, dtype=np.float64))
        before_ms += attempt.train_ms
    return {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in columns.items()}


def _evaluations(begun: list[Attempt]) -> tuple[TimedEvaluation, ...]:
    found: list[TimedEvaluation] = []
    before_ms = 0.0
    for attempt in begun:
        start = attempt.train_start_ms or 0.0
        for at_ms, evaluation in attempt.evaluations:
            found.append(TimedEvaluation((at_ms - start + before_ms) / 1e3, evaluation))
        before_ms += attempt.train_ms
    return tuple(found)


def merged_inspection(ends: Sequence[RankEnd]) -> Inspected | None:
    """Merge the INSPECTED events of all ranks, with the lowest sample count; None where no rank wrote one.

    A rank without the event, where others have it, is reported as a reason.
    """
    seen = [end.inspected for end in ends if end.inspected is not None]
    if not seen:
        return None
    counts = [one.samples_seen for one in seen if one.samples_seen is not None]
    reasons = [one.samples_reason for one in seen if one.samples_reason is not None]
    reasons += [f"rank {end.rank} did not report its steps" for end in ends if end.inspected is None]
    types = sorted({name for one in seen for name in one.compute_types or ()})
    without = [one.compute_reason for one in seen if one.compute_reason is not None]
    return Inspected(
        replaced_functions=tuple(dict.fromkeys(name for one in seen for name in one.replaced_functions)),
        probed_steps=seen[0].probed_steps,
        samples_credited=seen[0].samples_credited,
        samples_seen=min(counts, default=None),
        samples_reason=next(iter(reasons), None),
        compute_types=tuple(types) or None,
        compute_reason=next(iter(without), None),
    )
