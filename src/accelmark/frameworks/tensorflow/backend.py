"""The training backend of TensorFlow: data parallel, one process per device, each step one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final, final

import numpy as np
import tensorflow as tf

from accelmark.frameworks.array_backend import ArrayBackend, DeviceLosses, OpenedDevice
from accelmark.frameworks.tensorflow import hooks, layers
from accelmark.frameworks.tensorflow.ranks import Ranks
from accelmark.frameworks.tensorflow.step import Step
from accelmark.spec.log.events import Event
from accelmark.train.batches import Arrays, seed_of
from accelmark.train.case import Batch
from accelmark.train.loop.backend import HostClock
from accelmark.train.loop.checkpoints import NamedArrays

_COMPUTE_TYPES: Final = {"bf16": tf.bfloat16, "fp16": tf.float16}


@final
class TensorFlowBackend(ArrayBackend):
    """One rank's training in TensorFlow."""

    framework, title = "tensorflow", "TensorFlow"
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks

    def open_device(self) -> OpenedDevice:
        """Open the device in the precision of the settings, and join the ranks."""
        self.losses = DeviceLosses(lambda losses: lambda: [float(loss) for loss in losses])
        threads, precision = self.num_threads(), self.settings.precision
        self._ranks = ranks = Ranks(self.job, precision, threads, self.place)
        if self.place.world_size > 1:
            if ranks.is_cpu:
                self.clock, self.own_end = HostClock(), self._gradients_ready
            else:  # a graph is still being computed when its call returns
                self.own_part_unknown = "TensorFlow marks the end of a rank's own part on CPUs only"
        if precision == "tf32" and ranks.is_cpu:
            precision = "fp32"
        self._dtype = _COMPUTE_TYPES.get(precision, tf.float32)
        index = None if ranks.is_cpu else self.place.local_rank
        return OpenedDevice(self.job.device_type, ranks.name, index, threads, precision)

    def build_model(self) -> str:
        """Build the model with the same weights on every rank."""
        self._step_graph = Step(self.case, self.hooks, self._dtype, self._ranks)
        return type(self._step_graph.model).__name__

    def weights(self, *, trained: bool) -> NamedArrays:
        """Return copies of the parameters, or of the running statistics."""
        variables = self._step_graph.variables.items()
        return {name: variable.numpy() for name, variable in variables if variable.trainable == trained}

    def set_weights(self, arrays: NamedArrays) -> None:
        """Set variables of the model."""
        for name, array in arrays.items():
            self._step_graph.variables[name].assign(array)

    def training_outputs(self, batch: Batch) -> Any:
        """Compute a batch as a training step does."""
        return self._step_graph.outputs(self.to_device(dict(batch)))

    def disable_dropout(self) -> None:
        """Let all values through dropout from now on."""
        self._step_graph.disable_dropout()

    def build_training(self) -> None:
        """Build the optimizer."""
        self.timed(Event.CREATE_OPTIMIZER, self._step_graph.build_optimizer)

    def compute_type(self) -> str:
        """Return the type of the layers' matrix products."""
        return str(tf.as_dtype(self._dtype).name)

    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the version of TensorFlow."""
        return tf.__version__, {}

    def to_device(self, batch: Arrays) -> Any:
        """Return a batch on the device."""
        return {name: tf.convert_to_tensor(array) for name, array in batch.items()}

    def call_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Call the graph, which calls the hook while it is traced."""
        return self.take_step(batches, learning_rate)

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Take one optimizer step."""
        seed = seed_of(self.settings.seed, self.place.rank, self.steps_done)
        halves = tf.constant((seed % 2**31, seed // 2**31), tf.int32)
        loss, self._ready = self._step_graph.take(batches, tf.constant(learning_rate, tf.float32), halves)
        return loss

    def _gradients_ready(self) -> int:
        """Return when the gradients of the last step were computed, before their exchange, by the monotonic clock."""
        ago_s = time.time() - float(self._ready)
        return time.monotonic_ns() - int(ago_s * 1e9)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate with the running statistics of rank 0, which it also saves."""
        if self.world_size > 1:
            for variable in self._step_graph.variables.values():
                if not variable.trainable:
                    variable.assign(self._ranks.gather(variable)[0])
        yield

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Evaluate a batch."""
        sums: Mapping[str, Any] = self._step_graph.sums(self.to_device(batch))
        return sums

    def state(self) -> NamedArrays:
        """Return model, optimizer and loss scale."""
        return {name: variable.numpy() for name, variable in self._step_graph.state().items()}

    def set_state(self, arrays: NamedArrays) -> None:
        """Set model, optimizer and loss scale."""
        for name, variable in self._step_graph.state().items():
            variable.assign(arrays[name])

    def synchronize(self) -> None:
        """Wait for the device."""
        self._ranks.synchronize()

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Return the maximum of each value over all ranks, which is computed at once."""
        largest = self._ranks.gather(np.array(values)).max(0)
        return lambda: [float(value) for value in largest]

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        if self.world_size == 1 or not values:
            return values
        return [float(value) for value in self._ranks.gather(np.array(values)).mean(0)]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU."""
        return None if self._device is None else self._ranks.peak_memory_mib()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether TensorFlow could not allocate memory."""
        return isinstance(error, tf.errors.ResourceExhaustedError)

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks."""
        if together:
            self._ranks.leave()


open_backend = TensorFlowBackend
