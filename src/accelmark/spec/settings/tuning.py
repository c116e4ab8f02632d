"""The declaration of a search for the best settings of an inference case, as it is stored in ``plan.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from accelmark.spec.model import FiniteSpec
from accelmark.spec.settings.inference import InferSettings

TrialRole = Literal["as shipped", "trial", "tuned"]
"""The part of a job in a search: rounds with the settings that are shipped, a trial, rounds with the best settings."""

OPTIONS: Final = "engine_options."
TUNING_LAYER: Final = "tuning"
"""Configuration layer of the settings that a search chose."""


class Choice(FiniteSpec):
    """The values of a setting, or of several together, that a search tries."""

    values: tuple[dict[str, Any], ...]
    """Dotted setting -> value; an option of an engine with the value null is left out."""
    ordered: bool = False
    """Whether the values are a scale, along which the search continues in one direction while results improve."""
    once: bool = False
    """Whether it is searched once only, and not again after other settings have changed."""
    engine: str | None = None
    """The engine that the settings belong to; null: any."""


class TuningSpec(FiniteSpec):
    """The settings that a search tries, how long, and the figure that it compares."""

    figure: str
    """Name of the figure that is compared."""
    better: Literal["higher", "lower"]
    budget_s: PositiveFloat | None = None
    """Time in seconds into which all rounds together have to fit for a trial to begin; null: no limit."""
    max_trials: PositiveInt | None = None
    """Number of trials; null: no limit."""
    num_rounds: int = Field(default=3, ge=2)
    """Rounds with the settings as shipped and with the best settings, which are run in turn."""
    choices: tuple[Choice, ...]
    """In the order in which they are searched, again and again until no change of one of them is better."""
    settings_file: Path | None = None
    """File for the best settings."""

    @property
    def num_least_rounds(self) -> int:
        """Number of rounds of a search with one trial: the trial, those as shipped and those tuned."""
        return 1 + 2 * self.num_rounds


def identity(settings: InferSettings) -> str:
    """Return a text that is the same for the same settings."""
    return settings.model_dump_json()


def next_trial(
    shipped: InferSettings, choices: tuple[Choice, ...], scores: Mapping[str, float]
) -> InferSettings | None:
    """Return the settings to try next; None where no change of a single choice is better than the best settings.

    Coordinate descent, repeated from its start with the ``scores`` of earlier trials (:func:`identity` -> score,
    the higher the better), so that an interrupted search goes on.
    """
    best, before = shipped, None
    while best != before:
        before, remaining = best, choices if before is None else [choice for choice in choices if not choice.once]
        for choice in remaining:
            if choice.engine not in (None, best.compiler):
                continue
            start, neighbours = best, [changed(best, values, shipped) for values in choice.values]
            # All values in turn, or of a scale those after the current one, and if none is better those before it.
            at = neighbours.index(best) if choice.ordered and best in neighbours else -1
            for line in (neighbours[at + 1 :], neighbours[:at][::-1] if at > 0 else []):
                for settings in line if best == start else ():
                    if settings is None or settings == best:
                        continue
                    if (score := scores.get(identity(settings))) is None:
                        return settings
                    if score > scores[identity(best)] + math.log(1.01):  # less is noise
                        best = settings
                    elif choice.ordered:
                        break
    return None


def changed(settings: InferSettings, changes: Mapping[str, Any], shipped: InferSettings) -> InferSettings | None:
    """Return settings with ``changes``; None where they are not possible together. Options go with their engine."""
    values = settings.model_dump()
    if "compiler" in changes and changes["compiler"] != settings.compiler:
        own = changes["compiler"] == shipped.compiler
        values["engine_options"] = dict(shipped.engine_options) if own else {}
    for name, value in changes.items():
        if not name.startswith(OPTIONS):
            values[name] = value
        elif value is None:
            values["engine_options"].pop(name.removeprefix(OPTIONS), None)
        else:
            values["engine_options"][name.removeprefix(OPTIONS)] = value
    try:
        return InferSettings.model_validate(values)
    except ValueError:
        return None
