"""The training backend of PaddlePaddle: data parallel, one process per device, operations run one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Final, final

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from accelmark.frameworks.array_backend import ArrayBackend, DeviceLosses, NamedArrays, OpenedDevice, outputs_of_loss
from accelmark.frameworks.paddle import hooks, layers
from accelmark.frameworks.paddle.launch import MASTER
from accelmark.spec.errors import RequestError, first_line
from accelmark.spec.job import JobSpec
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TYPE_OF_PRECISION
from accelmark.train.batches import Arrays, seed_of
from accelmark.train.case import Batch
from accelmark.train.loop.contract import DeviceClock, HostClock, OwnPart

_MODEL: Final = "model/"
_OPTIMIZER: Final = "optimizer/"
_SCALER: Final = "scaler/"
_ERROR_KIND: Final = re.compile(r"\(\w+\) \S")
"""The kind of a Paddle error (``(InvalidArgument)``), and a message in the same line."""


@final
class PaddleBackend(ArrayBackend):
    """One rank's training in Paddle."""

    framework, title = "paddle", "Paddle"
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks
    libraries = (paddle,)
    sgd_class = "Momentum"
    memory_advice = "activation_checkpointing, or precision bf16"

    def open_device(self) -> OpenedDevice:
        """Open the device in the precision of the settings, and join the ranks."""
        self._device_name = device = _open_device(self.job, self.place)
        threads = self.num_threads()
        core.set_num_threads(threads)
        # Paddle has neither bf16 nor fp16 matrix products on the CPU.
        self._precision = precision = "fp32" if device == "cpu" else self.settings.precision
        if device.startswith("gpu"):  # where Paddle uses tf32 by default
            core.set_cublas_switch(precision == "tf32")
            core.set_cudnn_switch(precision == "tf32")
        self.immediate, self.clock = device == "cpu", HostClock()
        if device != "cpu":
            self.clock = DeviceClock(lambda: paddle.device.Event(enable_timing=True))
            self.losses = DeviceLosses(_fetch)
        self._control = _join_ranks(self.job, self.place)
        name = str(paddle.device.cuda.get_device_name()) if device.startswith("gpu") else None
        return OpenedDevice(name, None if device == "cpu" else self.place.local_rank, threads, precision)

    def build_model(self) -> str:
        """Build the model with the same weights on every rank."""
        np.random.seed(self.settings.seed % 2**32)
        paddle.seed(self.settings.seed)
        with layers.building(channels_last=self.settings.channels_last):
            model = self._model = self.case.build_model()
        model.train()
        sublayers = model.sublayers(include_self=True)
        self._draws_numbers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in sublayers)
        return type(model).__name__

    def _tensors(self, *, trained: bool) -> dict[str, Tensor]:
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

    def weights(self, *, trained: bool) -> NamedArrays:
        """Return copies of the parameters, or of the running statistics."""
        return {name: np.array(tensor.numpy()) for name, tensor in self._tensors(trained=trained).items()}

    def set_weights(self, arrays: NamedArrays) -> None:
        """Set parameters and running statistics."""
        tensors = {**self._tensors(trained=True), **self._tensors(trained=False)}
        for name, array in arrays.items():
            tensors[name].set_value(array)

    def training_outputs(self, batch: Batch) -> Any:
        """Compute a batch as a training step does."""
        with paddle.no_grad(), self._autocast():
            return outputs_of_loss(self.case, self._model, self.to_device(dict(batch))).astype("float32")

    def disable_dropout(self) -> None:
        """Let all values through dropout from now on."""
        for layer in self._model.sublayers(include_self=True):
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def build_training(self) -> None:
        """Wrap the model for several ranks, and build optimizer and loss scaling."""
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
        self._scaler = paddle.amp.GradScaler() if self._precision == "fp16" else None

    def _autocast(self) -> Any:
        if self._precision not in ("bf16", "fp16"):
            return nullcontext()
        return paddle.amp.auto_cast(level="O1", dtype=TYPE_OF_PRECISION[self._precision])

    def compute_type(self) -> str:
        """Return the type of a matrix product under the driver's autocast."""
        with paddle.no_grad(), self._autocast():
            product = paddle.matmul(paddle.ones([8, 8]), paddle.ones([8, 8]))
        return str(product.dtype).rpartition(".")[2]

    def to_device(self, batch: Arrays) -> Batch:
        """Return a batch on the device."""
        return {name: paddle.to_tensor(array) for name, array in batch.items()}

    def take_step(self, batches: list[Batch], learning_rate: float) -> Any:
        """Take one optimizer step over some batches; the ranks reduce their gradients once."""
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
        """Evaluate with the running statistics of rank 0, which it also saves."""
        if self.world_size > 1:
            for tensor in self._tensors(trained=False).values():
                dist.broadcast(tensor, src=0)
        self._model.eval()
        try:
            yield
        finally:
            self._model.train()

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Evaluate a batch."""
        with self._autocast():
            return self.case.eval_sums(self._model, self.to_device(batch))

    def state(self) -> NamedArrays:
        """Return model, optimizer and loss scale."""
        weights = {**self.weights(trained=True), **self.weights(trained=False)}
        arrays = {_MODEL + name: array for name, array in weights.items()}
        arrays |= {_OPTIMIZER + key: value.numpy() for key, value in self._optimizer.state_dict().items()}
        if self._scaler is not None:
            arrays |= {_SCALER + key: np.asarray(value) for key, value in self._scaler.state_dict().items()}
        return arrays

    def set_state(self, arrays: NamedArrays) -> None:
        """Set model, optimizer and loss scale."""
        for name, tensor in {**self._tensors(trained=True), **self._tensors(trained=False)}.items():
            array = arrays[_MODEL + name]
            if list(array.shape) != tensor.shape:
                raise ValueError(f"{name} has shape {tensor.shape}, in the checkpoint {list(array.shape)}")
            tensor.set_value(array)
        states = {key.removeprefix(_OPTIMIZER): value for key, value in arrays.items() if key.startswith(_OPTIMIZER)}
        self._optimizer.set_state_dict({key: paddle.to_tensor(value) for key, value in states.items()})
        if self._scaler is not None:
            scaler = {key.removeprefix(_SCALER): value for key, value in arrays.items() if key.startswith(_SCALER)}
            self._scaler.load_state_dict({key: value if value.ndim else value.item() for key, value in scaler.items()})

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device_name != "cpu":
            paddle.device.synchronize(self._device_name)

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
        """Return the largest allocation."""
        return float(paddle.device.max_memory_allocated(self._device_name))

    def summary(self, error: BaseException) -> str:
        """Return the line of an error with its cause; Paddle's errors begin with a stack and the kind of error."""
        lines = (line.strip() for line in str(error).splitlines())
        return next((line for line in lines if _ERROR_KIND.search(line)), first_line(error))

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""
        if self.world_size > 1 and together:
            self.mean([0.0])
            dist.destroy_process_group()


open_backend = PaddleBackend


def _fetch(losses: list[Any]) -> Callable[[], list[float]]:
    stacked = paddle.stack([loss.astype("float32").reshape([]) for loss in losses])
    return lambda: [float(loss) for loss in stacked.numpy().tolist()]


def _open_device(job: JobSpec, ranks: RankPlace) -> str:
    """Make this rank's device the current one, and return its name (``cpu``, ``gpu:0``)."""
    if job.device_type == "cpu":
        paddle.set_device("cpu")
        return "cpu"
    available: list[str] = paddle.device.get_available_device() + paddle.device.get_available_custom_device()
    mine = [name for name in available if name.partition(":")[0] == job.device_type]
    if not mine:
        raise RequestError(
            f"vendor {job.vendor!r} needs a {job.device_type!r} device, and Paddle {paddle.__version__} finds only "
            f"{', '.join(available)}; check the driver and that the installed Paddle is a build for it"
        )
    if ranks.local_rank >= len(mine):
        raise RequestError(f"local rank {ranks.local_rank} has no device: {len(mine)} {job.device_type} visible here")
    paddle.set_device(f"{job.device_type}:{ranks.local_rank}")
    return f"{job.device_type}:{ranks.local_rank}"


def _join_ranks(job: JobSpec, ranks: RankPlace) -> Any:
    """Open the process group if there are several ranks; returns a gloo group for control messages, or None.

    Paddle's own launcher sets the same variables. Variables of other launchers would take precedence. All gloo
    groups of Paddle 3.3 keep their addresses under the same keys of the store, so that ranks of a second group may
    connect to addresses of the first ("Connection refused"): there is one gloo group only.
    """
    if ranks.world_size == 1:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    address = os.environ[MASTER]
    os.environ.update(
        PADDLE_TRAINER_ID=str(ranks.rank),
        PADDLE_TRAINERS_NUM=str(ranks.world_size),
        PADDLE_TRAINER_ENDPOINTS=address,
        PADDLE_CURRENT_ENDPOINT=address,
        PADDLE_DISTRI_BACKEND=job.collective_backend,
    )
    if job.device_type != "cpu":
        os.environ[f"FLAGS_selected_{job.device_type}s"] = str(ranks.local_rank)
    group = dist.init_parallel_env()
    return group if job.collective_backend == "gloo" else dist.new_group(backend="gloo")
