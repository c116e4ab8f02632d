from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from accelmark.infer.case import InferBatch
from accelmark.infer.failures import InferenceError
from accelmark.infer.repeat_check import repeat_check

pytestmark = pytest.mark.adversary

Answer = tuple[list[Tensor], float]


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass that only the check sees, so that a busy machine changes nothing here."""
    now = [0.0]
    monkeypatch.setattr("accelmark.infer.repeat_check.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passing(seconds: float) -> None:
        now[0] += seconds

    return passing


def _batches(number: int, items: int = 2) -> tuple[InferBatch, list[InferBatch]]:
    warmed, *fresh = (InferBatch((torch.full((items, 2), float(index)),), None) for index in range(number + 1))
    return warmed, fresh


class _Caching:
    """An engine that remembers what it was asked, item by item."""

    def __init__(self, takes: Callable[[float], None], *, only_last: bool = False) -> None:
        self.takes = takes
        self.only_last = only_last
        self.known: set[tuple[float, ...]] = set()

    def __call__(self, inputs: list[Tensor]) -> Answer:
        asked = {tuple(item) for item in inputs[0].tolist()}
        self.takes(0.002 * len(asked - self.known) + 0.0001)
        self.known = asked if self.only_last else self.known | asked
        return inputs, 0.0


def test_an_honest_engine_passes_whatever_its_items_take(takes: Callable[[float], None]) -> None:
    def forward(inputs: list[Tensor]) -> Answer:
        takes(0.001 + 0.01 * float(inputs[0][0, 0]))
        return inputs, 0.0

    check = repeat_check(forward, *_batches(12))
    assert not check.suspicious
    assert check.speedup == pytest.approx(1)
    assert check.num_batches == 12


@pytest.mark.parametrize("number", [4, 6, 7, 12, 24])
def test_an_honest_engine_on_a_busy_machine_passes(takes: Callable[[float], None], number: int) -> None:
    suspected = 0
    for seed in range(1000):
        disturbance = random.Random(seed)

        def forward(inputs: list[Tensor], chance: random.Random = disturbance) -> Answer:
            takes(0.001 * (1 + (chance.random() < 0.4) * chance.random() * 10))
            return inputs, 0.0

        suspected += repeat_check(forward, *_batches(number)).suspicious
    assert suspected <= 2


@pytest.mark.parametrize("number", [4, 12])
@pytest.mark.parametrize("needed", [1, 2])
def test_a_cache_that_keeps_what_came_once_or_twice_is_found(
    takes: Callable[[float], None], number: int, needed: int
) -> None:
    seen: Counter[float] = Counter()

    def forward(inputs: list[Tensor]) -> Answer:
        item = float(inputs[0][0, 0])
        takes(0.0001 if seen[item] >= needed else 0.01)
        seen[item] += 1
        return inputs, 0.0

    check = repeat_check(forward, *_batches(number))
    assert check.suspicious
    assert check.speedup == pytest.approx(100)
    assert check.chance is not None
    assert check.chance <= 0.002


@pytest.mark.parametrize("slow", [2, 10])
def test_a_result_cache_is_found_on_a_busy_machine(takes: Callable[[float], None], slow: int) -> None:
    found = 0
    for seed in range(200):
        disturbance = random.Random(seed)
        caching = _Caching(takes)

        def forward(inputs: list[Tensor], chance: random.Random = disturbance, caching: _Caching = caching) -> Answer:
            takes((chance.random() < 0.1) * chance.random() * 0.004 * slow)
            return caching(inputs)

        found += repeat_check(forward, *_batches(12)).suspicious
    assert found >= 0.99 * 200


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize(("number", "items"), [(4, 1), (4, 2), (24, 1), (24, 8)])
def test_an_engine_that_caches_is_found(
    takes: Callable[[float], None], number: int, items: int, only_last: bool
) -> None:
    check = repeat_check(_Caching(takes, only_last=only_last), *_batches(number, items))
    assert check.suspicious
    assert check.speedup is not None
    assert check.speedup > 10


def test_a_cache_that_misses_a_few_is_found(takes: Callable[[float], None]) -> None:
    caching = _Caching(takes)

    def forward(inputs: list[Tensor]) -> Answer:
        if int(inputs[0][0, 0]) % 6 == 0:
            caching.known.clear()
        return caching(inputs)

    assert repeat_check(forward, *_batches(24)).suspicious


def test_a_cache_that_answers_at_once_is_found(takes: Callable[[float], None]) -> None:
    known: set[float] = set()

    def forward(inputs: list[Tensor]) -> Answer:
        takes(0.0 if float(inputs[0][0, 0]) in known else 0.001)
        known.add(float(inputs[0][0, 0]))
        return inputs, 0.0

    assert repeat_check(forward, *_batches(4)).suspicious


def test_one_disturbed_call_is_not_a_cache_and_hides_none(takes: Callable[[float], None]) -> None:
    calls = [0]

    def disturbed(engine: Callable[[list[Tensor]], Answer]) -> Callable[[list[Tensor]], Answer]:
        def forward(inputs: list[Tensor]) -> Answer:
            calls[0] += 1
            takes(0.05 if calls[0] in {1, 7, 18} else 0)
            return engine(inputs)

        return forward

    def honest(inputs: list[Tensor]) -> Answer:
        takes(0.002)
        return inputs, 0.0

    assert not repeat_check(disturbed(honest), *_batches(12)).suspicious
    calls[0] = 0
    assert repeat_check(disturbed(_Caching(takes)), *_batches(12)).suspicious


def test_time_that_is_not_inference_is_left_out(takes: Callable[[float], None]) -> None:
    def converting(inputs: list[Tensor]) -> Answer:
        takes(0.006)
        return inputs, 0.004

    check = repeat_check(converting, *_batches(12))
    assert not check.suspicious
    assert check.fresh_ms == pytest.approx(2)


def test_time_that_only_the_first_call_declares_hides_no_cache(takes: Callable[[float], None]) -> None:
    met: set[float] = set()

    def declaring(inputs: list[Tensor]) -> Answer:
        known = float(inputs[0][0, 0]) in met
        met.add(float(inputs[0][0, 0]))
        takes(0.0001 if known else 0.01)
        return inputs, 0.0 if known else 0.0099

    assert repeat_check(declaring, *_batches(12)).suspicious


@pytest.mark.parametrize("declared", [math.nan, math.inf, -0.001, 5.0])
def test_an_impossible_time_is_refused(takes: Callable[[float], None], declared: float) -> None:
    def forward(inputs: list[Tensor]) -> Answer:
        takes(0.001)
        return inputs, declared

    with pytest.raises(InferenceError, match="engine acme: reports"):
        repeat_check(forward, *_batches(12), "acme")


def test_preparation_for_a_new_shape_is_not_a_cache(takes: Callable[[float], None]) -> None:
    met: set[torch.Size] = set()

    def forward(inputs: list[Tensor]) -> Answer:
        takes(0.002 if inputs[0].shape in met else 0.02)
        met.add(inputs[0].shape)
        return inputs, 0.0

    warmed, *fresh = (InferBatch((torch.rand(2, 2 + index // 4),), None) for index in range(24))
    check = repeat_check(forward, warmed, fresh)
    assert (check.suspicious, check.num_batches) == (False, 18)
    different = [InferBatch((torch.rand(2, 3 + index),), None) for index in range(12)]
    assert "shapes that occurred before; the data has 0" in str(repeat_check(forward, warmed, different).reason)


def test_too_little_data_gives_a_reason_and_no_verdict(takes: Callable[[float], None]) -> None:
    check = repeat_check(_Caching(takes), *_batches(3))
    assert check.speedup is None
    assert not check.suspicious
    assert "at least 4 full batches" in str(check.reason)
