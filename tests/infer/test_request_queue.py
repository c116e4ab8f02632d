from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from accelmark.infer.failures import Context, InferenceError
from accelmark.infer.scenarios import RequestQueue
from accelmark.serving.loadgen.mlperf import Query

_CONTEXT = Context("scenario server", "acme", 4, "cpu")


@dataclass(frozen=True)
class _Query:
    id: int
    index: int


def _unseen(indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
    pass


@pytest.mark.parametrize("padded", [True, False])
def test_an_engine_is_warmed_up_in_the_queues_thread(padded: bool) -> None:
    calls: list[tuple[str, int]] = []
    seen: list[list[int]] = []
    completed = threading.Event()

    def compute(indices: Sequence[int]) -> list[Tensor]:
        calls.append((threading.current_thread().name, len(indices)))
        return [torch.tensor(indices)]

    def complete(queries: Sequence[Query]) -> None:
        completed.set()

    queue = RequestQueue(
        compute, lambda indices, outputs: seen.append(list(indices)), batch_size=4, padded=padded, context=_CONTEXT
    )
    queue.complete = complete
    with queue:
        warmed = set(calls)
        queue.issue([_Query(0, 3)])
        assert completed.wait(60)
    assert warmed == {("requests", 4)} | (set() if padded else {("requests", 1)})
    assert set(calls) == warmed
    assert seen == [[3]], "padding is not shown to the check of answers"


def test_an_engine_that_fails_in_the_warm_up_is_named() -> None:
    def compute(indices: Sequence[int]) -> list[Tensor]:
        raise RuntimeError("the device fell off the bus")

    queue = RequestQueue(compute, _unseen, batch_size=4, padded=True, context=_CONTEXT)
    with pytest.raises(InferenceError, match=r"acme on cpu, scenario server.*fell off the bus"), queue:
        pass
