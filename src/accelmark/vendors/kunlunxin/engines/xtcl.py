"""Kunlunxin XTCL: its build of TVM compiles an ONNX file for XPUs. Not tried on hardware.

Written after TVM's documented interface and the names that Kunlunxin's public FlagPerf engine uses.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, from_numpy

from accelmark.infer.engine import Engine as Base
from accelmark.infer.engine import EngineRequest
from accelmark.spec.backports import zip_strict
from accelmark.spec.settings.inference import text_options


class Engine(Base):
    """A Relay virtual machine for one batch size.

    ``engine_options.disabled_pass`` names passes of TVM that are left out. The chip is that of ``XPUSIM_DEVICE_MODEL``.
    """

    precisions = ("fp32", "fp16")
    fixed_batch = True
    known_options = frozenset({"disabled_pass"})

    def __init__(self, request: EngineRequest) -> None:
        super().__init__(request)
        tvm = self.package("tvm")
        self.built_with = {"tvm": str(tvm.__version__)}
        relay, onnx = self.package("tvm.relay"), self.package("onnx")
        graph = onnx.load(str(self.onnx_file()))
        weights = {each.name for each in graph.graph.initializer}
        self.inputs = self.named("inputs", [each.name for each in graph.graph.input if each.name not in weights])
        shapes = {name: tuple(each.shape) for name, each in zip_strict(self.inputs, request.example)}
        module, parameters = relay.frontend.from_onnx(graph, shapes)
        generation = os.environ.get("XPUSIM_DEVICE_MODEL", "KUNLUN1")[-1]
        target = f"llvm -acc=xpu{generation}"
        options: dict[str, Any] = {}
        if request.precision == "fp16":
            half = self.package("tvm.contrib.xpu_config").XPUOutDtypeConfig
            config = half(default_precision="float16", config_last_node=True, config_map={})
            options["XPUOutDtypeConfig"] = config.value()
        names = list(text_options(request.options, "disabled_pass"))
        with tvm.transform.PassContext(opt_level=3, config=options, disabled_pass=names):
            program = relay.backend.vm.compile(module, target=target, target_host=target, params=parameters)
        self.machine = self.package("tvm.runtime.vm").VirtualMachine(program, tvm.device("xpu", 0))

    def __call__(self, inputs: list[Tensor]) -> tuple[list[Tensor], float]:
        """Compute one batch; the copies to and from the device are part of it."""
        for name, each in zip_strict(self.inputs, inputs):
            self.machine.set_one_input("main", name, each.numpy())
        self.machine.run()
        return [from_numpy(each.numpy()) for each in self.machine.get_outputs()], 0.0
