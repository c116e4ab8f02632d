from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from accelmark.infer.batches import TensorBatches
from accelmark.infer.failures import Context, InferenceError
from accelmark.infer.scenarios.request_queue import Query, RequestQueue, SampleLibrary

_CONTEXT = Context("scenario server", "acme", 4, "cpu")


@dataclass(frozen=True)
class _Query:
    id: int
    index: int


def _samples() -> SampleLibrary:
    return SampleLibrary(TensorBatches([torch.randn(20, 3)], torch.zeros(20), 10))


@pytest.mark.parametrize("padded", [True, False])
def test_an_engine_is_warmed_up_in_the_queues_thread_and_mode(padded: bool) -> None:
    calls: list[tuple[str, int, bool]] = []
    completed = threading.Event()

    def forward(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        calls.append((threading.current_thread().name, len(inputs[0]), inputs[0].is_inference()))
        return inputs, 0.0

    def complete(queries: Sequence[Query]) -> None:
        completed.set()

    queue = RequestQueue(forward, _samples(), batch_size=4, padded=padded, context=_CONTEXT)
    queue.complete = complete
    with queue:
        warmed = set(calls)
        queue.issue([_Query(0, 3)])
        assert completed.wait(60)
    assert warmed == {("requests", 4, True)} | (set() if padded else {("requests", 1, True)})
    assert set(calls) == warmed


def test_an_engine_that_fails_in_the_warm_up_is_named() -> None:
    def forward(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        raise RuntimeError("the device fell off the bus")

    queue = RequestQueue(forward, _samples(), batch_size=4, padded=True, context=_CONTEXT)
    with pytest.raises(InferenceError, match=r"acme on cpu, scenario server.*fell off the bus"), queue:
        pass
