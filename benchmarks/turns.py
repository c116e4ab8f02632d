"""Run training loops alternately in one process, a few steps each, so that other load affects all of them.

A loop is any function that trains from an iterator of batches. Each runs in a greenlet, which switches back when the
loop requests a batch. The measured time is thus everything that a loop does between two batches, and all loops can
share one model, optimizer and batch at the same addresses.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, final

import greenlet

RESAMPLES: Final = 4000
TRIMMED: Final = 0.25
"""Share of the differences that is trimmed at either end, to exclude disturbed turns."""
SELDOM: Final = 4
"""Loops beyond the first two run in every fourth round only: their cost is large and needs fewer turns."""

Train = Callable[[Iterator[Any]], object]
"""Trains until the iterator ends."""


@final
@dataclass(slots=True)
class Steps:
    """Time per step of one loop in microseconds, by round."""

    cpu_us: dict[int, float] = field(default_factory=dict)
    """CPU time of this process."""
    wall_us: dict[int, float] = field(default_factory=dict)


class Turns:
    """Runs loops alternately.

    Args:
        loops: by name; the first is the baseline.
        batch: the batch of every step of every loop.
        synchronize: waits for the steps that were started, at the end of every turn.
    """

    def __init__(
        self, loops: dict[str, Train], batch: object, synchronize: Callable[[], object] = lambda: None
    ) -> None:
        self._batch, self._synchronize = batch, synchronize
        self._hub = greenlet.getcurrent()
        self._loops = {name: greenlet.greenlet(self._runner(train)) for name, train in loops.items()}
        for loop in self._loops.values():
            loop.switch()

    def _runner(self, train: Train) -> Callable[[], None]:
        def run() -> None:
            train(self._batches())

        return run

    def _batches(self) -> Iterator[Any]:
        switch, batch = self._hub.switch, self._batch
        while True:
            switch()
            yield batch

    def run(self, name: str, num_steps: int) -> None:
        """Run ``num_steps`` steps of one loop.

        Raises:
            RuntimeError: the loop ended by itself.
        """
        switch = self._loops[name].switch
        for _ in range(num_steps):
            switch()
        self._synchronize()
        if self._loops[name].dead:
            raise RuntimeError(f"the loop {name!r} ended although there were batches left")

    def measure(self, seconds: float, num_steps: int, num_settling: int) -> dict[str, Steps]:
        """Run ``num_steps`` steps of each loop in turn, in a random order each round.

        Before each turn, ``num_settling`` steps are not measured, since caches hold data of the loop before.
        """
        found = {name: Steps() for name in self._loops}
        shuffle = random.Random(1).shuffle
        end = time.monotonic() + seconds
        for number in count():
            if time.monotonic() >= end:
                break
            order = list(self._loops)[: None if number % SELDOM == 0 else 2]
            shuffle(order)
            for name in order:
                self.run(name, num_settling)
                cpu, wall = time.process_time_ns(), time.perf_counter_ns()
                self.run(name, num_steps)
                found[name].wall_us[number] = (time.perf_counter_ns() - wall) / num_steps / 1e3
                found[name].cpu_us[number] = (time.process_time_ns() - cpu) / num_steps / 1e3
        return found

    def close(self) -> None:
        """End all loops."""
        for loop in self._loops.values():
            loop.throw()


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Additional time of a loop per step over the baseline, with bootstrap intervals of 95 %."""

    step_us: float
    """Median."""
    extra_us: float
    """Trimmed mean of the differences between turns of the same round."""
    extra_us_interval: tuple[float, float]
    relative: float
    relative_interval: tuple[float, float]

    @classmethod
    def of(cls, bare_us: Mapping[int, float], loop_us: Mapping[int, float]) -> Cost:
        """Compare the turns of each round."""
        differences = [other - bare_us[number] for number, other in loop_us.items()]
        draw = random.Random(1)
        means = sorted(trimmed_mean(draw.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
        low, middle, high = means[RESAMPLES // 40], trimmed_mean(differences), means[-RESAMPLES // 40]
        bare = statistics.median(bare_us.values())
        return cls(
            step_us=round(statistics.median(loop_us.values()), 2),
            extra_us=round(middle, 2),
            extra_us_interval=(round(low, 2), round(high, 2)),
            relative=round(middle / bare, 6),
            relative_interval=(round(low / bare, 6), round(high / bare, 6)),
        )


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    cut = int(len(values) * TRIMMED)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
