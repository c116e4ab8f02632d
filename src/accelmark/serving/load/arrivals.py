"""Times at which the requests of an open load are due."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from accelmark.spec.errors import DataError, raising
from accelmark.spec.model import Spec
from accelmark.spec.settings.serving import Arrival

_DRAWN_AT_ONCE: Final = 1024


class _TraceLine(Spec):
    timestamp: NonNegativeFloat
    input_tokens: PositiveInt | None = None
    output_tokens: PositiveInt | None = None


@final
@dataclass(frozen=True)
class Due:
    """When a request is due, and its entry in a trace."""

    due_s: float
    """Seconds from the beginning of the stage."""
    input_tokens: int | None = None
    output_tokens: int | None = None


def due_times(
    arrival: Arrival, rate: float, duration_s: float, burstiness: float, rng: np.random.Generator
) -> list[Due]:
    """Return the times in ``duration_s`` at ``rate`` requests per second.

    ``constant``: one every 1/rate from 0 on. ``poisson``: gaps are exponential. ``gamma``: gaps have a gamma
    distribution with shape ``burstiness`` and mean 1/rate, so that their coefficient of variation is
    1/sqrt(burstiness); shape 1 is Poisson.
    """
    if arrival == "constant":
        return [Due(number / rate) for number in range(int(np.ceil(duration_s * rate)))]
    shape = burstiness if arrival == "gamma" else 1.0
    times: list[float] = []
    last_s = 0.0
    while last_s < duration_s:
        drawn = last_s + np.cumsum(rng.gamma(shape, 1 / (rate * shape), _DRAWN_AT_ONCE))
        times.extend(drawn.tolist())
        last_s = times[-1]
    return [Due(at_s) for at_s in times if at_s < duration_s]


def read_trace(file: Path, duration_s: float) -> list[Due]:
    """Return the requests of a trace that are due within ``duration_s`` of its first.

    A line is a JSON object with ``timestamp`` (s), in ascending order, and optionally ``input_tokens`` and
    ``output_tokens``.

    Raises DataError: the file cannot be read, a line is not such an object (the message has its number), or all
    requests but the first are due later.
    """
    lines: list[_TraceLine] = []
    for number, text in numbered_lines(file):
        with raising(DataError, f"{file}:{number}", ValueError):
            lines.append(_TraceLine.model_validate(json.loads(text)))
        if len(lines) > 1 and lines[-1].timestamp < lines[-2].timestamp:
            raise DataError(
                f"{file}:{number}: timestamp {lines[-1].timestamp:g} is before the timestamp of the line before"
            )
    if not lines:
        raise DataError(f"{file}: has no requests")
    begin_s = lines[0].timestamp
    due = (Due(line.timestamp - begin_s, line.input_tokens, line.output_tokens) for line in lines)
    in_stage = [arrival for arrival in due if arrival.due_s < duration_s]
    if len(in_stage) == 1 < len(lines):
        problem = f"only the first of {len(lines)} requests is due within {duration_s:g} s (load.duration_s)"
        raise DataError(f"{file}: {problem}; timestamp is in seconds")
    return in_stage


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers from 1.

    Raises DataError: the file cannot be read as UTF-8.
    """
    return [(number, text) for number, text in enumerate(read_text(file).splitlines(), 1) if text.strip()]


def read_text(file: Path) -> str:
    """Return the content of a file. Raises DataError: it cannot be read as UTF-8."""
    with raising(DataError, f"{file}: cannot be read", OSError, UnicodeDecodeError):
        return file.expanduser().read_text(encoding="utf-8")
