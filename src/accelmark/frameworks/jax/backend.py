"""The training backend of JAX: data parallel over all devices of the job, one process per device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from accelmark.frameworks.array_backend import ArrayBackend, LaterLosses, OpenedDevice
from accelmark.frameworks.jax.arrays import from_arrays, to_arrays
from accelmark.frameworks.jax.case import TrainCase
from accelmark.frameworks.jax.comparison import Comparison
from accelmark.frameworks.jax.counting import count_flops
from accelmark.frameworks.jax.devices import Devices
from accelmark.frameworks.jax.step import State, Step
from accelmark.frameworks.jax.tracing import StepTracer
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.batches import Arrays
from accelmark.train.loop.checkpoints import NamedArrays
from accelmark.train.loop.contract import Backend

_COMPUTE_TYPES: Final = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_COUNTED_SAMPLES: Final = 2
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
"""Parts of XLA's messages."""


def open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend:
    """Return the backend of a rank."""
    return JaxBackend(job, train, place, log)


@final
class JaxBackend(ArrayBackend[TrainCase]):
    """One rank's training in JAX."""

    framework, title, case_base = "jax", "JAX", TrainCase

    def open_device(self) -> OpenedDevice:
        """Open the device in the precision of the settings, and join the ranks."""
        self.losses = LaterLosses()
        self._devices = devices = Devices(self.job.device_type, self.settings, self.place)
        precision = self.settings.precision
        if precision == "tf32" and devices.own.platform == "cpu":
            precision = "fp32"
        index = devices.own.local_hardware_id
        return OpenedDevice(self.job.device_type, devices.name or None, index, devices.threads, precision)

    def open_case(self, found: type[TrainCase]) -> TrainCase:
        """Return the case with the type in which its model computes."""
        dtype = _COMPUTE_TYPES.get(self.settings.precision, jnp.float32)
        return found(self.settings, self.job.data_dirs, self.place, dtype)

    def build_model(self) -> str:
        """Build the state before the first step on every device."""
        self._compiled = Step(self.case, self.settings, self._devices.mesh)
        self._state: State = self._devices.replicated(self._compiled.initial_state())
        return self._compiled.model_class

    def parameters(self) -> NamedArrays:
        """Return the parameters by their path."""
        return to_arrays(self._devices.local(self._state.parameters))

    def count_flops(self) -> float:
        """Return the FLOPs of a sample, counted in the traced gradient."""
        batch = self.case.synthetic_batch(_COUNTED_SAMPLES)
        arguments = (self._state.parameters, self._state.rest, batch)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        gradient = jax.grad(lambda *given: self._compiled.loss(*given, counted=True)[0])
        return count_flops(gradient, *shapes) / _COUNTED_SAMPLES

    def build_training(self) -> None:
        """Prepare the tracing of steps; the optimizer's state is part of the state."""
        if self.world_size > 1:
            self.own_part_unknown = "no step was traced: that may cost 0.5 % of the time, which was too short"
            self.tracer = StepTracer(self._step, self.synchronize, self._devices.own.platform, self.log)

    def compute_type(self) -> str:
        """Return the type of the case's matrix products."""
        return str(jnp.dtype(self.case.dtype).name)

    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the versions of JAX and its libraries."""
        return jax.__version__, {"flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__}

    def to_device(self, batch: Arrays) -> Any:
        """Return this rank's batch as its part of the batch of all ranks."""
        return self._devices.batch(batch)

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Take one optimizer step without waiting for the device."""
        self._state, loss = self._compiled.take(self._state, np.float32(learning_rate), batches)
        return loss if self.world_size == 1 else loss.addressable_data(0)

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Evaluate a batch with this rank's copy of the state."""
        parameters, rest = self._devices.local((self._state.parameters, self._state.rest))
        found: Mapping[str, Any] = self._compiled.sums(parameters, rest, batch)
        return found

    def state(self) -> NamedArrays:
        """Return the state on the host."""
        return to_arrays(self._devices.local(self._state))

    def set_state(self, arrays: NamedArrays) -> None:
        """Copy the state to every device."""
        self._state = self._devices.replicated(from_arrays(self._state, arrays))

    def comparison(self) -> Comparison:
        """Return the model as named arrays, to compare its first steps with another framework's."""

        def write(state: State) -> None:
            self._state = state

        return Comparison(self.case, self._compiled, self._devices, lambda: self._state, write)

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self._state)

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum over all ranks."""
        return self._devices.maximum(values)

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        return self._devices.mean(values)

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where JAX does not count."""
        return None if self._device is None else self._devices.peak_memory_mib()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether XLA could not allocate memory."""
        return any(part in str(error) for part in _OUT_OF_MEMORY)

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks."""
        if together:
            self._devices.close()
