"""The training backend of JAX: data parallel over all devices of the job, one process per device.

XLA compiles the exchange of gradients into the step, so that no mark on the host separates it from computation: single
steps are traced with JAX's profiler, and the rest of a step without its collectives is the rank's own part.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accelmark.frameworks.array_backend import ArrayBackend, NamedArrays, outputs_of_loss
from accelmark.frameworks.jax import hooks, layers
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.errors import RequestError
from accelmark.spec.log.events import Event, TracedStep
from accelmark.spec.log.perflog import EventLog
from accelmark.train.batches import Arrays
from accelmark.train.case import ArrayCase, Batch
from accelmark.train.loop.contract import LossReader
from accelmark.train.loop.window import covered


class State(NamedTuple):
    """Everything that a step changes, as dictionaries of arrays: each of Flax's variables takes JAX some us a call."""

    parameters: Any
    rest: Any
    """The model's other variables: running statistics, random keys."""
    moments: Any
    scaler: DynamicScale | None


class Step:
    """Compiled functions of a case's model and optimizer; nothing is computed on the host."""

    def __init__(self, case: ArrayCase, hooks: Any, dtype: Any, mesh: Mesh) -> None:
        """``dtype`` is that of matrix products; ``mesh`` has the ranks' devices along one axis."""
        self._case, self._hooks, settings = case, hooks, case.settings
        self._clip_norm = settings.gradient_clip_norm
        self._axis: Any = mesh.axis_names[0] if mesh.size > 1 else None
        self._seed, self._dtype, self._precision = settings.seed, dtype, settings.precision
        self._optimizer = hooks.create_optimizer()
        self._abstract = nnx.eval_shape(self._model)
        self.model_class = type(self._abstract).__name__
        if settings.activation_checkpointing == "full":
            modules = (module for _, module in nnx.iter_modules(self._abstract))
            blocks = [module for module in modules if getattr(module, "is_block", False)]
            if not blocks:
                problem = f"{self.model_class} has no blocks whose activations can be recomputed"
                raise RequestError(f"{problem}: set activation_checkpointing=off")
            for block in blocks:
                block.recomputes = True
        self._graph = nnx.graphdef(self._abstract)
        take: Any = partial(hooks.train_step, self)
        if self._axis is not None:
            whole, split = PartitionSpec(), PartitionSpec(self._axis)
            take = jax.shard_map(
                take, mesh=mesh, in_specs=(whole, whole, split), out_specs=(whole, whole), check_vma=False
            )
        self.take = jax.jit(take, donate_argnums=0)
        """``take(state, learning rate, batches) -> (state, loss)``; ``state`` may not be used again."""
        self.sums = jax.jit(self._sums)
        self.outputs = jax.jit(self._outputs)

    def initial_state(self) -> State:
        """Return the state before the first step, on the default device."""
        parameters, rest = jax.jit(lambda: _split(self._model()))()
        scaler = DynamicScale() if self._precision == "fp16" else None
        return State(parameters, rest, self._optimizer.init(parameters), scaler)

    def disable_dropout(self) -> None:
        """Let all values through dropout; only before the first step."""
        for _, module in nnx.iter_modules(self._abstract):
            if isinstance(module, nnx.Dropout):
                module.rate = 0.0
        self._graph = nnx.graphdef(self._abstract)

    def loss(self, parameters: Any, rest: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """Return the loss of a training batch, and the model's other variables after it."""
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.train()
        loss = self._case.loss(model, batch)
        return loss, _split(model)[1]

    def _model(self) -> nnx.Module:
        with layers.building(self._seed, self._dtype):
            model: nnx.Module = self._hooks.convert_model(self._case.build_model())
        return model

    def take_step(self, state: State, rate: jax.Array, batches: list[Batch]) -> tuple[State, jax.Array]:
        """Apply the mean of all ranks' gradients, clipped; each of several ranks has its own batches."""
        parameters, rest, moments, scaler = state
        if self._axis is not None:  # random keys of this rank's batches
            index = jax.lax.axis_index(self._axis)
            rest = jax.tree.map(lambda leaf: jax.random.fold_in(leaf, index) if _is_key(leaf) else leaf, rest)
        total, gradients, finite = jnp.zeros(()), None, jnp.array(True)
        for batch in batches:
            if scaler is None:
                (loss, rest), summed = jax.value_and_grad(self.loss, has_aux=True)(parameters, rest, batch)
            else:
                # The mean over the ranks is part of it, so that all ranks agree on the next scale.
                scaled = scaler.value_and_grad(self.loss, has_aux=True, axis_name=self._axis)(parameters, rest, batch)
                scaler, is_finite, (loss, rest), summed = scaled
                finite &= is_finite
            total += loss / len(batches)
            summed = jax.tree.map(lambda gradient: gradient / len(batches), summed)
            gradients = summed if gradients is None else jax.tree.map(jnp.add, gradients, summed)
        if self._axis is not None:

            def joint(old: Any, new: Any) -> Any:
                """Return the mean of all ranks' running statistics, or the key that all ranks share."""
                if _is_key(old):
                    return old
                return jax.lax.pmean(new, self._axis) if jnp.issubdtype(new.dtype, jnp.floating) else new

            gradients = jax.lax.pmean(gradients, self._axis) if scaler is None else gradients
            total, rest = jax.lax.pmean(total, self._axis), jax.tree.map(joint, state.rest, rest)
        if self._clip_norm is not None:
            factor = jnp.minimum(1.0, self._clip_norm / (optax.global_norm(gradients) + 1e-6))
            gradients = jax.tree.map(lambda gradient: gradient * factor, gradients)
        steps, new_moments = self._optimizer.update(gradients, moments, parameters)
        new_parameters = jax.tree.map(lambda parameter, step: parameter - rate * step, parameters, steps)
        if scaler is not None:  # a step whose scaled gradients overflowed is skipped
            keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
            new_parameters = jax.tree.map(keep, new_parameters, parameters)
            new_moments = jax.tree.map(keep, new_moments, moments)
        return State(new_parameters, rest, new_moments, scaler), total

    def _sums(self, parameters: Any, rest: Any, batch: Batch) -> Any:
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.eval()
        return self._case.eval_sums(model, batch)

    def _outputs(self, parameters: Any, rest: Any, batch: Batch) -> Any:
        model = nnx.merge(self._graph, parameters, rest, copy=True)
        model.train()
        return jax.tree.leaves(outputs_of_loss(self._case, model, batch))[0]


def _split(model: nnx.Module) -> tuple[Any, Any]:
    parameters, rest = nnx.split(model, nnx.Param, ...)[1:]
    return nnx.to_pure_dict(parameters), nnx.to_pure_dict(rest)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


_COLLECTIVES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class StepTracer:
    """Traces steps; see ``tracer`` of :class:`accelmark.train.loop.contract.Backend`."""

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
        for file in directory.rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith(self._planes):
                    continue
                for line in plane.lines:
                    for event in line.events:
                        name = event.name
                        if self._planes != "/host:CPU":  # kernels of devices have names of their own
                            name = str(dict(event.stats).get("hlo_op", name))
                        if name.startswith(_COLLECTIVES):
                            yield event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6


_COMPUTE_TYPES: Final = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_MATRIX_PRECISION: Final = {"fp32": "float32", "tf32": "tensorfloat32"}


class JaxBackend(ArrayBackend):
    """One rank's training in JAX."""

    framework, title = "jax", "JAX"
    libraries = jax, flax, optax
    traces_hook = True
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks

    def open_device(self) -> None:
        # jax.device_get takes 25 us more for each loss.
        self.losses = LossReader(lambda losses: lambda: [float(np.asarray(loss)) for loss in losses])
        device_type, place = self.job.device_type, self.place
        os.environ["NPROC"] = str(self.threads)  # the size of XLA's thread pool on the CPU
        jax.config.update("jax_platforms", device_type)
        if self.precision in _MATRIX_PRECISION:
            jax.config.update("jax_default_matmul_precision", _MATRIX_PRECISION[self.precision])
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
        if device.platform != "cpu":
            self.device_name = device.device_kind
        elif self.precision == "tf32":
            self.precision = "fp32"
        self.device_index = device.local_hardware_id
        self._dtype = _COMPUTE_TYPES.get(self.precision, jnp.float32)

    def _replicated(self, tree: Any) -> Any:
        """Return a tree of equal arrays on every rank as arrays replicated over all devices."""
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self._whole), tree)

    def build_model(self) -> str:
        self._compiled = Step(self.case, self.hooks, self._dtype, self._mesh)
        self._state: State = self._replicated(self._compiled.initial_state())
        return self._compiled.model_class

    def weights(self, *, trained: bool) -> NamedArrays:
        part = _local(self._state.parameters if trained else self._state.rest)
        return {name: array for name, array in _host_arrays(part).items() if jnp.issubdtype(array.dtype, jnp.floating)}

    def set_weights(self, arrays: NamedArrays) -> None:
        parts = _local({"parameters": self._state.parameters, "rest": self._state.rest})
        parts = {name: _replaced(part, {**_host_arrays(part), **arrays}) for name, part in parts.items()}
        self._state = self._state._replace(**self._replicated(parts))

    def training_outputs(self, batch: Batch) -> Any:
        return self._compiled.outputs(*_local((self._state.parameters, self._state.rest)), batch)

    def disable_dropout(self) -> None:
        """Trace the model again without dropout."""
        self._compiled.disable_dropout()

    def build_training(self) -> None:
        """Prepare the tracing of steps; the optimizer's state is part of the state."""
        if self.world_size > 1:
            self.own_part_unknown = "no step was traced: that may cost 0.5 % of the time, which was too short"
            self.tracer = StepTracer(self.step, self.synchronize, self._own_device.platform, self.log)

    def to_device(self, batch: Arrays) -> Any:
        """Return this rank's batch as its part of the batch of all ranks."""
        if self.world_size == 1:  # a call copies them; device_put, and an array of all ranks, take 0.1 ms of Python
            return batch
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(self._split, array), batch)

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        self._state, loss = self._compiled.take(self._state, np.float32(learning_rate), batches)
        return loss if self.world_size == 1 else loss.addressable_data(0)

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Evaluate a batch with this rank's copy of the state."""
        parameters, rest = _local((self._state.parameters, self._state.rest))
        sums: Mapping[str, Any] = self._compiled.sums(parameters, rest, batch)
        return sums

    def state(self) -> NamedArrays:
        return _host_arrays(_local(self._state))

    def set_state(self, arrays: NamedArrays) -> None:
        self._state = self._replicated(_replaced(self._state, arrays))

    def synchronize(self) -> None:
        jax.block_until_ready(self._state)

    def gather(self, values: list[float]) -> Callable[[], np.ndarray]:
        with jax.enable_x64(True):
            own = jax.make_array_from_process_local_data(self._split, np.array([values], np.float64))
            joint = jax.jit(lambda array: array, out_shardings=self._whole)(own)
        return lambda: np.asarray(joint.addressable_data(0))

    def peak_bytes(self) -> float | None:
        statistics = self._own_device.memory_stats()
        return float(statistics["peak_bytes_in_use"]) if statistics else None

    def close(self, *, together: bool) -> None:
        if together and self.world_size > 1:
            jax.distributed.shutdown()


open_backend = JaxBackend


def _local(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def _host_arrays(state: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a nested state by their path, on the host; random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_dotted_name(path): np.array(_data(leaf)) for path, leaf in leaves}


def _replaced(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return ``state`` with the values of :func:`_host_arrays`."""

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
