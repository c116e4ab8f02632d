from __future__ import annotations

import time

import torch
from torch import Tensor

from accelmark.infer.case import InferBatch
from accelmark.infer.repeat_check import repeat_check


def _batches(number: int, items: int = 2) -> list[InferBatch]:
    return [InferBatch((torch.full((items, 2), float(index)) + torch.rand(items, 2),), None) for index in range(number)]


def _work(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
    time.sleep(0.002)
    return inputs, 0.0


class _Caching:
    """An engine that remembers what it was asked."""

    def __init__(self) -> None:
        self.known: dict[bytes, list[Tensor]] = {}

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        asked = inputs[0].numpy().tobytes()
        if asked not in self.known:
            self.known[asked], _ = _work(inputs)
        return self.known[asked], 0.0


def test_an_honest_engine_passes() -> None:
    check = repeat_check(_work, _batches(12))
    assert not check.suspicious
    assert check.speedup is not None


def test_an_engine_that_caches_whole_batches_is_found() -> None:
    for items in (1, 2):
        for number in (4, 24):
            check = repeat_check(_Caching(), _batches(number, items))
            assert check.suspicious, (items, number)


def test_an_engine_that_remembers_the_last_batch_only_is_found() -> None:
    last = _Caching()

    def forward(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        if inputs[0].numpy().tobytes() not in last.known:
            last.known.clear()
        return last(inputs)

    assert repeat_check(forward, _batches(24)).suspicious


def test_time_that_is_not_inference_is_left_out() -> None:
    def compiling(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        began = time.perf_counter()
        if inputs[0][0, 0] > 1:  # fresh batches only
            time.sleep(0.004)
        other = time.perf_counter() - began
        return _work(inputs)[0], other

    assert not repeat_check(compiling, _batches(12)).suspicious


def test_too_little_data_gives_a_reason_and_no_verdict() -> None:
    check = repeat_check(_work, _batches(3))
    assert check.speedup is None
    assert not check.suspicious
    assert "at least 4" in str(check.reason)
