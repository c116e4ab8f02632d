"""PyTorch's eager mode: the baseline engine, also used for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from accelmark.infer.engine import EngineRequest, as_list
from accelmark.infer.torch_engine import TorchEngine

Forward = Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]


class Engine(TorchEngine):
    """The uncompiled model; ``forward`` replaces the call of the model."""

    def __init__(self, request: EngineRequest, forward: Forward | None = None) -> None:
        super().__init__(request)
        self.forward = forward
        self.model = self.model_on_device()

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Call the model."""
        return as_list(self.model(*inputs)) if self.forward is None else self.forward(self.model, inputs)

    def close(self) -> None:
        """Release the model."""
        del self.model
