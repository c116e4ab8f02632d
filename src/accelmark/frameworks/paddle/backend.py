"""The training backend of PaddlePaddle: data parallel, one process per device, operations run one by one."""

from __future__ import annotations

import math
import platform as machine
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle.utils import unique_name

from accelmark.frameworks.paddle.case import Batch, TrainCase, case_class
from accelmark.frameworks.paddle.comparison import Comparison
from accelmark.frameworks.paddle.counting import count_flops
from accelmark.frameworks.paddle.optimizers import OPTIMIZER_CLASSES, build_optimizer
from accelmark.frameworks.paddle.platform import (
    DeviceLosses,
    device_name,
    is_out_of_memory,
    join_ranks,
    open_device,
    peak_memory_mib,
    set_precision,
    set_threads,
    summary,
)
from accelmark.spec.errors import AccelmarkError, DataError, RequestError
from accelmark.spec.events import EndReason, Event, Started
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings import TYPE_OF_PRECISION
from accelmark.train.loop.checkpoints import ArrayCheckpoints, structure_hash, unreadable, update_squares, weights_hash
from accelmark.train.loop.clocks import DeviceClock, HostClock, HostLosses
from accelmark.train.loop.contract import Backend, LossReader, Progress, Replay, StepClock
from accelmark.train.loop.ends import total_steps
from accelmark.train.schedules import learning_rate_factor, needs_length
from accelmark.train.tasks.array_case import Batches
from accelmark.train.tasks.arrays import Arrays, SyntheticBatches
from accelmark.train.tasks.shares import seed_of

_COUNTED_SAMPLES: Final = 2
_MOST_COUNTED_PARAMETERS: Final = 100_000_000
"""Limit for counting FLOPs, which takes a forward pass on the CPU or the device before training."""
_MODEL: Final = "model/"
_OPTIMIZER: Final = "optimizer/"
_SCALER: Final = "scaler/"


def open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend:
    """Return the backend of a rank."""
    return PaddleBackend(job, train, place, log)


@final
class PaddleBackend:
    """One rank's training in Paddle; see :class:`accelmark.train.loop.contract.Backend`."""

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        self._job, self._settings, self._place, self._log = job, train.settings, place, log
        self._phase = "initialisation"
        self._device = "cpu"
        self._control: Any = None
        self._eval_batches: Batches | None = None
        self._steps_done = 0
        self.world_size = place.world_size
        self.immediate = True
        self.clock: StepClock | None = HostClock()
        self.losses: LossReader = HostLosses()
        self.num_parameters = 0
        self.flops_per_sample: float | None = None
        self.flops_per_sample_formula: float | None = None
        self.step: Callable[[list[Any]], Any] = self._step

    def prepare(self) -> Started:
        """Open the device, join the ranks, and build data, model and optimizer."""
        settings, place, log = self._settings, self._place, self._log
        if self._job.extern is not None and (self._job.extern.path / "extern").is_dir():
            raise RequestError(f"{self._job.extern.path / 'extern'}: the Paddle backend has no hooks to replace")
        make_case = case_class(self._job.case)
        self._device = device = open_device(self._job, place)
        threads = set_threads(settings, place)
        self._precision = precision = set_precision(settings.precision, device)
        if precision != settings.precision:
            log.event(Event.WARNING, {"message": f"Paddle has no {settings.precision} on {device}; computing in fp32"})
        if device != "cpu":
            self.immediate = False
            self.clock = DeviceClock(lambda: paddle.device.Event(enable_timing=True))
            self.losses = DeviceLosses()
        self._control = join_ranks(self._job, place)
        log.event(Event.LAUNCH_TRAINING, {"hooks": {}})
        case = self._case = make_case(settings, self._job.data_dirs, place)
        self._batches = self._open_data(case)
        model = self._timed(Event.CONVERT_MODEL, self._build_model)
        # Without the running statistics, which are parameters too in Paddle.
        named = {name: each.numpy() for name, each in model.named_parameters() if not each.stop_gradient}
        self.num_parameters = sum(array.size for array in named.values())
        self._count(case, model)
        self._wrapped = self._timed(Event.MODEL_TO_DDP, lambda: self._wrap(model))
        self._optimizer = self._timed(
            Event.CREATE_OPTIMIZER, lambda: build_optimizer(model, settings.optimizer, settings.gradient_clip_norm)
        )
        self._scaler = paddle.amp.GradScaler() if precision == "fp16" else None
        self._factor = learning_rate_factor(settings.schedule, self._schedule_length(), self.steps_per_epoch)
        self._checkpoints = ArrayCheckpoints(self._job.checkpoint_dir, place)
        if not settings.loader.synthetic:
            self._eval_batches = self._timed(Event.INIT_EVALUATION, case.eval_batches)
        structure, optimizer = structure_hash(named), OPTIMIZER_CLASSES[settings.optimizer.name]
        return Started(
            framework="paddle",
            framework_version=paddle.__version__,
            device_type=self._job.device_type,
            device_name=device_name(device) or machine.processor() or machine.machine() or None,
            device_index=None if device == "cpu" else place.local_rank,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=threads,
            seed=settings.seed,
            precision=precision,
            model_class=type(model).__name__,
            num_parameters=self.num_parameters,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            checkpoint_hash=weights_hash(named) if place.rank == 0 else None,
            optimizer_class=optimizer,
            standard_optimizer_class=optimizer,
            compute_type=self._compute_type(),
            train_samples=self._batches.num_samples,
            eval_samples=None if self._eval_batches is None else self._eval_batches.num_samples,
            hooks={},
            library_versions={"python": machine.python_version(), "numpy": np.__version__},
        )

    def _open_data(self, case: TrainCase) -> Batches:
        settings = self._settings
        if settings.loader.synthetic:
            batch = case.synthetic_batch(settings.batch_size)
            batches: Batches = SyntheticBatches(batch, settings, self.world_size)
        else:
            batches = case.train_batches()
        per_round = settings.batch_size * self.world_size
        self.samples_per_step = per_round * settings.gradient_accumulation_steps
        self.steps_per_epoch = batches.num_samples // per_round // settings.gradient_accumulation_steps
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training data has {batches.num_samples} samples, fewer than the {self.samples_per_step} of one "
                "optimizer step over all ranks; lower batch_size or gradient_accumulation_steps"
            )
        return batches

    def _build_model(self) -> nn.Layer:
        """Build the model with the same weights on every rank; its parameters are numbered from 0."""
        np.random.seed(self._settings.seed % 2**32)
        paddle.seed(self._settings.seed)
        with unique_name.guard():
            model = self._model = self._case.build_model()
        model.train()
        layers = model.sublayers(include_self=True)
        self._draws_numbers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in layers)
        return model

    def _count(self, case: TrainCase, model: nn.Layer) -> None:
        """Count the FLOPs of a sample on rank 0, and take the case's formula."""
        self.flops_per_sample_formula = case.flops_per_sample()
        if self._place.rank != 0:
            return
        if self.num_parameters > _MOST_COUNTED_PARAMETERS:
            reason = f"only for models of at most {_MOST_COUNTED_PARAMETERS:.0e} parameters"
            self._log.event(Event.WARNING, {"message": f"FLOPs per sample were not counted: {reason}"})
            return
        batch = self._to_device(case.synthetic_batch(_COUNTED_SAMPLES))
        self.flops_per_sample = count_flops(model, lambda: case.loss(model, batch)) / _COUNTED_SAMPLES

    def _wrap(self, model: nn.Layer) -> nn.Layer:
        """Checkpoint activations of the case's blocks if requested, and reduce gradients over several ranks.

        ``DataParallel`` reduces gradients during the backward pass, but not those of recomputed blocks, whose backward
        pass is nested: with checkpointing, gradients are reduced after it.
        """
        recomputes = self._settings.activation_checkpointing == "full"
        self._reduces_after = recomputes and self.world_size > 1
        if recomputes:
            for layer in model.sublayers():
                if type(layer).__name__ == self._case.block_class:
                    layer.forward = partial(recompute, layer.forward)
        return model if self.world_size == 1 else paddle.DataParallel(model)

    def _timed(self, event: Event, build: Callable[[], Any]) -> Any:
        start = time.monotonic()
        built = build()
        self._log.event(event, {"duration_s": round(time.monotonic() - start, 6)})
        return built

    def _schedule_length(self) -> int:
        settings = self._settings
        length = total_steps(settings.end, self.steps_per_epoch, self.samples_per_step)
        if length is None and needs_length(settings.schedule):
            raise RequestError(
                f"schedule.{settings.schedule.name} needs the number of steps: give end.max_steps, max_epochs or "
                "max_samples in addition to max_duration_s"
            )
        return length if length is not None else self.steps_per_epoch

    def _autocast(self) -> Any:
        if self._precision not in ("bf16", "fp16"):
            return nullcontext()
        return paddle.amp.auto_cast(level="O1", dtype=TYPE_OF_PRECISION[self._precision])

    def _compute_type(self) -> str:
        """Return the type of a matrix product under the driver's autocast."""
        with paddle.no_grad(), self._autocast():
            product = paddle.matmul(paddle.ones([8, 8]), paddle.ones([8, 8]))
        return str(product.dtype).rpartition(".")[2]

    def _to_device(self, batch: Arrays) -> Batch:
        return {name: paddle.to_tensor(array) for name, array in batch.items()}

    def _step(self, batches: list[Batch]) -> Any:
        """Take one optimizer step over some batches; the ranks reduce their gradients once."""
        if self._draws_numbers:  # so that a resumed or replayed step draws the same numbers
            paddle.seed(seed_of(self._settings.seed, self._place.rank, self._steps_done))
        self._optimizer.set_lr(self.learning_rate())
        total, last = None, batches[-1]
        for batch in batches:
            reduces = batch is last and not self._reduces_after
            with nullcontext() if self.world_size == 1 or reduces else self._wrapped.no_sync():
                with self._autocast():
                    loss = self._case.loss(self._wrapped, batch) / len(batches)
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
        self._steps_done += 1
        return total

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._settings.optimizer.lr * self._factor(self._steps_done)

    def restore(self) -> Progress | None:
        """Load the newest checkpoint where the job resumes and there is one."""
        newest = self._checkpoints.newest() if self._job.resume else None
        return None if newest is None else self._load(newest)

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Batch]]:
        """Yield the batches of each optimizer step on the device."""
        self._phase = f"epoch {epoch}"
        count = self._settings.gradient_accumulation_steps
        batches = self._batches.epoch(epoch, skip_steps * count)
        while len(chosen := [self._to_device(batch) for batch in islice(batches, count)]) == count:
            yield chosen

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data, with a checkpoint's weights if one is given."""
        if self._eval_batches is None:
            raise RequestError("there is no evaluation on synthetic data")
        if weights is not None:
            self._load(weights)
        model = self._model
        if self.world_size > 1:
            for tensor in model.state_dict().values():
                if tensor.stop_gradient:  # running statistics: those of rank 0, which it also saves
                    dist.broadcast(tensor, src=0)
        found: dict[str, list[Any]] = {}
        model.eval()
        try:
            for batch in islice(self._eval_batches.epoch(0), self._settings.evaluate.max_batches):
                with self._autocast():
                    sums = self._case.eval_sums(model, self._to_device(batch))
                for name, value in sums.items():
                    found.setdefault(name, []).append(value)
        finally:
            model.train()
        names = sorted(found)
        everywhere = self.mean([math.fsum(float(value) for value in found[name]) for name in names])
        return self._case.metrics(
            {name: value * self.world_size for name, value in zip(names, everywhere, strict=True)}
        )

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        """Take steps from a checkpoint or the initial weights, and compare the weights with those of ``end``."""
        progress = Progress() if start is None else self._load(start)
        before = self._parameters()
        replay = Replay(progress.global_steps + 1)
        epoch, skipped_steps = divmod(progress.global_steps, self.steps_per_epoch)
        while len(replay.losses) < num_steps:
            if skipped_steps == self.steps_per_epoch:
                epoch, skipped_steps = epoch + 1, 0
            for batches in islice(self.open_epoch(epoch, skipped_steps), num_steps - len(replay.losses)):
                replay.losses.append(float(self.step(batches)))
                skipped_steps += 1
        if end is not None:
            replayed = self._parameters()
            self._load(end)
            replay.update = update_squares(before, replayed, self._parameters())
        return replay

    def _parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the trainable parameters by their number."""
        trained = (each for each in self._model.parameters() if not each.stop_gradient)
        return {str(number): np.array(each.numpy()) for number, each in enumerate(trained)}

    def save(self, progress: Progress) -> str:
        """Write a checkpoint (rank 0) and return its name."""
        name = f"step{progress.global_steps:09d}"
        if self._place.rank == 0:
            arrays = {_MODEL + key: value.numpy() for key, value in self._model.state_dict().items()}
            arrays |= {_OPTIMIZER + key: value.numpy() for key, value in self._optimizer.state_dict().items()}
            if self._scaler is not None:
                arrays |= {_SCALER + key: np.asarray(value) for key, value in self._scaler.state_dict().items()}
            name = self._checkpoints.save(arrays, progress)
        self.mean([0.0])  # no rank goes on before the checkpoint is complete
        return name

    def _load(self, checkpoint: Path) -> Progress:
        arrays, progress = self._checkpoints.load(checkpoint)
        try:
            for name, tensor in self._model.state_dict().items():
                array = arrays[_MODEL + name]
                if list(array.shape) != tensor.shape:
                    raise ValueError(f"{name} has shape {tensor.shape}, in the checkpoint {list(array.shape)}")
                tensor.set_value(array)
        except (KeyError, ValueError) as error:
            raise unreadable(checkpoint, error) from error
        states = {key.removeprefix(_OPTIMIZER): value for key, value in arrays.items() if key.startswith(_OPTIMIZER)}
        self._optimizer.set_state_dict({key: paddle.to_tensor(value) for key, value in states.items()})
        if self._scaler is not None:
            scaler = {key.removeprefix(_SCALER): value for key, value in arrays.items() if key.startswith(_SCALER)}
            self._scaler.load_state_dict({key: value if value.ndim else value.item() for key, value in scaler.items()})
        self._steps_done = progress.global_steps
        return progress

    def comparison(self) -> Comparison:
        """Return the model as named arrays, to compare its first steps with another framework's."""
        return Comparison(self._case, self._model, self._autocast, self._to_device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device != "cpu":
            paddle.device.synchronize(self._device)

    def _reduced(self, values: list[float], operation: Any) -> Callable[[], list[float]]:
        """Start a reduction over all ranks on the CPU, independent of the device."""
        tensor = paddle.to_tensor(values, dtype="float64", place=paddle.CPUPlace())
        work = dist.all_reduce(tensor, op=operation, group=self._control, sync_op=False)

        def read() -> list[float]:
            work.wait()
            return [float(value) for value in tensor.numpy().tolist()]

        return read

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start a maximum of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        if self.world_size == 1 or not values:
            return values
        return [value / self.world_size for value in self._reduced(values, dist.ReduceOp.SUM)()]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on the device so far; None on the CPU."""
        return peak_memory_mib(self._device)

    def trained(self) -> None:
        """Log nothing: everything is known before."""

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Distinguish out-of-memory from other errors, and say what to do."""
        if is_out_of_memory(error):
            settings = self._settings
            return "out_of_memory", (
                f"out of memory on {self._device} in {self._phase}, with batch_size {settings.batch_size} and "
                f"precision {settings.precision}; try a smaller batch_size with more gradient_accumulation_steps, "
                f"activation_checkpointing, or precision bf16 ({summary(error)})"
            )
        if isinstance(error, AccelmarkError):
            return "error", str(error)
        return "error", f"{type(error).__name__}: {summary(error)}"

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""
        if self.world_size > 1 and together:
            self.mean([0.0])
            dist.destroy_process_group()
