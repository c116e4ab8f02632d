"""The training backend of JAX: data parallel over all devices of the job, one process per device."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accelmark.frameworks.jax.case import TrainCase
from accelmark.frameworks.jax.checkpoint import Checkpoints, to_arrays
from accelmark.frameworks.jax.counting import count_flops
from accelmark.frameworks.jax.launch import COORDINATOR
from accelmark.frameworks.jax.optimizers import OPTIMIZER_CLASSES, direction
from accelmark.spec.errors import AccelmarkError, DataError, RequestError, first_line
from accelmark.spec.events import EndReason, Event, Inspected, Started
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.perflog import EventLog
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Backend, LossReader, Progress, Replay, StepClock
from accelmark.train.loop.ends import total_steps
from accelmark.train.schedules import learning_rate_factor
from accelmark.train.tasks.arrays import SyntheticBatches

_COMPUTE_TYPES: Final = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_DATA: Final = "data"
_COUNTED_SAMPLES: Final = 2


def open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend:
    """Return the backend of a rank."""
    return JaxBackend(job, train, place, log)


@final
class Losses:
    """Losses stay on the device until a window is read."""

    def keep(self, loss: Any) -> Any:
        """Return the loss."""
        return loss

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Return a function that waits for the losses."""
        return lambda: [float(loss) for loss in jax.device_get(kept)]


@final
class JaxBackend:
    """One rank's training in JAX; see :class:`accelmark.train.loop.contract.Backend`."""

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        self._job, self._train, self._settings, self._place, self._log = job, train, train.settings, place, log
        self._phase = "initialisation"
        self.world_size = place.world_size
        self.immediate = False
        self.clock: StepClock | None = None
        self.losses: LossReader = Losses()
        self.num_parameters = 0
        self.flops_per_sample: float | None = None
        self.flops_per_sample_formula: float | None = None
        self.step: Callable[[list[Any]], Any] = self._step

    def prepare(self) -> Started:
        """Join the ranks, and build data, model and optimizer."""
        settings, place = self._settings, self._place
        if self._job.extern is not None and (self._job.extern.path / "extern").is_dir():
            raise RequestError(
                f"{self._job.extern.path / 'extern'}: the JAX backend has no hooks that a vendor can replace"
            )
        device = self._join()
        self._mesh = Mesh(np.array(jax.devices()), (_DATA,))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._split = NamedSharding(self._mesh, PartitionSpec(_DATA))
        self._log.event(Event.LAUNCH_TRAINING, {"hooks": {}})
        case = self._case = self._open_case()
        self._open_data(case)
        start = time.monotonic()
        abstract = nnx.eval_shape(self._initial_model)
        self._model = nnx.graphdef(abstract)
        parameters, rest = jax.jit(lambda: nnx.split(self._initial_model(), nnx.Param, ...)[1:])()
        arrays = to_arrays(parameters)
        self._log.event(Event.CONVERT_MODEL, {"duration_s": round(time.monotonic() - start, 6)})
        self.num_parameters = sum(array.size for array in arrays.values())
        if place.rank == 0:
            self._count(parameters, rest)
        self._optimizer = direction(settings.optimizer)
        scaler = DynamicScale() if settings.precision == "fp16" else None
        self._state = self._spread((parameters, rest, self._optimizer.init(parameters), scaler))
        self._factor = learning_rate_factor(settings.schedule, self._schedule_length(), self.steps_per_epoch)
        self._steps_done = 0
        self._take_step = jax.jit(self._traced_step, donate_argnums=0)
        self._sums = jax.jit(self._traced_sums)
        self._checkpoints = Checkpoints(self._job.checkpoint_dir, settings.checkpoint.keep, place)
        structure = hashlib.sha256(
            "".join(f"{name} {array.shape} {array.dtype}\n" for name, array in sorted(arrays.items())).encode()
        ).hexdigest()
        optimizer = OPTIMIZER_CLASSES[settings.optimizer.name]
        return Started(
            framework="jax",
            framework_version=jax.__version__,
            device_type=self._job.device_type,
            device_name=device.device_kind if device.platform != "cpu" else platform.processor() or platform.machine(),
            device_index=device.local_hardware_id,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=self._threads,
            seed=settings.seed,
            precision=settings.precision,
            model_class=type(abstract).__name__,
            num_parameters=self.num_parameters,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            standard_num_parameters=self.num_parameters,
            checkpoint_hash=_weights_hash(arrays) if place.rank == 0 else None,
            optimizer_class=optimizer,
            standard_optimizer_class=optimizer,
            compute_type=jnp.dtype(case.dtype).name,
            train_samples=self._batches.num_samples,
            eval_samples=None if self._eval_batches is None else self._eval_batches.num_samples,
            hooks={},
            library_versions={"flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__},
        )

    def _join(self) -> Any:
        """Set threads, precision and device before JAX opens it, and join the other processes."""
        place, settings = self._place, self._settings
        cores = len(os.sched_getaffinity(0))
        self._threads = settings.threads or max(1, cores // place.local_world_size)
        os.environ["NPROC"] = str(self._threads)  # the size of XLA's thread pool on the CPU
        device_type = self._job.device_type
        jax.config.update("jax_platforms", device_type)
        matrix_precision = {"fp32": "float32", "tf32": "tensorfloat32"}.get(settings.precision)
        if matrix_precision is not None:
            jax.config.update("jax_default_matmul_precision", matrix_precision)
        if place.world_size > 1:
            if device_type == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                os.environ[COORDINATOR],
                num_processes=place.world_size,
                process_id=place.rank,
                local_device_ids=None if device_type == "cpu" else [place.local_rank],
            )
        elif device_type != "cpu":
            jax.config.update("jax_default_device", jax.local_devices()[place.local_rank])
        return jax.local_devices()[0]

    def _open_case(self) -> TrainCase:
        module = folder_module(self._job.case, "jax")
        case_class = getattr(module, "Case", None)
        if not (isinstance(case_class, type) and issubclass(case_class, TrainCase)):
            raise RequestError(f"{module.__file__}: has no class Case(accelmark.frameworks.jax.case.TrainCase)")
        dtype = _COMPUTE_TYPES.get(self._settings.precision, jnp.float32)
        return case_class(self._settings, self._job.data_dirs, self._place, dtype)

    def _initial_model(self) -> nnx.Module:
        return self._case.build_model(nnx.Rngs(self._settings.seed))

    def _open_data(self, case: TrainCase) -> None:
        settings = self._settings
        accumulation = settings.gradient_accumulation_steps
        if settings.loader.synthetic:
            batch = case.synthetic_batch(settings.batch_size)
            self._batches: Any = SyntheticBatches(batch, settings, self.world_size)
            self._eval_batches = None
        else:
            self._batches, self._eval_batches = case.train_batches(), case.eval_batches()
        per_round = settings.batch_size * self.world_size
        self.samples_per_step = per_round * accumulation
        self.steps_per_epoch = self._batches.num_samples // per_round // accumulation
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training data has {self._batches.num_samples} samples, fewer than the {self.samples_per_step} of "
                "one optimizer step over all ranks; lower batch_size or gradient_accumulation_steps"
            )

    def _schedule_length(self) -> int:
        length = total_steps(self._settings.end, self.steps_per_epoch, self.samples_per_step)
        return 0 if length is None else length

    def _count(self, parameters: Any, rest: Any) -> None:
        """Count the FLOPs of a sample, and take the case's formula."""
        batch = self._case.synthetic_batch(_COUNTED_SAMPLES)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (parameters, rest, batch))
        loss = jax.grad(lambda parameters, rest, batch: self._loss(parameters, rest, batch)[0])
        self.flops_per_sample = count_flops(loss, *shapes) / _COUNTED_SAMPLES
        self.flops_per_sample_formula = self._case.flops_per_sample()

    def _loss(self, parameters: Any, rest: Any, batch: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(self._model, parameters, rest, copy=True)
        model.train()
        loss = self._case.loss(model, batch)
        return loss, nnx.split(model, nnx.Param, ...)[2]

    def _traced_step(self, state: Any, rate: jax.Array, batches: list[Any]) -> tuple[Any, jax.Array]:
        """One optimizer step: the sum of gradients over the batches, clipped, with the optimizer's direction."""
        parameters, rest, moments, scaler = state
        total, gradients, finite = jnp.zeros(()), None, jnp.array(True)
        for batch in batches:
            if scaler is None:
                (loss, rest), found = jax.value_and_grad(self._loss, has_aux=True)(parameters, rest, batch)
            else:
                scaler, is_finite, (loss, rest), found = scaler.value_and_grad(self._loss, has_aux=True)(
                    parameters, rest, batch
                )
                finite &= is_finite
            total += loss / len(batches)
            found = jax.tree.map(lambda gradient: gradient / len(batches), found)
            gradients = found if gradients is None else jax.tree.map(jnp.add, gradients, found)
        limit = self._settings.gradient_clip_norm
        if limit is not None:
            factor = jnp.minimum(1.0, limit / (optax.global_norm(gradients) + 1e-6))
            gradients = jax.tree.map(lambda gradient: gradient * factor, gradients)
        steps, new_moments = self._optimizer.update(gradients, moments, parameters)
        new_parameters = jax.tree.map(lambda parameter, step: parameter - rate * step, parameters, steps)
        if scaler is not None:  # a step whose scaled gradients overflowed is skipped
            keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
            new_parameters = jax.tree.map(keep, new_parameters, parameters)
            new_moments = jax.tree.map(keep, new_moments, moments)
        return (new_parameters, rest, new_moments, scaler), total

    def _traced_sums(self, parameters: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(self._model, parameters, rest, copy=True)
        model.eval()
        return self._case.eval_sums(model, batch)

    def _step(self, batches: list[Any]) -> Any:
        """Take one optimizer step without waiting for the device."""
        self._state, loss = self._take_step(self._state, self._rate(), batches)
        self._steps_done += 1
        return loss.addressable_data(0)

    def _rate(self) -> np.float32:
        return np.float32(self.learning_rate())

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._settings.optimizer.lr * self._factor(self._steps_done)

    def restore(self) -> Progress | None:
        """Load the newest checkpoint if the job resumes."""
        newest = self._checkpoints.newest() if self._job.resume else None
        self._phase = "training"
        return None if newest is None else self._load(newest)

    def _load(self, checkpoint: Path) -> Progress:
        loaded, progress = self._checkpoints.load(checkpoint, self._state)
        self._state = self._spread(loaded)
        self._steps_done = progress.global_steps
        return progress

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each step on the device; the next step's are copied while one is computed."""
        count = self._settings.gradient_accumulation_steps
        batches = self._batches.epoch(epoch, skip_steps * count)
        ahead: list[Any] | None = None
        while len(chosen := list(islice(batches, count))) == count:
            copied = [jax.tree.map(self._shared, batch) for batch in chosen]
            if ahead is not None:
                yield ahead
            ahead = copied
        if ahead is not None:
            yield ahead

    def _shared(self, array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._split, array)

    def _spread(self, tree: Any) -> Any:
        """Return a tree of equal arrays on every rank as arrays replicated over all devices."""
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self._replicated), tree)

    def _local(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)

    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data, with a checkpoint's weights if one is given."""
        if self._eval_batches is None:
            raise RequestError("there is no evaluation on synthetic data")
        if weights is not None:
            self._load(weights)
        parameters, rest = self._local(self._state[:2])
        found: dict[str, list[Any]] = {}
        for batch in islice(self._eval_batches.epoch(0), self._settings.evaluate.max_batches):
            for name, value in self._sums(parameters, rest, batch).items():
                found.setdefault(name, []).append(value)
        sums = {name: math.fsum(map(float, jax.device_get(values))) for name, values in found.items()}
        everywhere = self.mean([sums[name] for name in sorted(sums)])
        return self._case.metrics(
            {name: value * self.world_size for name, value in zip(sorted(sums), everywhere, strict=True)}
        )

    def replay(self, checkpoint: Path, num_steps: int) -> Replay:
        """Restore a checkpoint, and take ``num_steps`` optimizer steps from it."""
        progress = self._load(checkpoint)
        replay = Replay(progress.global_steps + 1, [], [])
        epoch, skipped_steps = progress.epoch, progress.step_in_epoch
        while len(replay.losses) < num_steps:
            if skipped_steps == self.steps_per_epoch:
                epoch, skipped_steps = epoch + 1, 0
            for batches in islice(self.open_epoch(epoch, skipped_steps), num_steps - len(replay.losses)):
                before = to_arrays(self._local(self._state[0]))
                replay.losses.append(float(self.step(batches)))
                after = to_arrays(self._local(self._state[0]))
                squares = (float(np.square(after[name] - before[name], dtype=np.float64).sum()) for name in before)
                replay.update_norms.append(math.sqrt(sum(squares)))
                skipped_steps += 1
        return replay

    def save(self, progress: Progress, *, final: bool = False) -> str:
        """Write a checkpoint (rank 0) and return its name."""
        name = self._checkpoints.save(self._local(self._state), progress, final=final)
        self.mean([0.0])  # no rank goes on before the checkpoint is complete
        return name

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self._state)

    def _over_ranks(self, values: list[float], reduce: Callable[..., jax.Array]) -> jax.Array:
        """Start a reduction over all ranks in double precision."""
        with jax.enable_x64(True):
            mine = np.array([values], np.float64)
            every = jax.make_array_from_process_local_data(self._split, mine)
            return jax.jit(lambda array: reduce(array, axis=0), out_shardings=self._replicated)(every)

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum over all ranks."""
        joint = self._over_ranks(values, jnp.max)
        return lambda: [float(value) for value in np.asarray(joint.addressable_data(0))]

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        if self.world_size == 1 or not values:
            return values
        return [float(value) for value in np.asarray(self._over_ranks(values, jnp.mean).addressable_data(0))]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where JAX does not count."""
        statistics: Mapping[str, int] | None = jax.local_devices()[0].memory_stats()
        return None if not statistics else statistics["peak_bytes_in_use"] / 2**20

    def inspected(self) -> Inspected | None:
        """Return None: no code of a vendor's runs."""
        return None

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Distinguish out-of-memory from other errors, and say what to do."""
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            settings = self._settings
            return "out_of_memory", (
                f"out of memory on {jax.local_devices()[0]} in {self._phase}, with batch_size {settings.batch_size} "
                f"and precision {settings.precision}; try a smaller batch_size with more gradient_accumulation_steps, "
                f"or precision bf16 ({first_line(error)})"
            )
        if isinstance(error, AccelmarkError):
            return "error", str(error)
        return "error", f"{type(error).__name__}: {first_line(error)}"

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks."""
        if self.world_size > 1 and together:
            jax.distributed.shutdown()


def _weights_hash(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes, types and values of all parameters, in order of their names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
