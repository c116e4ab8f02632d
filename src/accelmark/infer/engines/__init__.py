"""Inference engines, one file each: the look-up of an engine's class, and FlagPerf's vendor engines, run unchanged.

``engines.yaml`` declares each engine's module and requirements, so that planning knows them without an import.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from accelmark.infer.engine import Engine, EngineRequest, TorchEngine, as_list
from accelmark.spec.backports import entry_points
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.plugins.catalog import ENGINES_ENTRY_POINTS, engine_files, file_module, known_engines


def engine_class(name: str, vendor_folder: Path | None) -> type[Engine]:
    """Return the class of the engine ``name``; a vendor's file takes precedence over AccelMark's of the same name.

    Raises RequestError: there is no such engine. Raises RunError: the file or package defines no ``Engine``.
    """
    entries = {entry.name: entry for entry in entry_points(group=ENGINES_ENTRY_POINTS)}
    if vendor_folder is not None and name in engine_files(vendor_folder / "engines"):
        path = vendor_folder / "engines" / f"{name}.py"
        module, where = file_module(f"accelmark_vendor_engines.{name}", path), str(path)
        engine = getattr(module, "Engine", None)
        if engine is None and hasattr(module, "InferModel"):
            members = {"made": staticmethod(module.InferModel), "__module__": module.InferModel.__module__}
            return type("Engine", (FlagPerfEngine,), members)
    elif name in entries:
        engine, where = entries[name].load(), entries[name].value
    elif name in engine_files():
        where = f"{__name__}.{name}"
        engine = getattr(importlib.import_module(where), "Engine", None)
    else:
        raise RequestError(f"compiler: unknown engine {name!r} ({nearest(name, known_engines(vendor_folder))})")
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        problem = "no class Engine derived from accelmark.infer.engine.Engine, and no FlagPerf class InferModel"
        raise RunError(f"{where}: defines {problem}")
    return engine


class FlagPerfEngine(TorchEngine):
    """Calls FlagPerf's class ``InferModel(config, onnx_path, model)`` with the same arguments as FlagPerf.

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
    made: ClassVar[Callable[[Any, str | None, Any], Callable[[list[Tensor]], tuple[Any, float]]]]

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

        def absent(_: Any, name: str) -> None:
            if name.startswith("_"):
                raise AttributeError(name)
            print(f"note: the engine reads config.{name}, which is None: engine_options.{name} sets it")

        # Some engines read ``config._fields``.
        config = type("Config", (namedtuple("Config", values),), {"__getattr__": absent})(**values)
        self._call = type(self).made(config, path, self.model_on_device() if self.takes_model else None)
        self.matrix_types = None  # an ``InferModel`` does not report in which types it computes

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch; return its outputs on the CPU and the seconds that it reports as other than inference."""
        arguments = [self._converted(tensor) for tensor in inputs] if self.takes_model else inputs
        outputs, other_s = self._call(arguments)
        return [output.cpu() for output in as_list(outputs)], float(other_s)

    def compute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Not used: ``InferModel`` copies to the device by itself."""
        raise NotImplementedError
