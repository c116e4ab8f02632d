from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from accelmark.infer.measure import REPEAT_CALLS, repeat_check
from accelmark.spec.log.inference import RepeatCheck

pytestmark = pytest.mark.adversary


def _checked(call_ms: Callable[[int], float], number: int = 12) -> RepeatCheck:
    """Check an engine that takes ``call_ms(batch)`` for each call."""
    return repeat_check([[call_ms(batch) for _ in range(REPEAT_CALLS)] for batch in range(number)])


class _Caching:
    """An engine that remembers the batches that it computed ``needed`` times."""

    def __init__(self, needed: int = 1, *, first_call: int = 0, slow_ms: float = 10, fast_ms: float = 0.1) -> None:
        self.seen: Counter[int] = Counter()
        self.needed, self.first_call, self.slow_ms, self.fast_ms = needed, first_call, slow_ms, fast_ms

    def __call__(self, batch: int) -> float:
        cached = self.seen[batch] >= self.needed and self.seen.total() >= self.first_call
        self.seen[batch] += 1
        return self.fast_ms if cached else self.slow_ms


def test_an_honest_engine_passes_whatever_its_items_take() -> None:
    check = _checked(lambda batch: 1 + 10.0 * batch)
    assert not check.suspicious
    assert check.speedup == pytest.approx(1)
    assert check.num_batches == 12


@pytest.mark.parametrize("number", [4, 6, 7, 12, 24])
def test_an_honest_engine_on_a_busy_machine_passes(number: int) -> None:
    suspected = 0
    for seed in range(1000):
        chance = random.Random(seed)

        def call_ms(batch: int, chance: random.Random = chance) -> float:
            return 1 + (chance.random() < 0.4) * chance.random() * 10

        suspected += _checked(call_ms, number).suspicious
    assert suspected <= 2


@pytest.mark.parametrize("number", [4, 12])
@pytest.mark.parametrize("needed", [1, 2])
def test_a_cache_that_keeps_what_came_once_or_twice_is_found(number: int, needed: int) -> None:
    check = _checked(_Caching(needed), number)
    assert check.suspicious
    assert check.speedup == pytest.approx(100)
    assert check.chance is not None
    assert check.chance <= 0.002


@pytest.mark.parametrize(
    ("caching", "number"), [(_Caching(first_call=10), 12), (_Caching(slow_ms=0.1, fast_ms=0.04), 4)]
)
def test_a_cache_that_starts_late_or_answers_within_the_crossing_is_found(caching: _Caching, number: int) -> None:
    assert _checked(caching, number).suspicious


@pytest.mark.parametrize("slow", [2, 10])
def test_a_cache_is_found_on_a_busy_machine(slow: int) -> None:
    found = 0
    for seed in range(200):
        chance, caching = random.Random(seed), _Caching(slow_ms=4)
        found += _checked(
            lambda batch, chance=chance, caching=caching: (  # type: ignore[misc]
                (chance.random() < 0.1) * chance.random() * 4 * slow + caching(batch)
            )
        ).suspicious
    assert found >= 0.99 * 200


def test_a_cache_that_misses_a_few_is_found() -> None:
    caching = _Caching()

    def forgetting(batch: int) -> float:
        if batch % 6 == 0:
            caching.seen.clear()
        return caching(batch)

    assert _checked(forgetting, 24).suspicious


def test_one_disturbed_call_is_not_a_cache_and_hides_none() -> None:
    for call_ms, expected in ((lambda batch: 2.0, False), (_Caching(), True)):
        calls = [0]

        def disturbed(batch: int, call_ms: Callable[[int], float] = call_ms, calls: list[int] = calls) -> float:
            calls[0] += 1
            return call_ms(batch) + (50 if calls[0] in {1, 7, 18} else 0)

        assert _checked(disturbed).suspicious is expected


def test_too_few_batches_give_a_reason_and_no_verdict() -> None:
    check = _checked(_Caching(), 3)
    assert check.speedup is None
    assert not check.suspicious
    assert "at least 4 batches" in str(check.reason)
