"""All stages of a run with the times at which requests are due: warm-up, the settings' stages, the search of rates."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional, final

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from accelmark.results.rounds.load import Requests, measured_stage
from accelmark.serving.load.prompts import numbered_lines, open_prompts
from accelmark.serving.model import ServedModel
from accelmark.serving.request import Load, PlannedRequest
from accelmark.spec.errors import DataError, raising
from accelmark.spec.log.inference import LoadStage
from accelmark.spec.model import Spec
from accelmark.spec.settings.serving import Arrival, ServeSettings


class _TraceLine(Spec):
    timestamp: NonNegativeFloat
    input_tokens: PositiveInt | None = None
    output_tokens: PositiveInt | None = None


class Due(NamedTuple):
    """When a request is due, and its entry in a trace; a tuple, since a stage may have millions."""

    timestamp: float
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
        return [Due(timestamp=number / rate) for number in range(int(np.ceil(duration_s * rate)))]
    shape = burstiness if arrival == "gamma" else 1.0
    times: list[float] = []
    last_s = 0.0
    while last_s < duration_s:
        drawn = last_s + np.cumsum(rng.gamma(shape, 1 / (rate * shape), 1024))
        times.extend(drawn.tolist())
        last_s = times[-1]
    return [Due(timestamp=at_s) for at_s in times if at_s < duration_s]


def read_trace(file: Path, duration_s: float) -> list[Due]:
    """Return the requests of a trace that are due within ``duration_s`` of its first.

    A line is a JSON object with ``timestamp`` (s), in ascending order, and optionally ``input_tokens`` and
    ``output_tokens``. Raises DataError: a line is not, or all requests but the first are due later.
    """
    lines: list[_TraceLine] = []
    for number, text in numbered_lines(file):
        with raising(DataError, f"{file}:{number}", ValueError):
            lines.append(_TraceLine.model_validate(json.loads(text)))
        if len(lines) > 1 and lines[-1].timestamp < lines[-2].timestamp:
            raise DataError(f"{file}:{number}: timestamp {lines[-1].timestamp:g} is before that of the line before")
    if not lines:
        raise DataError(f"{file}: has no requests")
    begin_s = lines[0].timestamp
    due = (Due(line.timestamp - begin_s, line.input_tokens, line.output_tokens) for line in lines)
    in_stage = [arrival for arrival in due if arrival.timestamp < duration_s]
    if len(in_stage) == 1 < len(lines):
        problem = f"only the first of {len(lines)} requests is due within {duration_s:g} s (load.duration_s)"
        raise DataError(f"{file}: {problem}; timestamp is in seconds")
    return in_stage


MAX_STEPS: Final = 14
EXPECTED_STEPS: Final = 6
"""Steps of a search whose first rate holds and second rate does not, or the other way round."""
PRECISION: Final = 0.05
"""Relative distance of the highest rate that holds from the lowest that does not, at which the search ends."""

FIRST_SHARE: Final = 0.5
"""First rate of a search as a share of the highest rate of answers in the stages before."""


def search_rate(
    holds: Callable[[float, int], bool],
    first: float,
    least: float = 0.0,
    max_steps: int = MAX_STEPS,
    held: float | None = None,
) -> float | None:
    """Search from ``first``: double (or halve) until the answer changes, then bisect in the logarithm.

    ``holds`` gets a rate, and how many further steps are likely. No rate is tried below ``least``. ``held`` is a rate
    that is known to hold: the search begins at twice it. Returns the highest rate that holds, None if none does.
    """
    rate = held
    failed: float | None = None
    tried = first if held is None else 2 * held
    for step in range(1, max_steps + 1):
        if holds(tried, max(min(EXPECTED_STEPS, max_steps) - step, 0)):
            rate = tried
        else:
            failed = tried
        if failed is None:
            tried = 2 * tried
        elif rate is None:
            tried = tried / 2
            if tried < least:
                break
        elif failed <= rate * (1 + PRECISION):
            break
        else:
            tried = math.sqrt(rate * failed)
    return rate


RunStage = Callable[[Load, Iterable[PlannedRequest]], tuple[LoadStage, Requests]]
"""Runs one stage; returns it with its requests."""

Pair = Optional[tuple[int, int]]
"""Lengths of the prompts and answers of a stage; None: as the settings of prompts state them."""

_WARMUP_CONCURRENCY: Final = 4
_MIN_REQUESTS: Final = 10
"""Requests that a step of the search has on average at least; fewer do not show whether an objective is met."""


@final
class LoadPlan:
    """The load of a run, drawn from a seed that the server or engine, in another process, does not know."""

    def __init__(self, settings: ServeSettings, model: ServedModel) -> None:
        """Read the files that the settings name. Raises DataError: one cannot be used, or has too few prompts."""
        self._settings = settings
        self.seed = secrets.randbits(63) if settings.seed is None else settings.seed
        self._prompts = open_prompts(settings.prompts, model, settings.api, self.seed)
        self._lengths: Sequence[Pair] = settings.load.lengths or (None,)
        load = settings.load
        self._open: list[tuple[float | None, list[Due]]] = []
        if load.arrival == "trace":
            self._open = [(None, read_trace(Path(str(load.trace)), load.duration_s)[: load.max_requests])]
        elif load.arrival != "closed":
            self._open = [(rate, self._drawn(load.arrival, rate)) for rate in load.rates]
        self._num_stages = 0
        self.answered_rate = 0.0
        """Highest rate of answers in the stages so far, in requests per second."""
        self._held: float | None = None
        """Highest rate of the stages so far that held the objective, with the lengths of the search."""
        is_closed, num_lengths = load.arrival == "closed", len(self._lengths)
        num_stages = num_lengths * (len(load.concurrency) if is_closed else len(self._open))
        num_stages += EXPECTED_STEPS if load.search else 0
        num_scenarios = sum(EXPECTED_STEPS if name == "server" else 1 for name in settings.scenarios)
        self.left_s = load.duration_s * num_stages + settings.scenario_duration_s * num_scenarios
        """Planned duration of the stages and scenarios that have not begun, without warm-up."""
        needed = load.warmup_requests + num_lengths * sum(len(due) for _, due in self._open)
        if is_closed:
            needed += num_lengths * sum(min(slots, load.max_requests or slots) for slots in load.concurrency)
        if (left := self._prompts.num_left) is not None and left < needed:
            remedy = "give more, shorten the load (max_requests, duration_s), or set prompts.repeat: true"
            raise DataError(f"{settings.prompts.file}: has {left} prompts, the load needs {needed}; {remedy}")

    def run(self, run_stage: RunStage) -> None:
        """Run all stages."""
        load, timeout_s = self._settings.load, self._settings.request_timeout_s
        if load.warmup_requests:
            concurrency = min(_WARMUP_CONCURRENCY, load.warmup_requests)
            warmup = Load(stage=-1, until_s=timeout_s, timeout_s=timeout_s, concurrency=concurrency)
            run_stage(warmup, islice(self._requests(None, self._lengths[0]), load.warmup_requests))
        for pair in self._lengths:
            for concurrency in load.concurrency if load.arrival == "closed" else ():
                later_s = self.begin(load.duration_s)
                self._run(run_stage, None, pair, concurrency=concurrency, later_s=later_s)
            for rate, due in self._open:
                later_s = self.begin(load.duration_s)
                done = self._run(run_stage, due, pair, arrival=load.arrival, rate=rate, later_s=later_s)
                if load.search and rate is not None and pair == self._lengths[0] and self._holds(*done):
                    self._held = max(rate, self._held or 0.0)
        if load.search:
            self._search(run_stage)

    def _search(self, run_stage: RunStage) -> None:
        load = self._settings.load
        arrival: Arrival = load.arrival if load.arrival in ("constant", "gamma") else "poisson"
        later_s = self.begin(EXPECTED_STEPS * load.duration_s)

        def holds(rate: float, steps_left: int) -> bool:
            due = self._drawn(arrival, rate)
            left_s = later_s + steps_left * load.duration_s
            named = {"arrival": arrival, "rate": rate, "later_s": left_s, "is_search": True}
            return self._holds(*self._run(run_stage, due, self._lengths[0], **named))

        least = _MIN_REQUESTS / load.duration_s
        search_rate(holds, max(FIRST_SHARE * self.answered_rate, least), least, held=self._held)

    def _holds(self, stage: LoadStage, requests: Requests) -> bool:
        return measured_stage(requests, stage, self._settings, 1, None).holds_slo is True

    def _run(
        self, run_stage: RunStage, due: Sequence[Due] | None, pair: Pair, **kind: Any
    ) -> tuple[LoadStage, Requests]:
        load = self._settings.load
        input_tokens, output_tokens = pair or (None, None)
        stage = Load(
            stage=self.next_stage(),
            until_s=load.duration_s,
            timeout_s=self._settings.request_timeout_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            **kind,
        )
        done, requests = run_stage(stage, islice(self._requests(due, pair), load.max_requests))
        if not stage.is_search and done.duration_s > 0 and math.isfinite(done.duration_s):
            self.answered_rate = max(self.answered_rate, int(requests.is_ok.sum()) / done.duration_s)
        return done, requests

    def fresh_requests(self) -> Iterator[PlannedRequest]:
        """Yield requests without an end, with prompts that no other request has."""
        return self._requests(None, self._lengths[0])

    def begin(self, duration_s: float) -> float:
        """Take stages of this duration from those that have not begun; return the duration of the others."""
        self.left_s = max(0.0, self.left_s - duration_s)
        return self.left_s

    def next_stage(self) -> int:
        """Return the number of the next stage."""
        self._num_stages += 1
        return self._num_stages - 1

    def _requests(self, due: Sequence[Due] | None, pair: Pair) -> Iterator[PlannedRequest]:
        """Yield the requests at the given times, or requests of a closed loop without end."""
        input_tokens, output_tokens = pair or (None, None)
        for number in count() if due is None else range(len(due)):
            at = Due(timestamp=0.0) if due is None else due[number]
            prompt = self._prompts.draw(at.input_tokens or input_tokens, at.output_tokens or output_tokens)
            yield PlannedRequest(number, due_s=None if due is None else at.timestamp, **prompt._asdict())

    def _drawn(self, arrival: Arrival, rate: float) -> list[Due]:
        """Return the times of a stage; the same rate has the same times, so that stages can be compared."""
        load = self._settings.load
        rng = np.random.default_rng((self.seed, 2, round(rate * 1e6)))
        return due_times(arrival, rate, load.duration_s, load.burstiness, rng)[: load.max_requests]
