"""Versioned rules of valid results, and violations of them by recorded facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from accelmark.automl.records import Record
from accelmark.results.schema import Finding
from accelmark.spec.errors import RequestError, nearest

PRECISION_BITS: Final = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}


class Rules(Record):
    """One set of rules; a pretrained start is allowed by all and disclosed."""

    name: str
    version: int = 1
    min_duration_s: float = 0.0
    min_precision_bits: int = 16
    min_accuracy: float = 0.0
    """Held-out accuracy that must be exceeded; 0: any."""
    datasets: tuple[str, ...] = ()
    """Allowed data sets; empty: any."""


PRESETS: Final[dict[str, Rules]] = {
    rules.name: rules
    for rules in (
        Rules(name="aiperf-v1", min_duration_s=3600.0, min_accuracy=0.70, datasets=("imagenet",)),
        Rules(name="smoke"),
    )
}


def preset(name: str) -> Rules:
    """Return a rule set by name; raises RequestError with the nearest name."""
    if name not in PRESETS:
        raise RequestError(f"no rules are called {name!r} ({nearest(name, PRESETS)})")
    return PRESETS[name]


class Facts(Record):
    """Facts about a run as recorded, not as configured.

    precisions: those that trials computed in; empty where none was recorded.
    """

    duration_s: float
    precisions: frozenset[str]
    held_out_accuracy: float | None
    search_accuracy: float | None
    dataset: str
    pretrained: bool
    finished_trials: int
    interruptions: int


def violation(rule: str, expected: str, actual: str) -> Finding:
    """Return a finding that makes a search invalid."""
    return Finding(severity="error", rule=f"search-{rule}", expected=expected, actual=actual)


def violations(rules: Rules, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each violated rule."""
    if facts.duration_s < rules.min_duration_s:
        yield violation(
            "duration", f"at least {rules.min_duration_s:.0f} s", f"the search ran {facts.duration_s:.1f} s"
        )
    bits = f"at least {rules.min_precision_bits} bits"
    if not facts.precisions:
        yield violation("precision", bits, "no precision was recorded")
    for name in sorted(facts.precisions):
        if PRECISION_BITS.get(name, 0) < rules.min_precision_bits:
            known = "" if name in PRECISION_BITS else ", whose bits are unknown"
            yield violation("precision", bits, f"trials computed in {name!r}{known}")
    accuracy, wanted = facts.held_out_accuracy, f"held-out accuracy above {rules.min_accuracy:.2f}"
    if accuracy is None:
        yield violation("accuracy", wanted, "no held-out accuracy was measured")
    elif accuracy <= rules.min_accuracy and rules.min_accuracy:
        yield violation("accuracy", wanted, f"the held-out accuracy is {accuracy:.4f}")
    if facts.finished_trials == 0:
        yield violation("trials", "at least one finished trial", "no trial finished")
    if rules.datasets and facts.dataset not in rules.datasets:
        yield violation("dataset", f"data set {' or '.join(rules.datasets)}", f"the data set is {facts.dataset!r}")


def disclosures(facts: Facts) -> tuple[str, ...]:
    """Return facts about the run that have to be disclosed, valid or not."""
    lines = [f"the search started from {'pretrained' if facts.pretrained else 'random'} weights"]
    if facts.search_accuracy is not None:
        lines.append(f"best error on the validation split, which the search optimizes: {1 - facts.search_accuracy:.4f}")
    if facts.interruptions:
        lines.append(f"the run was interrupted and resumed {facts.interruptions} times")
    return tuple(lines)
