"""The training backend of MindSpore: data parallel, one process per device; gradients are computed as one graph."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, ops
from mindspore.communication import GlobalComm, init, release

from accelmark.frameworks.array_backend import ArrayBackend, outputs_of_loss
from accelmark.frameworks.mindspore import hooks, layers
from accelmark.frameworks.mindspore.hooks import clipped
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.framework import module_command
from accelmark.train.batches import Arrays, seed_of
from accelmark.train.case import Batch
from accelmark.train.loop.contract import DeviceClock, HostClock, LossReader

_AMP_TYPES: Final = {"bf16": ms.bfloat16, "fp16": ms.float16}
_LEAVE_S: Final = 60.0


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose operations are captured from Python's bytecode, compiled and run as one graph.

    MindSpore 2.10 captures no function that indexes or slices a tensor with ``[]``: it runs operation by operation.
    ``capture_mode="trace"`` of MindSpore 2.10 reads parameters only once, and training with it diverges.
    """
    jit: Callable[..., Any] = ms.jit(function, capture_mode="bytecode")
    return jit


class MindSporeBackend(ArrayBackend):
    """One rank's training in MindSpore."""

    framework, title = "mindspore", "MindSpore"
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks
    libraries = (ms,)
    tensor_of = Tensor
    array_of = staticmethod(lambda parameter: parameter.asnumpy().copy())

    def open_device(self) -> None:
        is_cpu = self.immediate = self.job.device_type == "cpu"
        self._scheduler: subprocess.Popen[bytes] | None = None
        index = self.place.local_rank
        ms.set_context(mode=ms.PYNATIVE_MODE)
        what = f"local rank {index} has no {self.job.device_type}: check the driver and CANN"
        with raising(RequestError, what, RuntimeError, ValueError):
            ms.set_device("CPU" if is_cpu else self.job.device_type, 0 if is_cpu else index)
        if not is_cpu:
            precision = getattr(ms.device_context, self.job.device_type.lower()).op_precision
            precision.precision_mode("must_keep_origin_dtype")
            precision.matmul_allow_hf32(False)
            precision.conv_allow_hf32(False)  # CANN computes fp32 convolutions with fewer bits otherwise
        ms.runtime.dispatch_threads_num(self.threads)
        if self.world_size > 1:
            self._join()
        if is_cpu or self.precision == "tf32":
            self.precision = "fp32"
        self.clock = HostClock()
        if not is_cpu:
            self.clock, self.losses = DeviceClock(lambda: ms.runtime.Event(enable_timing=True)), LossReader(_fetch)
            self.device_name, self.device_index = str(ms.hal.get_device_name()), index

    def _join(self) -> None:
        host, _, port = os.environ[COORDINATOR].rpartition(":")
        variables = {
            "MS_WORKER_NUM": str(self.world_size),
            "MS_SCHED_HOST": socket.gethostbyname(host),
            "MS_SCHED_PORT": port,
        }
        if self.place.rank == 0:
            command = module_command(sys.executable, "accelmark.frameworks.mindspore.scheduler", str(os.getpid()))
            self._scheduler = subprocess.Popen(command, env={**os.environ, **variables, "MS_ROLE": "MS_SCHED"})
        rank = str(self.place.rank)
        variables |= {"RANK_ID": rank, "RANK_SIZE": str(self.world_size), "DEVICE_ID": str(self.place.local_rank)}
        os.environ.update(variables, MS_ROLE="MS_WORKER", MS_NODE_ID=rank)  # as msrun sets them
        init(self.job.collective_backend)
        group = GlobalComm.WORLD_COMM_GROUP
        self._all_gather, self._broadcast = ops.AllGather(group), ops.Broadcast(0, group)
        self._all_reduce = ops.AllReduce("sum", group)

    def build_model(self) -> str:
        ms.set_seed(self.settings.seed % 2**32)
        with layers.building(self.settings.seed):
            self._model = self.case.build_model()
        self._model.set_train()
        cells = [cell for _, cell in self._model.cells_and_names()]
        self._dropouts = [cell for cell in cells if isinstance(cell, layers.Dropout) and cell.rate]
        return type(self._model).__name__

    def variables(self, *, trained: bool) -> Mapping[str, Any]:
        chosen = self._model.trainable_params() if trained else self._model.untrainable_params()
        return {parameter.name: parameter for parameter in chosen if parameter.dtype == ms.float32}

    def assign(self, variable: Any, array: np.ndarray) -> None:
        ops.assign(variable, Tensor(array))

    def training_outputs(self, batch: Batch) -> Any:
        outputs = outputs_of_loss(self.case, self._model, self.to_device(dict(batch)))
        return outputs.astype(ms.float32).asnumpy()

    def disable_dropout(self) -> None:
        for layer in self._dropouts:
            layer.rate = 0.0

    def build_training(self) -> None:
        dtype = _AMP_TYPES.get(self.precision)
        self._model = self.timed(Event.CONVERT_MODEL, lambda: self.hooks.convert_model(self._model))
        model = self._model if dtype is None else amp.auto_mixed_precision(self._model, "auto", dtype)
        self._optimizer = self.timed(Event.CREATE_OPTIMIZER, lambda: self.hooks.create_optimizer(self._model))
        self._scaler = amp.DynamicLossScaler(2.0**16, 2, 2000) if self.precision == "fp16" else None
        self._computing = model
        """The model as it computes: in the types of the precision."""
        self._graphs: dict[tuple[str, ...], Callable[..., Any]] = {}
        """Names of a batch's tensors -> the captured function that computes loss and gradients."""
        self._evaluations: dict[tuple[str, ...], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """Captured, and as it is written."""
        self._own_end: Any = None
        if self.world_size > 1:
            self.own_end = lambda: self._own_end

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        share = 1.0 / len(batches)
        scale = Tensor(share, ms.float32) if self._scaler is None else share * self._scaler.scale_value
        sums: tuple[Tensor, ...] = ()
        for number, batch in enumerate(batches):
            self._draw(number)
            loss, gradients = self._graph(tuple(batch))(scale, *batch.values())
            new = (loss, *gradients)
            sums = tuple(map(ops.add, sums, new)) if sums else new
        total, gradients = sums[0], sums[1:]
        if self.world_size > 1:
            if self.immediate:
                self.synchronize()
            self._own_end = None if self.clock is None else self.clock.mark()
            tensors = total, *gradients
            joint = self._all_reduce(ops.cat([tensor.reshape(-1) for tensor in tensors])) / self.world_size
            parts, start = [], 0
            for tensor in tensors:
                parts.append(joint[start : start + tensor.size].reshape(tensor.shape))
                start += tensor.size
            total, gradients = parts[0], tuple(parts[1:])
        if self._scaler is not None:
            gradients = self._scaler.unscale(gradients)
            finite = amp.all_finite(gradients)
            self._scaler.adjust(finite)
        if self._scaler is None or bool(finite):
            if (norm := self.settings.gradient_clip_norm) is not None:
                gradients = clipped(gradients, norm)
            for group in self._optimizer.param_groups:
                ops.assign(group["lr"], Tensor(learning_rate, ms.float32))
            self._optimizer(gradients)
        if self.immediate:
            self.synchronize()
        return total if self._scaler is None else total / (scale / share)

    def _graph(self, names: tuple[str, ...]) -> Callable[..., Any]:
        if names not in self._graphs:
            case, model = self.case, self._computing

            def loss(scale: Tensor, *tensors: Tensor) -> Tensor:
                return case.loss(model, dict(zip_strict(names, tensors))) * scale

            # Captured with has_aux, MindSpore 2.10 returns gradients of zero.
            graph = ms.value_and_grad(loss, None, self._optimizer.parameters)
            self._graphs[names] = compiled(lambda *inputs: graph(*inputs))
        return self._graphs[names]

    def _draw(self, number: int) -> None:
        """Let dropout draw the numbers of this rank, step and batch of it, which a replayed step repeats."""
        if self._dropouts:
            seed = seed_of(self.settings.seed, self.place.rank, self.steps_done, number)
            ops.assign(self._dropouts[0].seed, Tensor(np.array((seed % 2**31, seed // 2**31), np.int32)))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.world_size > 1:
            for parameter in self._model.untrainable_params():
                ops.assign(parameter, self._broadcast((parameter,))[0])
        self._model.set_train(False)
        try:
            yield
        finally:
            self._model.set_train()

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        names, tensors = tuple(batch), self.to_device(batch).values()
        if names not in self._evaluations:
            case, model = self.case, self._computing

            def sums_of(*tensors: Tensor) -> Mapping[str, Tensor]:
                return case.eval_sums(model, dict(zip_strict(names, tensors)))

            self._evaluations[names] = compiled(sums_of), sums_of
        captured, plain = self._evaluations[names]
        try:
            sums: Mapping[str, Tensor] = captured(*tensors)
        except SystemError:  # now and then MindSpore 2.10 generates bytecode that does not run
            self._evaluations[names] = plain, plain
            sums = plain(*tensors)
        return sums

    def state_variables(self) -> Mapping[str, Any]:
        of_model = {parameter.name: parameter for parameter in self._model.get_parameters()}
        state = {f"model/{name}": parameter for name, parameter in of_model.items()}
        moments = [parameter for parameter in self._optimizer.get_parameters() if parameter.name not in of_model]
        state |= {f"optimizer/{parameter.name}": parameter for parameter in moments}
        if self._scaler is not None:
            state |= {"scaler/scale": self._scaler.scale_value, "scaler/counter": self._scaler.counter}
        return state

    def synchronize(self) -> None:
        ms.runtime.synchronize()

    def gather(self, values: list[float]) -> Callable[[], np.ndarray]:
        joint = self._all_gather(Tensor(np.array(values, np.float64)))
        return lambda: joint.asnumpy().reshape(self.world_size, -1)

    def peak_bytes(self) -> float:
        return float(ms.runtime.max_memory_allocated())

    def close(self, *, together: bool) -> None:
        if not self.is_open:
            return
        if together and self.world_size > 1:
            self.mean([0.0])
            release()
        if self._scheduler is not None:
            try:
                self._scheduler.wait(_LEAVE_S if together else 0)
            except subprocess.TimeoutExpired:
                self._scheduler.kill()
                self._scheduler.wait()


open_backend = MindSporeBackend


def _fetch(losses: list[Any]) -> Callable[[], list[float]]:
    stacked = ops.stack([loss.reshape(()) for loss in losses])
    return lambda: [float(loss) for loss in stacked.asnumpy()]
