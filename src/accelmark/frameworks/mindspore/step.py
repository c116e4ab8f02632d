"""The compiled parts of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import mindspore as ms
from mindspore import Tensor, nn, ops

from accelmark.spec.backports import zip_strict
from accelmark.train.case import ArrayCase, Batch

Gradients = tuple[Tensor, ...]


@final
class Step:
    """Compiled functions of a case's model."""

    def __init__(self, case: ArrayCase, model: nn.Cell, parameters: Any) -> None:
        """``parameters`` are those that gradients are computed for, in this order."""
        self._case, self._model, self._parameters = case, model, parameters
        self._graphs: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._evaluations: dict[tuple[str, ...], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """Captured, and as it is written."""

    def gradients(self, batches: list[Batch], scale: Tensor, draw: Callable[[int], None]) -> tuple[Tensor, Gradients]:
        """Return the sums of the losses and gradients of some batches, each multiplied by ``scale``.

        ``draw`` is called with a batch's number before it is computed.
        """
        sums: tuple[Tensor, ...] = ()
        for number, batch in enumerate(batches):
            draw(number)
            loss, gradients = self._graph(tuple(batch))(scale, *batch.values())
            new = (loss, *gradients)
            sums = tuple(map(ops.add, sums, new)) if sums else new
        return sums[0], sums[1:]

    def sums(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the case's sums over a batch of evaluation data."""
        names = tuple(batch)
        if names not in self._evaluations:
            case, model = self._case, self._model

            def sums_of(*tensors: Tensor) -> Mapping[str, Tensor]:
                return case.eval_sums(model, dict(zip_strict(names, tensors)))

            self._evaluations[names] = compiled(sums_of), sums_of
        captured, plain = self._evaluations[names]
        try:
            sums: Mapping[str, Tensor] = captured(*batch.values())
        except SystemError:  # now and then MindSpore 2.10 generates bytecode that does not run
            self._evaluations[names] = plain, plain
            sums = plain(*batch.values())
        return sums

    def _graph(self, names: tuple[str, ...]) -> Callable[..., Any]:
        """Return the function that computes loss and gradients of a batch with tensors of these names."""
        if names not in self._graphs:
            case, model = self._case, self._model

            def loss(scale: Tensor, *tensors: Tensor) -> Tensor:
                return case.loss(model, dict(zip_strict(names, tensors))) * scale

            # Captured with has_aux, MindSpore 2.10 returns gradients of zero.
            graph = ms.value_and_grad(loss, None, self._parameters)
            self._graphs[names] = compiled(lambda *inputs: graph(*inputs))
        return self._graphs[names]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose operations are captured from Python's bytecode, compiled and run as one graph.

    MindSpore 2.10 captures no function that indexes or slices a tensor with ``[]``: it runs operation by operation.
    ``capture_mode="trace"`` of MindSpore 2.10 reads parameters only once, and training with it diverges.
    """
    jit: Callable[..., Any] = ms.jit(function, capture_mode="bytecode")
    return jit
