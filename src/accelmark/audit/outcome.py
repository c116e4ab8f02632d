"""Rules about the outcome: rounds, target, data, duration, utilisation and the chip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from accelmark.audit.evidence import Evidence
from accelmark.results.figure_names import FigureName
from accelmark.results.schema import Finding, finding

MIN_TRAIN_S: Final = {"mini": 10.0, "standard": 60.0}
"""Raw training time from which throughput and energy are steady, by the size of a case."""

MIN_TIMED_S: Final = 1.0
"""Below this raw training time, start and end dominate, and a rate is not a measurement."""

_MEASURED_TOLERANCE: Final = 1.05
"""Largest MFU against the probe's ceiling, which is a measurement too and may be slightly low."""

_STATES: Final = {"lost": "was lost", "cancelled": "was cancelled", "timed_out": "timed out", "failed": "failed"}


def rounds_complete(evidence: Evidence) -> Iterator[Finding]:
    """Check that all planned rounds succeeded, and that they are as many as the case requires."""
    if not evidence.rounds:
        yield finding("error", "rounds-complete", "", "no round has a result")
        return
    for entry in evidence.rounds:
        state = entry.result.state
        if state != "succeeded":
            actual = f"round {entry.number} {_STATES.get(state, f'is {state}')}: {entry.result.reason}"
            yield finding("error", "rounds-complete", "", actual)
    if len(evidence.rounds) < evidence.num_planned:
        actual = f"{len(evidence.rounds)} of {evidence.num_planned} planned rounds have a result"
        yield finding("error", "rounds-complete", "", actual)
    required = max(entry.result.min_rounds for entry in evidence.rounds)
    if len(evidence.succeeded) < required:
        yield finding("error", "enough-rounds", f"at least {required}", f"{len(evidence.succeeded)} rounds succeeded")


def target_reached(evidence: Evidence) -> Iterator[Finding]:
    """Check that each round reached the case's target; the rule ``reference-loss`` covers reference curves."""
    for entry in evidence.succeeded:
        target, hit = entry.result.target, entry.result.figures.get(FigureName.TIME_TO_TARGET)
        if entry.result.converged is False and target is not None and (hit is None or hit.value is None):
            goal = f"{target['metric']} {str(target['direction']).replace('_', ' ')} {target['value']:g}"
            yield finding("error", "target-reached", goal, "the target was not reached", entry.number)


def real_data(evidence: Evidence) -> Iterator[Finding]:
    """Check that real data was used, and that the evaluation used all of it."""
    for entry in evidence.succeeded:
        if "synthetic" in entry.result.marks:
            actual = "synthetic data or weights: the result shows speed only"
            yield finding("error", "real-data", "the case's data", actual, entry.number)
        if "partial_evaluation" in entry.result.marks:
            actual = "only part of the data was evaluated"
            yield finding("error", "whole-evaluation", "all evaluation data", actual, entry.number)


def enough_duration(evidence: Evidence) -> Iterator[Finding]:
    """Check that training took long enough for its rates to be meaningful."""
    size = evidence.standard.spec.size if evidence.standard is not None else "mini"
    for entry in evidence.succeeded:
        figure = entry.result.figures.get(FigureName.RAW_TRAIN_TIME)
        if figure is None or figure.value is None:
            continue
        if figure.value < MIN_TIMED_S:
            actual = f"training took {figure.value:.2f} s, too short to be timed"
            yield finding("open", "enough-duration", f"at least {MIN_TIMED_S:g} s", actual, entry.number)
        elif figure.value < MIN_TRAIN_S[size]:
            expected = f"at least {MIN_TRAIN_S[size]:g} s for a {size} case"
            yield finding("warning", "enough-duration", expected, f"training took {figure.value:.1f} s", entry.number)


def plausible_utilisation(evidence: Evidence) -> Iterator[Finding]:
    """Check that no round exceeds the chip's peak, or the ceiling that the probe measured."""
    for entry in evidence.succeeded:
        stated, measured = (entry.result.figures.get(name) for name in (FigureName.MFU, FigureName.MFU_MEASURED))
        if stated is not None and stated.value is not None and stated.value > 1:
            actual = f"MFU {stated.value:.2f} exceeds the chip's peak: wrong chip or precision, or work was skipped"
            yield finding("error", "plausible-utilisation", "at most 1", actual, entry.number)
        if measured is not None and measured.value is not None and measured.value > _MEASURED_TOLERANCE:
            actual = f"MFU {measured.value:.2f} against the probe's ceiling: the probe was disturbed, probe again"
            yield finding("warning", "measured-ceiling", "at most 1", actual, entry.number)


def not_resumed(evidence: Evidence) -> Iterator[Finding]:
    """Report rounds that were resumed from a checkpoint."""
    for entry in evidence.rounds:
        if "resumed" in entry.result.marks:
            actual = "the round was resumed: steps repeated after the checkpoint count as time"
            yield finding("warning", "one-go", "", actual, entry.number)


def chip_identity(evidence: Evidence) -> Iterator[Finding]:
    """Check that the device is the chip whose peaks are used."""
    for entry in evidence.succeeded:
        started, chip = entry.started, entry.result.chip
        if started is None or started.device_name is None or started.device_type == "cpu":
            continue  # frameworks report no chip name for CPUs
        if chip is None:
            actual = f"vendor {entry.result.vendor} describes no chip {started.device_name!r}: its peaks are unknown"
            yield finding("warning", "chip-identity", "", actual, entry.number)
            continue
        expected = f"{chip.name} {chip.variant}".strip()
        if not chip.model_copy(update={"memory_gib": None}).matches(started.device_name, None):
            yield finding("error", "chip-identity", expected, f"the device is {started.device_name!r}", entry.number)
