from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from accelmark.infer.batches import TensorBatches
from accelmark.infer.failures import InferenceError, Situation
from accelmark.infer.served import Items, Query, Served

_SITUATION = Situation("scenario server", "acme", 4, "cpu")


@dataclass(frozen=True)
class _Asked:
    id: int
    index: int


def _items() -> Items:
    return Items(TensorBatches([torch.randn(20, 3)], torch.zeros(20), 10))


@pytest.mark.parametrize("padded", [True, False])
def test_an_engine_is_warmed_up_where_and_how_it_serves(padded: bool) -> None:
    calls: list[tuple[str, int, bool]] = []
    answered = threading.Event()

    def forward(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        calls.append((threading.current_thread().name, len(inputs[0]), inputs[0].is_inference()))
        return inputs, 0.0

    def answer(queries: Sequence[Query]) -> None:
        answered.set()

    with Served(forward, _items(), batch_size=4, padded=padded, answer=answer, situation=_SITUATION) as served:
        warmed = set(calls)
        served.issue([_Asked(0, 3)])
        assert answered.wait(60)
    assert warmed == {("served", 4, True)} | (set() if padded else {("served", 1, True)})
    assert set(calls) == warmed


def test_an_engine_that_fails_while_warming_up_is_named() -> None:
    def forward(inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        raise RuntimeError("the device fell off the bus")

    served = Served(forward, _items(), batch_size=4, padded=True, answer=lambda _: None, situation=_SITUATION)
    with pytest.raises(InferenceError, match=r"acme on cpu, scenario server.*fell off the bus"), served:
        pass
