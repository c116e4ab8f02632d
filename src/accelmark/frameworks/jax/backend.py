"""The training backend of JAX: data parallel over all devices of the job, one process per device."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from accelmark.frameworks.jax.arrays import from_arrays, to_arrays
from accelmark.frameworks.jax.case import TrainCase
from accelmark.frameworks.jax.comparison import Comparison
from accelmark.frameworks.jax.counting import count_flops
from accelmark.frameworks.jax.devices import Devices
from accelmark.frameworks.jax.optimizers import OPTIMIZER_CLASSES
from accelmark.frameworks.jax.step import State, Step
from accelmark.spec.errors import AccelmarkError, DataError, RequestError, first_line
from accelmark.spec.events import EndReason, Event, Started
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.perflog import EventLog
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.checkpoints import ArrayCheckpoints, structure_hash, unreadable, update_squares, weights_hash
from accelmark.train.loop.contract import Backend, LossReader, Progress, Replay, StepClock
from accelmark.train.loop.ends import total_steps
from accelmark.train.schedules import learning_rate_factor, needs_length
from accelmark.train.tasks.array_case import Batches
from accelmark.train.tasks.arrays import SyntheticBatches

_COMPUTE_TYPES: Final = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
_COUNTED_SAMPLES: Final = 2
_OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
"""Parts of XLA's messages."""


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
        self._job, self._settings, self._place, self._log = job, train.settings, place, log
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
            folder = self._job.extern.path / "extern"
            raise RequestError(f"{folder}: the JAX backend has no hooks that a vendor can replace")
        self._devices = devices = Devices(self._job.device_type, settings, place)
        precision = settings.precision
        if precision == "tf32" and devices.own.platform == "cpu":
            precision = "fp32"
            self._log.event(Event.WARNING, {"message": "tf32 is not available on the CPU; computing in fp32"})
        self._log.event(Event.LAUNCH_TRAINING, {"hooks": {}})
        case = self._case = self._open_case()
        self._open_data(case)
        start = time.monotonic()
        self._compiled = step = Step(case, settings, devices.mesh)
        state = step.initial_state()
        arrays = to_arrays(state.parameters)
        self._log.event(Event.CONVERT_MODEL, {"duration_s": round(time.monotonic() - start, 6)})
        self.num_parameters = sum(array.size for array in arrays.values())
        if place.rank == 0:
            self._count(state)
        self._state: State = devices.replicated(state)
        self._factor = learning_rate_factor(settings.schedule, self._schedule_length(), self.steps_per_epoch)
        self._steps_done = 0
        self._checkpoints = ArrayCheckpoints(self._job.checkpoint_dir, place)
        structure, optimizer = structure_hash(arrays), OPTIMIZER_CLASSES[settings.optimizer.name]
        return Started(
            framework="jax",
            framework_version=jax.__version__,
            device_type=self._job.device_type,
            device_name=devices.name or None,
            device_index=devices.own.local_hardware_id,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=devices.threads,
            seed=settings.seed,
            precision=precision,
            model_class=step.model_class,
            num_parameters=self.num_parameters,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            checkpoint_hash=weights_hash(arrays) if place.rank == 0 else None,
            optimizer_class=optimizer,
            standard_optimizer_class=optimizer,
            compute_type=jnp.dtype(case.dtype).name,
            train_samples=self._batches.num_samples,
            eval_samples=None if self._eval_batches is None else self._eval_batches.num_samples,
            hooks={},
            library_versions={"flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__},
        )

    def _open_case(self) -> TrainCase:
        module = folder_module(self._job.case, "jax")
        case_class = getattr(module, "Case", None)
        if not (isinstance(case_class, type) and issubclass(case_class, TrainCase)):
            raise RequestError(f"{module.__file__}: has no class Case(accelmark.frameworks.jax.case.TrainCase)")
        dtype = _COMPUTE_TYPES.get(self._settings.precision, jnp.float32)
        return case_class(self._settings, self._job.data_dirs, self._place, dtype)

    def _open_data(self, case: TrainCase) -> None:
        settings = self._settings
        self._eval_batches: Batches | None = None
        if settings.loader.synthetic:
            batch = case.synthetic_batch(settings.batch_size)
            self._batches: Batches = SyntheticBatches(batch, settings, self.world_size)
        else:
            self._batches, self._eval_batches = case.train_batches(), case.eval_batches()
        per_round = settings.batch_size * self.world_size
        self.samples_per_step = per_round * settings.gradient_accumulation_steps
        self.steps_per_epoch = self._batches.num_samples // per_round // settings.gradient_accumulation_steps
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training data has {self._batches.num_samples} samples, fewer than the {self.samples_per_step} of "
                "one optimizer step over all ranks; lower batch_size or gradient_accumulation_steps"
            )

    def _schedule_length(self) -> int:
        schedule = self._settings.schedule
        length = total_steps(self._settings.end, self.steps_per_epoch, self.samples_per_step)
        if length is None and needs_length(schedule):
            raise RequestError(
                f"schedule.{schedule.name} needs the number of steps: give end.max_steps, max_epochs or max_samples in "
                "addition to max_duration_s"
            )
        return length if length is not None else self.steps_per_epoch

    def _count(self, state: State) -> None:
        """Count the FLOPs of a sample, and take the case's formula."""
        batch = self._case.synthetic_batch(_COUNTED_SAMPLES)
        arguments = (state.parameters, state.rest, batch)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        gradient = jax.grad(lambda *given: self._compiled.loss(*given)[0])
        self.flops_per_sample = count_flops(gradient, *shapes) / _COUNTED_SAMPLES
        self.flops_per_sample_formula = self._case.flops_per_sample()

    def _step(self, batches: list[Any]) -> Any:
        """Take one optimizer step without waiting for the device."""
        self._state, loss = self._compiled.take(self._state, np.float32(self.learning_rate()), batches)
        self._steps_done += 1
        return loss.addressable_data(0)

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._settings.optimizer.lr * self._factor(self._steps_done)

    def restore(self) -> Progress | None:
        """Load the newest checkpoint if the job resumes."""
        newest = self._checkpoints.newest() if self._job.resume else None
        return None if newest is None else self._load(newest)

    def _load(self, checkpoint: Path) -> Progress:
        arrays, progress = self._checkpoints.load(checkpoint)
        try:
            loaded = from_arrays(self._state, arrays)
        except (KeyError, ValueError) as error:
            raise unreadable(checkpoint, error) from error
        self._state = self._devices.replicated(loaded)
        self._steps_done = progress.global_steps
        return progress

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each step on the device; the next step's are copied while one is computed."""
        self._phase = f"epoch {epoch}"
        count = self._settings.gradient_accumulation_steps
        batches = self._batches.epoch(epoch, skip_steps * count)
        ahead: list[Any] | None = None
        while len(chosen := list(islice(batches, count))) == count:
            copied = [self._devices.batch(batch) for batch in chosen]
            if ahead is not None:
                yield ahead
            ahead = copied
        if ahead is not None:
            yield ahead

    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data, with a checkpoint's weights if one is given."""
        if self._eval_batches is None:
            raise RequestError("there is no evaluation on synthetic data")
        if weights is not None:
            self._load(weights)
        parameters, rest = self._devices.local((self._state.parameters, self._state.rest))
        found: dict[str, list[Any]] = {}
        for batch in islice(self._eval_batches.epoch(0), self._settings.evaluate.max_batches):
            for name, value in self._compiled.sums(parameters, rest, batch).items():
                found.setdefault(name, []).append(value)
        if not found:
            raise DataError("the case's eval_batches yielded nothing; check the evaluation data")
        sums = {name: math.fsum(map(float, jax.device_get(values))) for name, values in sorted(found.items())}
        joint = zip(sums, self._devices.mean(list(sums.values())), strict=True)
        return self._case.metrics({name: value * self.world_size for name, value in joint})

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        """Take steps from a checkpoint or the initial weights, and compare the weights with those of ``end``."""
        progress = Progress() if start is None else self._load(start)
        before = to_arrays(self._devices.local(self._state.parameters))
        replay = Replay(progress.global_steps + 1)
        epoch, skipped_steps = divmod(progress.global_steps, self.steps_per_epoch)
        while len(replay.losses) < num_steps:
            if skipped_steps == self.steps_per_epoch:
                epoch, skipped_steps = epoch + 1, 0
            for batches in islice(self.open_epoch(epoch, skipped_steps), num_steps - len(replay.losses)):
                replay.losses.append(float(self.step(batches)))
                skipped_steps += 1
        if end is not None:
            replayed = to_arrays(self._devices.local(self._state.parameters))
            self._load(end)
            replay.update = update_squares(before, replayed, to_arrays(self._devices.local(self._state.parameters)))
        return replay

    def save(self, progress: Progress) -> str:
        """Write a checkpoint (rank 0) and return its name."""
        name = f"step{progress.global_steps:09d}"
        if self._place.rank == 0:
            arrays = to_arrays(self._devices.local(self._state))
            name = self._checkpoints.save(arrays, progress)
        self._devices.mean([0.0])  # no rank goes on before the checkpoint is complete
        return name

    def comparison(self) -> Comparison:
        """Return the model as named arrays, to compare its first steps with another framework's."""

        def write(state: State) -> None:
            self._state = state

        return Comparison(self._case, self._compiled, self._devices, lambda: self._state, write)

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
        return self._devices.peak_memory_mib()

    def trained(self) -> None:
        """Log nothing: everything is known before."""

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Distinguish out-of-memory from other errors, and say what to do."""
        if isinstance(error, MemoryError) or any(part in str(error) for part in _OUT_OF_MEMORY):
            settings = self._settings
            return "out_of_memory", (
                f"out of memory on {self._job.device_type} in {self._phase}, with batch_size {settings.batch_size} and "
                f"precision {settings.precision}; try a smaller batch_size with more gradient_accumulation_steps, or "
                f"precision bf16 ({first_line(error)})"
            )
        if isinstance(error, AccelmarkError):
            return "error", str(error)
        return "error", f"{type(error).__name__}: {first_line(error)}"

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks."""
        if together:
            self._devices.close()
