"""Base class of engines that compute with PyTorch modules."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.model.cuda_graphs import GraphCalls
from accelmark.frameworks.pytorch.training.platform import forget_peak_memory, peak_memory_mib
from accelmark.infer.engine import DTYPES, Engine, EngineRequest, Source
from accelmark.spec.settings.inference import InferPrecision, switch_option


class TorchEngine(Engine):
    """An engine whose inputs and outputs are tensors on PyTorch's device; a subclass implements ``compute``.

    ``engine_options.channels_last`` sets the memory format of images; by default it is used on accelerators by models
    with two-dimensional convolutions. With ``engine_options.cuda_graphs``, where a subclass declares it, calls are
    recorded at the first call of their shapes and replayed.
    """

    reads: ClassVar[Source] = "model"
    precisions: ClassVar[tuple[InferPrecision, ...]] = ("fp32", "tf32", "bf16", "fp16")
    known_options: ClassVar[frozenset[str] | None] = frozenset({"channels_last"})

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.device = request.device
        self.dtype = DTYPES[request.precision]
        self.matrix_types: dict[str, int] | None = None
        """Null for an engine that was loaded."""
        # Disable tf32 in matrix products and convolutions unless it was requested.
        tf32 = request.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        self.channels_last = False
        if self.device.type != "cpu":
            # Shapes repeat, so cuDNN selects the fastest convolution algorithms once, during the warm-up.
            torch.backends.cudnn.benchmark = True
            # exclude the peak of the validation's engine
            forget_peak_memory(self.device)
        self.run_on_device = self.compute
        if "cuda_graphs" in (self.known_options or ()) and switch_option(request.options, "cuda_graphs"):
            self.run_on_device = GraphCalls(self.compute, self.device, self.name)

    @abstractmethod
    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Compute one batch that is on the device and in the precision; outputs stay there."""

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch."""
        return self.call(inputs), 0.0

    def call(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, compute it in inference mode, and copy its outputs back."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.call(inputs)
        return [output.cpu() for output in self.run_on_device(self.to_device(inputs))]

    def to_device(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copy a batch to the device, and convert floating tensors there to the precision and memory format.

        It converts after the copy, since the CPU converts a batch several times more slowly than it is copied.
        """
        return [self._converted(tensor.to(self.device, non_blocking=True)) for tensor in inputs]

    def _converted(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        is_image = self.channels_last and tensor.ndim == 4
        return tensor.to(self.dtype, memory_format=torch.channels_last if is_image else torch.preserve_format)

    def graph_types(self) -> dict[str, int] | None:
        """Return the types of the model's matrices, in which their products are computed."""
        return self.matrix_types

    def placed_model(self) -> nn.Module:
        """Return the model on the device and in the precision; it shares the weights that are there already."""
        model = self.torch_model()
        placed: dict[int, object] = {id(each): nn.Parameter(self._placed(each), False) for each in model.parameters()}
        placed |= {id(buffer): self._placed(buffer) for buffer in model.buffers()}
        copied: nn.Module = copy.deepcopy(model, placed)  # of the modules: their tensors are in ``placed``
        return copied

    def _placed(self, tensor: Tensor) -> Tensor:
        on_device = tensor.detach().to(self.device)
        return on_device.to(self.dtype) if tensor.is_floating_point() else on_device

    def model_on_device(self) -> nn.Module:
        """Return the placed model in eval mode.

        On accelerators, models with two-dimensional convolutions use the channels-last format, which is faster, unless
        ``engine_options.channels_last`` is false; on the CPU they do if it is true.
        """
        model = self.placed_model().eval()
        matrices = (parameter for parameter in model.parameters() if parameter.ndim > 1)
        self.matrix_types = dict(Counter(str(matrix.dtype).removeprefix("torch.") for matrix in matrices))
        has_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        default = self.device.type != "cpu" and has_images
        self.channels_last = switch_option(self.request.options, "channels_last", default=default)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def describe(self) -> dict[str, str]:
        """Return PyTorch's version and the element type."""
        return {"torch": torch.__version__, "dtype": str(self.dtype)}

    def device_memory_mib(self) -> float | None:
        """Return the peak of PyTorch's allocator on an accelerator, None on the CPU."""
        return peak_memory_mib(self.device)
