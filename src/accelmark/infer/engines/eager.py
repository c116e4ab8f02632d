"""PyTorch's eager mode: the baseline engine, also used for validation; splits language models over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from accelmark.frameworks.pytorch.training.platform import release_memory
from accelmark.infer.engine import EngineRequest, TorchEngine, as_list
from accelmark.infer.language_model import load_model
from accelmark.spec.errors import RequestError

Forward = Callable[[nn.Module, Sequence[Tensor]], list[Tensor]]


class Engine(TorchEngine):
    """The uncompiled model; ``forward`` replaces the call of the model."""

    known_options = frozenset({"channels_last", "cuda_graphs"})
    generates = True
    iterates = True
    max_devices = None

    def __init__(self, request: EngineRequest, forward: Forward | None = None) -> None:
        super().__init__(request)
        self.forward = forward
        self.model: Any = self.model_on_device()

    def placed_model(self) -> nn.Module:
        """Return the model; with several devices, this device's part of a language model."""
        directory, num_devices = self.request.model_dir, self.request.num_devices
        if num_devices == 1:
            return super().placed_model()
        if directory is None:
            raise RequestError("only language models are split over several devices; request one device")
        return load_model(directory, self.dtype, num_devices)

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        return as_list(self.model(*inputs)) if self.forward is None else self.forward(self.model, inputs)

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[Tensor]:
        """Let the model generate with its KV cache; a token is yielded when it is on the CPU."""
        yield from (each.cpu() for each in self.model.generate(tokens.to(self.device), num_tokens))

    def logits(self, tokens: Tensor, num_last: int) -> Tensor:
        """Let the model compute the prompts without a KV cache."""
        logits: Tensor = self.model.logits(tokens.to(self.device), num_last).cpu()
        return logits

    def close(self) -> None:
        del self.model
        release_memory(self.device)
