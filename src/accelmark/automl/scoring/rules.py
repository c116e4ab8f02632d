"""Versioned rules of valid results, and checks of the recorded facts by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.controller.state import SearchState
from accelmark.automl.records import Record
from accelmark.automl.scoring.score import Scoreboard
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


def violations(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield a finding, which makes a search invalid, for each fact that does not agree with its rule."""
    for agrees, rule, expected, actual in checks:
        if not agrees:
            yield Finding(severity="error", rule=f"search-{rule}", expected=expected, actual=actual)


def rule_checks(config: AutomlConfig, state: SearchState, board: Scoreboard) -> Iterator[Check]:
    """Check a search as recorded, not as configured, by each rule."""
    rules, error = PRESETS[config.rules], board.final().error
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
    identities = {session.dataset_identity for session in state.sessions if session.dataset_identity is not None}
    dataset = " or ".join(sorted(identities)) or config.dataset.name
    dataset += "" if config.dataset.limit is None else " (a part of it)"
    allowed = not rules.datasets or dataset in rules.datasets
    yield allowed, "dataset", f"data set {' or '.join(rules.datasets)}", f"the data set is {dataset!r}"


def disclosures(config: AutomlConfig, state: SearchState, board: Scoreboard) -> Iterator[str]:
    """Yield what has to be disclosed, valid or not."""
    pretrained, search_error = config.search.initial_weights is not None, board.final().search_error
    yield f"the search started from {'pretrained' if pretrained else 'random'} weights"
    if search_error is not None:
        yield f"best error on the validation split, which the search optimizes: {search_error:.4f}"
    if state.interruptions:
        yield f"the run was interrupted and resumed {state.interruptions} times"
