"""The training backend of PaddlePaddle: data parallel, one process per device, operations run one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from accelmark.frameworks.array_backend import ArrayBackend, NamedArrays, outputs_of_loss
from accelmark.frameworks.paddle import hooks, layers
from accelmark.frameworks.paddle.launch import MASTER
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.log.events import Event
from accelmark.spec.settings.training import TYPE_OF_PRECISION
from accelmark.train.batches import Arrays, seed_of
from accelmark.train.case import Batch
from accelmark.train.loop.contract import DeviceClock, HostClock, LossReader, OwnPart

_ERROR_KIND: Final = re.compile(r"\(\w+\) \S")
"""The kind of a Paddle error (``(InvalidArgument)``), and a message in the same line."""


class PaddleBackend(ArrayBackend):
    """One rank's training in Paddle."""

    framework, title = "paddle", "Paddle"
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks
    libraries = (paddle,)
    tensor_of = staticmethod(paddle.to_tensor)
    array_of = staticmethod(lambda tensor: np.array(tensor.numpy()))
    sgd_class = "Momentum"
    memory_advice = "activation_checkpointing, or precision bf16"

    def open_device(self) -> None:
        self._device = device = self._own_device()
        paddle.set_device(device)
        core.set_num_threads(self.threads)
        self.immediate = device == "cpu"
        if self.immediate:
            self.precision = "fp32"  # Paddle has neither bf16 nor fp16 matrix products on the CPU
            self.clock = HostClock()
        else:
            self.device_index = self.place.local_rank
            self.clock = DeviceClock(lambda: paddle.device.Event(enable_timing=True))
            self.losses = LossReader(_fetch)
        if device.startswith("gpu"):  # where Paddle uses tf32 by default
            core.set_cublas_switch(self.precision == "tf32")
            core.set_cudnn_switch(self.precision == "tf32")
            self.device_name = str(paddle.device.cuda.get_device_name())
        if self.world_size > 1:
            self._join_ranks()

    def _own_device(self) -> str:
        """Return the name of this rank's device (``cpu``, ``gpu:0``)."""
        kind, index = self.job.device_type, self.place.local_rank
        if kind == "cpu":
            return kind
        available: list[str] = paddle.device.get_available_device() + paddle.device.get_available_custom_device()
        count = sum(name.partition(":")[0] == kind for name in available)
        if not count:
            raise RequestError(
                f"vendor {self.job.vendor!r} needs a {kind!r} device, and Paddle {paddle.__version__} finds only "
                f"{', '.join(available)}; check the driver and that the installed Paddle is a build for it"
            )
        if index >= count:
            raise RequestError(f"local rank {index} has no device: {count} {kind} visible here")
        return f"{kind}:{index}"

    def _join_ranks(self) -> None:
        """Open the process group, and a gloo group for control messages.

        Paddle's own launcher sets the same variables. Variables of other launchers would take precedence. All gloo
        groups of Paddle 3.3 keep their addresses under the same keys of the store, so that ranks of a second group may
        connect to addresses of the first ("Connection refused"): there is one gloo group only.
        """
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        address, kind, backend = os.environ[MASTER], self.job.device_type, self.job.collective_backend
        os.environ.update(
            PADDLE_TRAINER_ID=str(self.place.rank),
            PADDLE_TRAINERS_NUM=str(self.world_size),
            PADDLE_TRAINER_ENDPOINTS=address,
            PADDLE_CURRENT_ENDPOINT=address,
            PADDLE_DISTRI_BACKEND=backend,
        )
        if kind != "cpu":
            os.environ[f"FLAGS_selected_{kind}s"] = str(self.place.local_rank)
        group = dist.init_parallel_env()
        self._control = group if backend == "gloo" else dist.new_group(backend="gloo")

    def build_model(self) -> str:
        np.random.seed(self.settings.seed % 2**32)
        paddle.seed(self.settings.seed)
        with layers.building(channels_last=self.settings.channels_last):
            model = self._model = self.case.build_model()
        model.train()
        sublayers = model.sublayers(include_self=True)
        self._draws_numbers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in sublayers)
        return type(model).__name__

    def variables(self, *, trained: bool) -> dict[str, Tensor]:
        """Return parameters, or running statistics, which are parameters too in Paddle; shared tensors once."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, layer in self._model.named_sublayers(include_self=True):
            for name, tensor in layer.state_dict(include_sublayers=False).items():
                if tensor.stop_gradient != trained and tensor.is_floating_point() and id(tensor) not in seen:
                    seen.add(id(tensor))
                    last = "kernel" if isinstance(layer, nn.Linear) and name == "weight" else name
                    tensors[f"{prefix}.{last}" if prefix else last] = tensor
        return tensors

    def assign(self, variable: Tensor, array: np.ndarray) -> None:
        variable.set_value(array)

    def training_outputs(self, batch: Batch) -> Any:
        with paddle.no_grad(), self._autocast():
            return outputs_of_loss(self.case, self._model, self.to_device(dict(batch))).astype("float32")

    def disable_dropout(self) -> None:
        for layer in self._model.sublayers(include_self=True):
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def build_training(self) -> None:
        self._model = self.timed(Event.CONVERT_MODEL, lambda: self.hooks.convert_model(self._model))
        recomputes = self.settings.activation_checkpointing == "full"
        for layer in self._model.sublayers() if recomputes else ():
            if getattr(layer, "is_block", False):
                layer.forward = partial(recompute, layer.forward)
        # DataParallel does not reduce the gradients of recomputed blocks, whose backward pass is nested.
        self._reduces_after = recomputes and self.world_size > 1
        self._wrapped = self.timed(
            Event.MODEL_TO_DDP, lambda: self._model if self.world_size == 1 else paddle.DataParallel(self._model)
        )
        self._optimizer = self.timed(Event.CREATE_OPTIMIZER, lambda: self.hooks.create_optimizer(self._model))
        if self.world_size > 1 and self.clock is not None:
            trained = (parameter for parameter in self._model.parameters() if not parameter.stop_gradient)
            self.own_end = OwnPart([parameter.register_hook for parameter in trained], self.clock).take
        self._scaler = paddle.amp.GradScaler() if self.precision == "fp16" else None

    def _autocast(self) -> Any:
        if self.precision not in ("bf16", "fp16"):
            return nullcontext()
        return paddle.amp.auto_cast(level="O1", dtype=TYPE_OF_PRECISION[self.precision])

    def compute_type(self) -> str:
        with paddle.no_grad(), self._autocast():
            product = paddle.matmul(paddle.ones([8, 8]), paddle.ones([8, 8]))
        return str(product.dtype).rpartition(".")[2]

    def take_step(self, batches: list[Batch], learning_rate: float) -> Any:
        if self._draws_numbers:  # so that a resumed or replayed step draws the same numbers
            paddle.seed(seed_of(self.settings.seed, self.place.rank, self.steps_done))
        self._optimizer.set_lr(learning_rate)
        total, last = None, batches[-1]
        for batch in batches:
            reduces = batch is last and not self._reduces_after
            with nullcontext() if self.world_size == 1 or reduces else self._wrapped.no_sync():
                with self._autocast():
                    loss = self.case.loss(self._wrapped, batch) / len(batches)
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self._reduces_after:
            fused_allreduce_gradients(list(self._model.parameters()), None)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.clear_grad(set_to_zero=False)
        return total

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.world_size > 1:
            for tensor in self.variables(trained=False).values():
                dist.broadcast(tensor, src=0)
        self._model.eval()
        try:
            yield
        finally:
            self._model.train()

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        with self._autocast():
            return self.case.eval_sums(self._model, self.to_device(batch))

    def state(self) -> NamedArrays:
        weights = {**self.weights(trained=True), **self.weights(trained=False)}
        arrays = {f"model/{name}": array for name, array in weights.items()}
        arrays |= {f"optimizer/{key}": value.numpy() for key, value in self._optimizer.state_dict().items()}
        if self._scaler is not None:
            arrays |= {f"scaler/{key}": np.asarray(value) for key, value in self._scaler.state_dict().items()}
        return arrays

    def set_state(self, arrays: NamedArrays) -> None:
        for name, tensor in {**self.variables(trained=True), **self.variables(trained=False)}.items():
            array = arrays[f"model/{name}"]
            if list(array.shape) != tensor.shape:
                raise ValueError(f"{name} has shape {tensor.shape}, in the checkpoint {list(array.shape)}")
            tensor.set_value(array)
        parts: dict[str, dict[str, np.ndarray]] = {"model": {}, "optimizer": {}, "scaler": {}}
        for key, value in arrays.items():
            part, _, name = key.partition("/")
            parts[part][name] = value
        self._optimizer.set_state_dict({key: paddle.to_tensor(value) for key, value in parts["optimizer"].items()})
        if self._scaler is not None:
            scaler = parts["scaler"].items()
            self._scaler.load_state_dict({key: value if value.ndim else value.item() for key, value in scaler})

    def synchronize(self) -> None:
        if self._device != "cpu":
            paddle.device.synchronize(self._device)

    def gather(self, values: list[float]) -> Callable[[], np.ndarray]:
        """Start to collect the values of all ranks on the CPU, independent of the device."""
        own, *parts = (
            paddle.to_tensor(values, dtype="float64", place=paddle.CPUPlace()) for _ in range(self.world_size + 1)
        )
        work = dist.all_gather(parts, own, group=self._control, sync_op=False)

        def read() -> np.ndarray:
            work.wait()
            return np.stack([part.numpy() for part in parts])

        return read

    def peak_bytes(self) -> float:
        return float(paddle.device.max_memory_allocated(self._device))

    def summary(self, error: BaseException) -> str:
        """Return the line of an error with its cause; Paddle's errors begin with a stack and the kind of error."""
        lines = (line.strip() for line in str(error).splitlines())
        return next((line for line in lines if _ERROR_KIND.search(line)), first_line(error))

    def close(self, *, together: bool) -> None:
        if self.world_size > 1 and together:
            self.mean([0.0])
            dist.destroy_process_group()


open_backend = PaddleBackend


def _fetch(losses: list[Any]) -> Callable[[], list[float]]:
    stacked = paddle.stack([loss.astype("float32").reshape([]) for loss in losses])
    return lambda: [float(loss) for loss in stacked.numpy().tolist()]
