"""Run FlagPerf's vendor engines unchanged: files that define ``InferModel(config, onnx_path, model)``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, ClassVar, Optional

from torch import Tensor

from accelmark.infer.engine import Engine, EngineRequest, TorchEngine, as_list

InferModel = Callable[[Any, Optional[str], Any], Callable[[list[Tensor]], tuple[Any, float]]]


class FlagPerfEngine(TorchEngine):
    """Calls an ``InferModel``, which gets the same arguments as from FlagPerf.

    config     a named tuple of FlagPerf's configurations, ``log_dir`` (where files may be written), and
               ``engine_options`` for the keys of a ``<vendor>_configurations.yaml``; every other name is None, which
               ``engine.out.log`` notes
    onnx_path  the exported fp32 file with a dynamic batch; with ``exist_onnx_path`` set to a word that is no file, as
               FlagPerf does for compilers of the PyTorch model: that word
    model      the PyTorch model on the device in the precision; only in that last case, else None

    An engine that reads the model gets inputs in the precision, one that reads the file gets fp32. The seconds that it
    reports as not inference are handled as for any engine: throughput is by the caller's clock.
    """

    reads = "either"
    precisions = ("fp32", "fp16")
    fixed_batch = True
    known_options = None
    loads = True
    made: ClassVar[InferModel]

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        self.takes_model = request.onnx_path is None and request.engine_path is None
        path = None if request.onnx_path is None else str(request.onnx_path)
        values: dict[str, Any] = {
            "batch_size": len(request.example[0]),
            "fp16": request.precision == "fp16",
            "compiler": self.name,
            "no_validation": request.model is None,
            "exist_onnx_path": path,
            "exist_compiler_path": None if request.engine_path is None else str(request.engine_path),
            "log_dir": str(request.work_dir),
            **request.options,
        }
        model = self.model_on_device() if self.takes_model else None
        self._call = type(self).made(_config(values), path, model)

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch; return its outputs on the CPU and the seconds that it reports as other than inference."""
        arguments = [self._converted(tensor) for tensor in inputs] if self.takes_model else inputs
        outputs, other_s = self._call(arguments)
        return [output.cpu() for output in as_list(outputs)], float(other_s)

    def graph_types(self) -> dict[str, int] | None:
        """Return None: an ``InferModel`` does not report in which types it computes."""
        return None

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Not used: ``InferModel`` copies to the device by itself."""
        raise NotImplementedError


def _config(values: dict[str, Any]) -> Any:
    """Return a named tuple of ``values``, as some engines read ``config._fields``; other names are None."""

    def absent(_: Any, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        print(f"note: the engine reads config.{name}, which is None: engine_options.{name} sets it")

    return type("Config", (namedtuple("Config", values),), {"__getattr__": absent})(**values)


def adapted(infer_model: InferModel) -> type[Engine]:
    """Return the engine class of an ``InferModel`` class."""
    members = {"made": staticmethod(infer_model), "__module__": infer_model.__module__}
    return type("Engine", (FlagPerfEngine,), members)
