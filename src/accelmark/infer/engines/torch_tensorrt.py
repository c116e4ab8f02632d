"""Torch-TensorRT: TensorRT inside a PyTorch program, without ONNX."""

from __future__ import annotations

from torch import Tensor

from accelmark.infer.engine import EngineRequest, TorchEngine, as_list
from accelmark.spec.settings.inference import number_option


class Engine(TorchEngine):
    """The exported program, compiled for batches from 1 to ``batch_size``.

    ``engine_options.min_block_size`` is the smallest number of operators that TensorRT runs together; unsupported
    operators stay in PyTorch, on the same device. The peak memory is of PyTorch's allocator, without TensorRT's.
    """

    known_options = frozenset({"channels_last", "cuda_graphs", "min_block_size"})

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        trt = self.package("torch_tensorrt")
        self.built_with = {"torch_tensorrt": trt.__version__}
        shapes = [(tuple(each.shape), each.dtype) for each in self.to_device(request.example)]
        self.compiled = trt.compile(
            self.model_on_device(),
            ir="dynamo",
            inputs=[
                trt.Input(min_shape=(1, *shape[1:]), opt_shape=shape, max_shape=shape, dtype=dtype)
                for shape, dtype in shapes
            ],
            use_explicit_typing=True,  # the model is in the precision already
            disable_tf32=request.precision != "tf32",
            min_block_size=number_option(request.options, "min_block_size", 5),
        )

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        return as_list(self.compiled(*inputs))
