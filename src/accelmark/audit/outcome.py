"""Rules about what came out: rounds, targets, telemetry, the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from accelmark.audit.evidence import Evidence, finding
from accelmark.results.figures.definitions import FigureName
from accelmark.results.schema import Finding

MIN_TRAIN_S: Final = {"mini": 10.0, "standard": 60.0}
"""Least raw training time for throughput and energy to be steady, by the size of a case."""

TOO_SHORT_S: Final = 1.0
"""Below it, starting and ending weigh too much for any rate to be called measured."""

_MEASURED_SLACK: Final = 1.05
"""A probe is a measurement too, and may come out a little low."""

_SAID: Final = {"lost": "was lost", "cancelled": "was cancelled", "timed_out": "timed out", "failed": "failed"}


def rounds_complete(evidence: Evidence) -> Iterator[Finding]:
    """Check that all rounds that were planned succeeded, and they are as many as the case wants."""
    if not evidence.rounds:
        yield finding("error", "rounds-complete", "a result", "no round left a result")
        return
    for entry in evidence.rounds:
        state = entry.result.state
        if state != "succeeded":
            actual = f"round {entry.number} {_SAID.get(state, f'is {state}')}: {entry.result.reason}"
            yield finding("error", "rounds-complete", "every round succeeds", actual)
    if len(evidence.rounds) < evidence.num_wanted:
        actual = f"{len(evidence.rounds)} of {evidence.num_wanted} rounds have a result"
        yield finding("error", "rounds-complete", f"{evidence.num_wanted} rounds", actual)
    wanted = max(entry.result.min_rounds for entry in evidence.rounds)
    if len(evidence.good) < wanted:
        actual = f"{len(evidence.good)} rounds succeeded, the case wants at least {wanted}"
        yield finding("error", "enough-rounds", f"at least {wanted}", actual)


def target_reached(evidence: Evidence) -> Iterator[Finding]:
    """Check that each round met the case's target; the band of a reference loss has a rule of its own."""
    for entry in evidence.good:
        target, hit = entry.result.target, entry.result.figures.get(FigureName.TIME_TO_TARGET)
        if entry.result.converged is False and target is not None and (hit is None or hit.value is None):
            goal = f"{target['metric']} {str(target['direction']).replace('_', ' ')} {target['value']:g}"
            yield finding("error", "target-reached", goal, "the round did not reach the target", entry)


def real_data(evidence: Evidence) -> Iterator[Finding]:
    """Check that the data was real, and the evaluation of all of it."""
    for entry in evidence.good:
        if "synthetic" in entry.result.marks:
            actual = "the data (or the weights) were synthetic: a figure of speed only"
            yield finding("error", "real-data", "the case's own data", actual, entry)
        if "partial_evaluation" in entry.result.marks:
            actual = "the evaluation was of a part of its data"
            yield finding("error", "whole-evaluation", "all of the evaluation data", actual, entry)


def enough_duration(evidence: Evidence) -> Iterator[Finding]:
    """Check that training took long enough for its rates to mean something."""
    size = evidence.standard.spec.size if evidence.standard is not None else "mini"
    for entry in evidence.good:
        figure = entry.result.figures.get(FigureName.RAW_TRAIN_TIME)
        if figure is None or figure.value is None:
            continue
        if figure.value < TOO_SHORT_S:
            expected = f"at least {TOO_SHORT_S:g} s of training, to be timed at all"
            yield finding("open", "enough-duration", expected, f"it trained for {figure.value:.2f} s", entry)
        elif figure.value < MIN_TRAIN_S[size]:
            expected = f"at least {MIN_TRAIN_S[size]:g} s of training for a {size} case"
            yield finding("warning", "enough-duration", expected, f"it trained for {figure.value:.1f} s", entry)


def plausible_utilisation(evidence: Evidence) -> Iterator[Finding]:
    """Check that no round computed faster than its chip can, nor than the probe measured of it."""
    for entry in evidence.good:
        stated, measured = (entry.result.figures.get(name) for name in (FigureName.MFU, FigureName.MFU_MEASURED))
        if stated is not None and stated.value is not None and stated.value > 1:
            actual = f"MFU {stated.value:.2f}: another chip, another precision, or work that was not done"
            yield finding("error", "plausible-utilisation", "at most the chip's stated peak", actual, entry)
        if measured is not None and measured.value is not None and measured.value > _MEASURED_SLACK:
            actual = f"{measured.value:.2f} of what the probe measured: the probe was disturbed, probe again"
            yield finding("warning", "measured-ceiling", "at most the measured ceiling", actual, entry)


def in_one_go(evidence: Evidence) -> Iterator[Finding]:
    """Check that no round was interrupted."""
    for entry in evidence.rounds:
        if "resumed" in entry.result.marks:
            actual = "the run was resumed: work redone after the checkpoint counts as time"
            yield finding("warning", "one-go", "a round without interruption", actual, entry)


def chip_identity(evidence: Evidence) -> Iterator[Finding]:
    """Check that the device is the chip whose peaks the figures are compared with."""
    for entry in evidence.good:
        started, chip = entry.started, entry.result.chip
        if started is None or started.device_name is None or started.device_type == "cpu":
            continue  # PyTorch names no chip behind the CPU
        if chip is None:
            actual = f"{started.device_name!r} is no chip that vendor {entry.result.vendor} describes"
            yield finding("warning", "chip-identity", "a chip with stated peaks", actual, entry)
            continue
        expected = f"{chip.name} {chip.variant}".strip()
        if not chip.model_copy(update={"memory_gib": None}).matches(started.device_name, None):
            yield finding("error", "chip-identity", expected, f"the device is {started.device_name!r}", entry)
