"""Versioned rules of valid results, and violations of them by recorded facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from accelmark.automl.records import Record
from accelmark.results.schema import Finding

PRECISION_BITS: Final = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}

Check = tuple[bool, str, str, str]
"""Whether a fact agrees with a rule, the rule's name, what is expected, and the fact."""


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
    sample_s: float = 30.0
    """Interval of the series of figures."""


PRESETS: Final[dict[str, Rules]] = {
    rules.name: rules
    for rules in (
        Rules(name="aiperf-v1", min_duration_s=3600.0, min_accuracy=0.70, datasets=("imagenet",), sample_s=360.0),
        Rules(name="smoke"),
    )
}


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

    def disclosures(self) -> Iterator[str]:
        """Yield what has to be disclosed, valid or not."""
        yield f"the search started from {'pretrained' if self.pretrained else 'random'} weights"
        if self.search_accuracy is not None:
            yield f"best error on the validation split, which the search optimizes: {1 - self.search_accuracy:.4f}"
        if self.interruptions:
            yield f"the run was interrupted and resumed {self.interruptions} times"


def violations(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield a finding, which makes a search invalid, for each fact that does not agree with its rule."""
    for agrees, rule, expected, actual in checks:
        if not agrees:
            yield Finding(severity="error", rule=f"search-{rule}", expected=expected, actual=actual)


def rule_checks(rules: Rules, facts: Facts) -> Iterator[Check]:
    """Check the facts by each rule."""
    least_s, lasted_s, bits = rules.min_duration_s, facts.duration_s, f"at least {rules.min_precision_bits} bits"
    yield lasted_s >= least_s, "duration", f"at least {least_s:.0f} s", f"the search ran {lasted_s:.1f} s"
    yield bool(facts.precisions), "precision", bits, "no precision was recorded"
    for name in sorted(facts.precisions):
        known = "" if name in PRECISION_BITS else ", whose bits are unknown"
        enough = PRECISION_BITS.get(name, 0) >= rules.min_precision_bits
        yield enough, "precision", bits, f"trials computed in {name!r}{known}"
    accuracy, wanted = facts.held_out_accuracy, f"held-out accuracy above {rules.min_accuracy:.2f}"
    if accuracy is None:
        yield False, "accuracy", wanted, "no held-out accuracy was measured"
    else:
        enough = accuracy > rules.min_accuracy or not rules.min_accuracy
        yield enough, "accuracy", wanted, f"the held-out accuracy is {accuracy:.4f}"
    yield facts.finished_trials > 0, "trials", "at least one finished trial", "no trial finished"
    allowed = not rules.datasets or facts.dataset in rules.datasets
    yield allowed, "dataset", f"data set {' or '.join(rules.datasets)}", f"the data set is {facts.dataset!r}"
