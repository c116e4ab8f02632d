"""Versioned rules: which results are valid, judged from what was recorded, with every reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from pydantic import BaseModel, ConfigDict

from accelmark.spec.errors import RequestError, nearest

Verdict = Literal["VALID", "INVALID"]

PRECISION_BITS: Final = {"fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}


class Rules(BaseModel):
    """One set of rules. ``error_of`` says which error is held against ``min_accuracy``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    min_duration_s: float
    min_precision_bits: int
    min_accuracy: float
    datasets: tuple[str, ...]
    error_of: Literal["held-out", "search"]
    pretrained_allowed: bool


PRESETS: Final[dict[str, Rules]] = {
    "aiperf-v1": Rules(
        name="aiperf-v1",
        version=1,
        min_duration_s=3600.0,
        min_precision_bits=16,
        min_accuracy=0.70,
        datasets=("imagenet",),
        error_of="held-out",
        pretrained_allowed=True,
    ),
    "smoke": Rules(
        name="smoke",
        version=1,
        min_duration_s=0.0,
        min_precision_bits=16,
        min_accuracy=0.0,
        datasets=(),
        error_of="held-out",
        pretrained_allowed=True,
    ),
}


def preset(name: str) -> Rules:
    """Return a rule set by name; raises RequestError with the nearest name."""
    if name not in PRESETS:
        raise RequestError(f"no rules are called {name!r} ({nearest(name, PRESETS)})")
    return PRESETS[name]


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """What a run is judged by: recorded, never configured.

    precisions: those that trials really computed in; an empty set means that none was recorded.
    """

    duration_s: float
    precisions: frozenset[str]
    held_out_accuracy: float | None
    search_accuracy: float | None
    dataset: str
    pretrained: bool
    finished_trials: int
    interruptions: int


@final
@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a result is valid by a rule set, every reason why not, and what a reader must be told anyway."""

    rules: str
    version: int
    verdict: Verdict
    reasons: tuple[str, ...]
    disclosures: tuple[str, ...]


def judge(rules: Rules, facts: Facts) -> Judgement:
    """Hold recorded facts against rules."""
    reasons = [*_duration(rules, facts), *_precision(rules, facts), *_accuracy(rules, facts)]
    if facts.finished_trials == 0:
        reasons.append("no trial finished")
    if rules.datasets and facts.dataset not in rules.datasets:
        reasons.append(f"data set {facts.dataset!r}; the rules ask for {' or '.join(rules.datasets)}")
    if facts.pretrained and not rules.pretrained_allowed:
        reasons.append("the search started from pretrained weights, which the rules do not allow")
    disclosures = [f"the search started from {'pretrained' if facts.pretrained else 'random'} weights"]
    if facts.search_accuracy is not None:
        disclosures.append(f"best of all peeks at the validation split: error {1 - facts.search_accuracy:.4f}")
    if facts.interruptions:
        disclosures.append(f"the run was interrupted and resumed {facts.interruptions} times")
    return Judgement(
        rules=rules.name,
        version=rules.version,
        verdict="INVALID" if reasons else "VALID",
        reasons=tuple(reasons),
        disclosures=tuple(disclosures),
    )


def _duration(rules: Rules, facts: Facts) -> list[str]:
    if facts.duration_s >= rules.min_duration_s:
        return []
    return [f"ran for {facts.duration_s:.1f} s; the rules ask for at least {rules.min_duration_s:.0f} s"]


def _precision(rules: Rules, facts: Facts) -> list[str]:
    if not facts.precisions:
        return ["no precision was recorded"]
    return [
        f"computed in {name}; the rules ask for at least {rules.min_precision_bits} bits"
        if name in PRECISION_BITS
        else f"computed in {name!r}, whose bits are not known"
        for name in sorted(facts.precisions)
        if PRECISION_BITS.get(name, 0) < rules.min_precision_bits
    ]


def _accuracy(rules: Rules, facts: Facts) -> list[str]:
    held_out = rules.error_of == "held-out"
    accuracy = facts.held_out_accuracy if held_out else facts.search_accuracy
    where = "held-out" if held_out else "validation"
    if accuracy is None:
        return [f"no {where} accuracy was measured"]
    if accuracy > rules.min_accuracy or rules.min_accuracy == 0:
        return []
    return [f"{where} accuracy {accuracy:.4f}; the rules ask for more than {rules.min_accuracy:.2f}"]
