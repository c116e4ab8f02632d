"""The training backend of JAX: data parallel over all devices of the job, one process per device.

XLA compiles the exchange of gradients into the step, so that no mark on the host separates it from computation: single
steps are traced with JAX's profiler, and the rest of a step without its collectives is the rank's own part.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, final

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accelmark.frameworks.array_backend import ArrayBackend, DeviceLosses, OpenedDevice, processor_name
from accelmark.frameworks.jax import hooks, layers
from accelmark.frameworks.jax.step import State, Step
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.log.events import Event, TracedStep
from accelmark.spec.log.perflog import EventLog
from accelmark.train.batches import Arrays
from accelmark.train.case import Batch
from accelmark.train.loop.checkpoints import NamedArrays
from accelmark.train.loop.window import covered

_COLLECTIVES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""Beginnings of the names of HLO instructions."""


@final
class StepTracer:
    """Traces steps; see :class:`accelmark.train.loop.contract.StepTracer`."""

    def __init__(self, step: Callable[[list[Any]], Any], wait: Callable[[], None], platform: str, log: EventLog):
        """``step`` takes a step without waiting, ``wait`` waits until it is computed."""
        self._step, self._wait, self._log = step, wait, log
        self._planes = "/host:CPU" if platform == "cpu" else "/device:"
        self.cost_s = 0.0
        self._trace(lambda: None)  # the first trace opens the profiler: part of the initialisation

    def take(self, batches: list[Any]) -> tuple[Any, TracedStep | None]:
        """Take a step and return its loss with its times; None, and never again, where its trace has no collective."""
        self._wait()
        loss, step_ms, exchange_ms = self._trace(lambda: self._step(batches))
        if not exchange_ms:
            self.cost_s = float("inf")
            problem = "waits for other ranks are not known: the trace of a step has no collective"
            self._log.event(Event.WARNING, {"message": problem})
            return loss, None
        return loss, TracedStep(step_ms=round(step_ms, 4), own_ms=round(max(0.0, step_ms - exchange_ms), 4))

    def _trace(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """Return the result of ``run``, its duration and the duration of its collectives in milliseconds."""
        begin = time.monotonic()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory(prefix="accelmark-trace-") as directory:
            jax.profiler.start_trace(directory, profiler_options=options)
            try:
                start = time.monotonic()
                result = run()
                self._wait()
                step_s = time.monotonic() - start
            finally:
                jax.profiler.stop_trace()
            exchange_ms = covered(self._collectives(Path(directory)))
        self.cost_s = max(self.cost_s, time.monotonic() - begin - step_s)
        return result, step_s * 1e3, exchange_ms

    def _collectives(self, directory: Path) -> Iterator[tuple[float, float]]:
        """Yield begin and end of the collectives of this rank's device in milliseconds."""
        for file in directory.rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith(self._planes):
                    continue
                for line in plane.lines:
                    for event in line.events:
                        if self._name(event).startswith(_COLLECTIVES):
                            yield event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6

    def _name(self, event: Any) -> str:
        """Return the name of the instruction; kernels of devices have names of their own."""
        return event.name if self._planes == "/host:CPU" else str(dict(event.stats).get("hlo_op", event.name))


_COMPUTE_TYPES: Final = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_MATRIX_PRECISION: Final = {"fp32": "float32", "tf32": "tensorfloat32"}
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
"""Parts of XLA's messages."""


@final
class JaxBackend(ArrayBackend):
    """One rank's training in JAX."""

    framework, title = "jax", "JAX"
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks

    def open_device(self) -> OpenedDevice:
        """Open the device in the precision of the settings, and join the ranks."""
        # jax.device_get takes 25 us more for each loss.
        self.losses = DeviceLosses(lambda losses: lambda: [float(np.asarray(loss)) for loss in losses])
        threads, device_type, place = self.num_threads(), self.job.device_type, self.place
        os.environ["NPROC"] = str(threads)  # the size of XLA's thread pool on the CPU
        jax.config.update("jax_platforms", device_type)
        precision = self.settings.precision
        if precision in _MATRIX_PRECISION:
            jax.config.update("jax_default_matmul_precision", _MATRIX_PRECISION[precision])
        if place.world_size > 1:
            if device_type == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                os.environ[COORDINATOR],
                num_processes=place.world_size,
                process_id=place.rank,
                local_device_ids=None if device_type == "cpu" else [place.local_rank],
            )
        device = self._own_device = jax.local_devices()[0]
        # One device of each rank, along one axis over which batches are split.
        mesh = self._mesh = Mesh(np.array(jax.devices() if place.world_size > 1 else [device]), ("data",))
        self._whole, self._split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        name = device.device_kind
        if device.platform == "cpu":
            name, precision = processor_name(), "fp32" if precision == "tf32" else precision
        self._dtype = _COMPUTE_TYPES.get(precision, jnp.float32)
        return OpenedDevice(device_type, name, device.local_hardware_id, threads, precision)

    def _replicated(self, tree: Any) -> Any:
        """Return a tree of equal arrays on every rank as arrays replicated over all devices."""
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self._whole), tree)

    def build_model(self) -> str:
        """Build the state before the first step on every device."""
        self._compiled = Step(self.case, self.hooks, self._dtype, self._mesh)
        self._state: State = self._replicated(self._compiled.initial_state())
        return self._compiled.model_class

    def weights(self, *, trained: bool) -> NamedArrays:
        """Return the arrays of the model's parameters, or of its running statistics."""
        part = _local(self._state.parameters if trained else self._state.rest)
        return {name: array for name, array in _host_arrays(part).items() if jnp.issubdtype(array.dtype, jnp.floating)}

    def set_weights(self, arrays: NamedArrays) -> None:
        """Set parameters and running statistics that have a name in ``arrays``."""
        parts = _local({"parameters": self._state.parameters, "rest": self._state.rest})
        parts = {name: _replaced(part, {**_host_arrays(part), **arrays}) for name, part in parts.items()}
        self._state = self._state._replace(**self._replicated(parts))

    def training_outputs(self, batch: Batch) -> Any:
        """Compute a batch as a training step does."""
        return self._compiled.outputs(*_local((self._state.parameters, self._state.rest)), batch)

    def disable_dropout(self) -> None:
        """Trace the model again without dropout."""
        self._compiled.disable_dropout()

    def build_training(self) -> None:
        """Prepare the tracing of steps; the optimizer's state is part of the state."""
        if self.world_size > 1:
            self.own_part_unknown = "no step was traced: that may cost 0.5 % of the time, which was too short"
            self.tracer = StepTracer(self._step, self.synchronize, self._own_device.platform, self.log)

    def compute_type(self) -> str:
        """Return the type of the layers' matrix products."""
        return str(jnp.dtype(self._dtype).name)

    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the versions of JAX, Flax and Optax."""
        return jax.__version__, {"flax": flax.__version__, "optax": optax.__version__}

    def to_device(self, batch: Arrays) -> Any:
        """Return this rank's batch as its part of the batch of all ranks."""
        if self.world_size == 1:  # a call copies them; device_put, and an array of all ranks, take 0.1 ms of Python
            return batch
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(self._split, array), batch)

    def call_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Call the compiled step, which calls the hook while it is traced."""
        return self.take_step(batches, learning_rate)

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Take one optimizer step without waiting for the device."""
        self._state, loss = self._compiled.take(self._state, np.float32(learning_rate), batches)
        return loss if self.world_size == 1 else loss.addressable_data(0)

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Evaluate a batch with this rank's copy of the state."""
        parameters, rest = _local((self._state.parameters, self._state.rest))
        sums: Mapping[str, Any] = self._compiled.sums(parameters, rest, batch)
        return sums

    def state(self) -> NamedArrays:
        """Return the state on the host."""
        return _host_arrays(_local(self._state))

    def set_state(self, arrays: NamedArrays) -> None:
        """Copy the state to every device."""
        self._state = self._replicated(_replaced(self._state, arrays))

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self._state)

    def _reduced(self, values: list[float], reduce: Callable[..., jax.Array]) -> Callable[[], list[float]]:
        """Start a reduction of each value over all ranks in double precision; the returned function waits for it."""
        with jax.enable_x64(True):
            mine = jax.make_array_from_process_local_data(self._split, np.array([values], np.float64))
            joint = jax.jit(lambda array: reduce(array, axis=0), out_shardings=self._whole)(mine)
        return lambda: [float(value) for value in np.asarray(joint.addressable_data(0))]

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum over all ranks."""
        return self._reduced(values, jnp.max)

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        return self._reduced(values, jnp.mean)() if self.world_size > 1 and values else values

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where JAX does not count."""
        statistics = None if self._device is None else self._own_device.memory_stats()
        return None if not statistics else float(statistics["peak_bytes_in_use"]) / 2**20

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether XLA could not allocate memory."""
        return any(part in str(error) for part in _OUT_OF_MEMORY)

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks."""
        if together and self.world_size > 1:
            jax.distributed.shutdown()


open_backend = JaxBackend


def _local(tree: Any) -> Any:
    """Return this rank's copy of replicated arrays."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def _host_arrays(state: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a nested state by their path, on the host; random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_dotted_name(path): np.array(_data(leaf)) for path, leaf in leaves}


def _replaced(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return ``state`` with the values of :func:`_host_arrays`.

    Raises:
        KeyError: an array is missing.
        ValueError: an array has another shape.
    """

    def value(path: Any, leaf: Any) -> Any:
        array, expected = arrays[_dotted_name(path)], _data(leaf)
        if array.shape != expected.shape:
            raise ValueError(f"{_dotted_name(path)} has shape {array.shape}, not {expected.shape}")
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if expected is not leaf else array

    return jax.tree_util.tree_map_with_path(value, state)


def _dotted_name(path: Any) -> str:
    """Return a path as a dotted name, for example ``blocks.0.conv1.kernel``."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
