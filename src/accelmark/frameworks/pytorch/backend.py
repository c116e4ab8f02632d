"""The training backend of PyTorch."""

from __future__ import annotations

import hashlib
import os
import platform as machine
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.dropout import _DropoutNd

from accelmark.frameworks.pytorch.batches import CopyStream, fetched_ahead, mover, pinned
from accelmark.frameworks.pytorch.case import Batch, Batches, Place, TrainCase
from accelmark.frameworks.pytorch.hooks import ALLOWED_HOOKS, Hooks, refuse_hooks
from accelmark.frameworks.pytorch.model import identity
from accelmark.frameworks.pytorch.model.blocks import Compilation, wrap_model
from accelmark.frameworks.pytorch.state import Training
from accelmark.frameworks.pytorch.training import platform
from accelmark.frameworks.pytorch.training.checkpoint import Checkpoints
from accelmark.frameworks.pytorch.training.zero import OWN_PART_UNKNOWN, ZeroTraining
from accelmark.spec.errors import DataError, RunError, first_line
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import Event, Started
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.parallelism import mesh_of
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.plugins.requirements import installed_versions
from accelmark.spec.settings.training import TrainSettings
from accelmark.spec.tensor_file import Array
from accelmark.train.batches import SyntheticBatches, log_bad_samples, steps_of
from accelmark.train.case import case_class
from accelmark.train.hooks import hook_records, load_hooks
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory
from accelmark.train.loop.contract import Backend, DeviceClock, HostClock, OwnPart, Progress, Replay
from accelmark.train.loop.ends import EpochSize, repeat_steps


class Comparison:
    """See :class:`accelmark.train.loop.comparison.Comparison`: the names and layout of PyTorch are the reference's."""

    def __init__(self, case: TrainCase, training: Training, device: torch.device) -> None:
        self._case, self._training, self._model = case, training, training.original
        self._move = mover(device, channels_last=case.settings.channels_last)
        self.reference_names: Mapping[str, str] = {}
        for module in self._model.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0

    def parameters(self) -> dict[str, Array]:
        """Return the parameters, shared ones once; those that ranks share are gathered."""
        return {name: _array(parameter) for name, parameter in self._training.whole_parameters()}

    def statistics(self) -> dict[str, Array]:
        """Return the buffers of floating-point numbers that are saved with the model."""
        return {name: _array(buffer) for name, buffer in self._saved_buffers()}

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        saved = self._model.state_dict().keys()
        buffers = self._model.named_buffers()
        return ((name, buffer) for name, buffer in buffers if name in saved and buffer.is_floating_point())

    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy arrays into parameters and buffers, or into this rank's shards of them."""
        for name, tensor in (*self._model.named_parameters(), *self._saved_buffers()):
            self._training.set_tensor(tensor, torch.from_numpy(np.array(weights[name])))

    def arrays(self, batch: object) -> dict[str, Array]:
        """Return a batch on the host."""
        return {name: tensor.cpu().contiguous().numpy() for name, tensor in cast("Batch", batch).items()}

    def batch(self, arrays: Mapping[str, Array]) -> Batch:
        """Return a batch on the device."""
        return self._move({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return the first tensor that the model returns where the case computes its loss."""
        tensors: list[Tensor] = []
        handle = self._model.register_forward_hook(lambda _module, _inputs, output: tensors.extend(_tensors(output)))
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            with torch.no_grad():
                self._training.forward(self._case, self.batch(arrays), self._case.loss)
                for buffer, before in buffers:
                    buffer.copy_(before)
        finally:
            handle.remove()
        if not tensors:
            raise RunError(f"{type(self._model).__name__} was not called by loss(), or returned no tensor")
        output = tensors[0] if self._case.sequence is None else self._case.sequence.joined(tensors[0])
        return self._training.broadcast_result(_array(output))


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a model: a tensor, or sequences and mappings of them."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (Mapping, tuple, list)):
        for value in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(value)


def _array(tensor: Tensor | nn.Parameter) -> Array:
    return identity.whole(tensor).float().cpu().contiguous().numpy().copy()


_REPORTED_LIBRARIES: Final = ("torch", "numpy", "transformers", "timm", "triton", "safetensors", "deepspeed")
_SPLIT: Final = "ranks that share layers (tp, pp, cp, ep) wait for each other within a step, where waits are not marked"


def build_without_weights(case: TrainCase, log: EventLog) -> nn.Module:
    """Return the case's model on the meta device, or with its weights, after a warning, where that is not possible."""
    try:
        with torch.device("meta"):
            return case.build_model()
    except (RuntimeError, NotImplementedError) as error:
        why = f"the model cannot be built on the meta device ({first_line(error)})"
        log.event(Event.WARNING, {"message": f"{why}: this rank builds all of it"})
        return case.build_model()


def row_metrics(
    case: TrainCase, rows: dict[str, Tensor], control: dist.ProcessGroup | None, copies: int
) -> dict[str, float]:
    """Return the case's metrics of the rows of all ranks; ``copies`` consecutive ranks hold the same rows.

    Rank 0 alone collects the rows, which may be gigabytes, and computes; its DataError is raised on every rank.
    """
    if control is None:
        return case.row_metrics(_joined([rows]))
    is_first = dist.get_rank() == 0
    collected: list[Any] = [None] * dist.get_world_size(control)
    dist.gather_object(rows, collected if is_first else None, dst=0, group=control)
    result: list[Any] = [None]
    if is_first:
        try:
            result = [case.row_metrics(_joined(collected[::copies]))]
        except DataError as error:
            result = [error.args]
    dist.broadcast_object_list(result, src=0, group=control)
    if not isinstance(result[0], dict):
        raise DataError(*result[0])
    return result[0]


def _joined(of_ranks: list[dict[str, Tensor]]) -> dict[str, npt.NDArray[np.float64]]:
    names = sorted({name for rows in of_ranks for name in rows})
    return {name: torch.cat([rows[name] for rows in of_ranks if name in rows]).double().numpy() for name in names}


def metrics_of(case: TrainCase, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of one batch from the result of the case's ``eval_sums``."""
    rows = {name: value.cpu().double().numpy() for name, value in sums.items() if value.ndim == 2}
    return case.metrics({name: float(value) for name, value in sums.items() if name not in rows}) | case.row_metrics(
        rows
    )


def _in_step(
    batches: Iterator[Batch], case: TrainCase, control: dist.ProcessGroup | None
) -> Iterator[tuple[Batch, bool]]:
    """Yield (batch, counts) the same number of times on every rank, as sharded models need."""
    filler = case.synthetic_batch(1)
    while True:
        batch = next(batches, None)
        some = torch.tensor([float(batch is not None)])
        if control is not None:
            dist.all_reduce(some, op=dist.ReduceOp.MAX, group=control)
        if not some.item():
            return
        yield (filler, False) if batch is None else (batch, True)


class InProcess(NamedTuple):
    """Settings that a process provides for each of its jobs, as a search does for its trials."""

    make_case: Callable[[TrainSettings, Mapping[str, Path], Place], TrainCase]
    """Builds the case, instead of the folder that the job names."""
    control: dist.ProcessGroup | None = None
    """The gloo group of the ranks, which outlives the job; None for a single rank."""


class PyTorchBackend(Backend):
    """One rank's training in PyTorch; see :class:`accelmark.train.loop.contract.Backend`."""

    memory_advice = "activation_checkpointing, precision bf16, or parallelism fsdp2 over more devices"
    checkpoints: Checkpoints

    def __init__(
        self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog, in_process: InProcess | None = None
    ) -> None:
        super().__init__(job, train, place, log)
        self._in_process = in_process
        self._device = torch.device("cpu")
        self._feed: Generator[tuple[Batch, torch.Event], None, None] | None = None
        self._copies: CopyStream | None = None
        self._compilation: Compilation | None = None
        self.immediate, self.clock = True, HostClock()

    def prepare(self) -> Started:
        """Build device, data, model, optimizer and schedule, and log an event for each."""
        job, settings, ranks, log = self.job, self.settings, self.place, self.log
        if self._in_process is not None:
            make_case: Callable[..., TrainCase] = self._in_process.make_case
        else:
            make_case = case_class(job.case, "pytorch", TrainCase)  # type: ignore[type-abstract]
        self._device = device = platform.open_device(self.job, ranks)
        torch.set_num_threads(self.threads)
        precision = platform.set_precision(settings.precision, device)
        if precision != settings.precision:
            message = f"{settings.precision} is not available on {device.type}; computing in {precision}"
            log.event(Event.WARNING, {"message": message})
        if device.type != "cpu":
            self.immediate = False
            clock = DeviceClock(lambda: torch.Event(device, enable_timing=True))
            has_graphs = settings.compile in ("reduce-overhead", "max-autotune")
            self.clock, self.losses = clock, platform.device_losses(clock, overwritten=has_graphs)
        if self._in_process is not None:
            platform.forget_peak_memory(device)
            self._control = self._in_process.control
        else:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives are recorded; PyTorch's own number
            self._control = platform.join_ranks(job.collective_backend, ranks, device, needed=settings.is_sharded)
            if self._control is not None and (node_dir := os.environ.get("ACCELMARK_NODE_DIR")):
                platform.answer_collectives(Path(node_dir), ranks.rank)
        mesh = mesh_of(settings.parallelism, ranks.world_size, ranks.local_world_size)
        number, self._num_data_ranks = mesh.data_rank(ranks.rank), settings.num_data_ranks(ranks.world_size)
        digest = hashlib.sha256(f"{settings.seed}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1  # independent for neighbouring ranks and rounds
        place = Place(number, self._num_data_ranks, settings.seed, device, seed, mesh)
        hooks_class = load_hooks(self.job.extern, Hooks, ALLOWED_HOOKS)
        records = hook_records(hooks_class, Hooks)
        log.event(Event.LAUNCH_TRAINING, {"hooks": {name: asdict(record) for name, record in records.items()}})
        case = self._case = make_case(settings, self.job.data_dirs, place)
        hooks = hooks_class(case)
        self._move = mover(device, channels_last=settings.channels_last)
        if settings.loader.synthetic:  # on the device already, so that only computation is timed
            batch = self._move(case.synthetic_batch(settings.batch_size))
            self._batches: Batches = SyntheticBatches(batch, settings, place.world_size)
        else:
            self._batches = case.train_batches()
        self._size = size = EpochSize.of(settings, self._batches.num_samples, self._num_data_ranks)
        self.samples_per_step, self.steps_per_epoch = size.samples_per_step, size.steps_per_epoch
        platform.seed_everything(settings.seed)
        # Sharded weights are copied from rank 0, unless a vendor's hooks may read them.
        hooks.scatters_weights = settings.has_shards and self.world_size > 1 and type(hooks) is Hooks
        has_weights = not hooks.scatters_weights or ranks.rank == 0
        model = case.build_model() if has_weights else build_without_weights(case, log)
        structure, modules = identity.structure_hash(model), identity.module_hash(model)
        initial = identity.weights_hash(model) if ranks.rank == 0 else None
        self.flops_per_sample_formula = case.flops_per_sample()
        attention = identity.AttentionCalls()
        if ranks.rank == 0 and isinstance(self.job.work, TrainJob):
            with attention:
                self.flops_per_sample, uncounted = identity.count_flops(case, model)
            if uncounted is not None:
                log.event(Event.WARNING, {"message": f"FLOPs per sample were not counted: {uncounted}"})
        class_name = type(model).__name__
        self._build(hooks, model)
        training = self._training
        if not settings.loader.synthetic:
            self.eval_batches = self.timed(Event.INIT_EVALUATION, case.eval_batches)
        platform.seed_everything(place.seed)
        return Started(
            framework="pytorch",
            framework_version=torch.__version__,
            device_type=device.type,
            device_name=platform.device_name(device) or machine.processor() or machine.machine() or None,
            device_index=device.index,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=self.threads,
            seed=place.seed,
            precision=precision,
            reduced_modes=platform.reduced_modes(precision),
            model_class=class_name,
            num_parameters=self.num_parameters,
            optimizer_class=type(training.optimizer).__name__,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            standard_module_hash=modules,
            checkpoint_hash=initial,
            train_samples=self._batches.num_samples,
            eval_samples=self.eval_batches.num_samples if self.eval_batches is not None else None,
            compute_type=identity.compute_type(training.module, training.autocast, device),
            # With cp, queries and keys have other lengths than in the calls that were seen.
            attention_kernels=identity.chosen_kernels(
                attention.found if case.sequence is None else (), device, training.autocast
            ),
            hooks={name: record.place for name, record in records.items()},
            hook_lines={name: record.num_lines for name, record in records.items()},
            library_versions={"python": machine.python_version()} | installed_versions(_REPORTED_LIBRARIES),
            own_part_unknown=(
                OWN_PART_UNKNOWN if settings.parallelism == "deepspeed" else _SPLIT if mesh.shares_layers else None
            ),
        )

    def _build(self, hooks: Hooks, model: nn.Module) -> None:
        """Call the model hooks in order, and log the duration of each."""
        case, mesh = self._case, self._case.place.mesh
        model = self.timed(Event.CONVERT_MODEL, lambda: hooks.convert_model(model))
        model.train()
        self.num_parameters = identity.num_parameters(model)
        inner, autocast = self.timed(Event.MODEL_TO_FP16, lambda: hooks.model_to_fp16(model))
        autocast = identity.with_attention(autocast, self.settings.attention)
        self._compilation = wrap_model(case, inner, self.job.case.name, self.log)
        wrapped = self.timed(Event.MODEL_TO_DDP, lambda: hooks.model_to_ddp(inner))

        def with_optimizer() -> Training:
            training = Training(wrapped, hooks.create_optimizer(wrapped), None, hooks.create_grad_scaler(), autocast)
            if mesh.pp > 1:
                from accelmark.frameworks.pytorch.mesh import PipelineTraining

                refuse_hooks(hooks, "the schedule of a pipeline")
                assert hooks.devices is not None  # noqa: S101 - model_to_ddp has divided the model
                return PipelineTraining.open(training, case, hooks.devices)
            if self.settings.parallelism != "deepspeed":
                return training
            refuse_hooks(hooks, "DeepSpeed's engine")
            return ZeroTraining.open(training, self.settings, self._device, self.world_size)

        training = self.timed(Event.CREATE_OPTIMIZER, with_optimizer)
        length = self._size.schedule_length(self.settings)
        training.schedule = case.build_schedule(training.optimizer, length, self.steps_per_epoch)
        self._training = training
        self.step: Callable[[list[Any]], Any] = partial(hooks.train_step, training)
        if hasattr(training, "take_step"):  # an engine's own
            self.step = partial(training.take_step, case)
        if self.clock is not None and isinstance(wrapped, nn.parallel.DistributedDataParallel):
            trained = (parameter for parameter in wrapped.parameters() if parameter.requires_grad)
            # A node ends with the last reference to it; DistributedDataParallel attaches to the same nodes.
            self.own_end = OwnPart([get_gradient_edge(part).node.register_prehook for part in trained], self.clock).take
        if self.clock is not None and self.settings.has_shards and self.world_size > 1 and not mesh.shares_layers:
            from accelmark.frameworks.pytorch.mesh import ShardExchange

            self.own_end = ShardExchange(wrapped, self.clock, has_replicas=(mesh.dp or 1) > 1).take
        directory = CheckpointDirectory(self.job.checkpoint_dir, self.place, self.exchange_max)
        self.checkpoints = Checkpoints(directory, case, training, self.place)

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Batch]]:
        """Yield the batches of each optimizer step, prefetched and pinned where the device is not the CPU."""
        self.phase = f"epoch {epoch}"
        settings = self.settings
        accumulation = settings.gradient_accumulation_steps
        batches = log_bad_samples(self._batches.epoch(epoch, skip_steps * accumulation), self._batches, self.log)
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if self._device.type == "cpu" or settings.loader.synthetic or not hasattr(torch, "accelerator"):
            # before PyTorch 2.6 a stream cannot be entered, so copies do not overlap
            batches = map(self._move, batches)
        else:
            if settings.loader.pin_memory is not False:
                batches = map(pinned, batches)
            if self._copies is None:
                self._copies = CopyStream(self._device)
            self._feed = fetched_ahead(self._copies.send(batches, self._move), settings.loader.prefetch)
            batches = self._copies.receive(self._feed)
        self.checkpoints.restore_random()
        return steps_of(batches, accumulation)

    def learning_rate(self) -> float:
        rate: float = self._training.optimizer.param_groups[0]["lr"]
        return rate

    def load(self, checkpoint: Path) -> Progress:
        return self.checkpoints.load(checkpoint)

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        progress = Progress() if start is None else self.checkpoints.load_for_replay(start)
        # On the host: on the device they would take memory that the steps had in training.
        before = [part.to("cpu", copy=True) for part in self._training.trained_parts().values()]
        sums = self.checkpoints.frozen_sums() if start is None else {}
        replay = repeat_steps(self, progress, num_steps)
        if start is None:
            self.checkpoints.frozen = [
                name for name, value in self.checkpoints.frozen_sums().items() if value == sums[name]
            ]
        if end is not None:
            replay.update = self.checkpoints.compare(end, before)
            replay.state = self.checkpoints.compare_state(end)
        return replay

    @torch.no_grad()
    def evaluate_on(self, batches: Batches) -> dict[str, float]:
        """Return the case's metrics over given data; all ranks take part.

        The sums stay on the device until the end, and are added in double precision on the CPU.
        """
        case, training, control = self._case, self._training, self._control
        model = training.module
        if control is not None and dist.get_world_size(control) > 1:  # all evaluate with rank 0's running statistics
            for buffer in model.buffers():
                if not hasattr(buffer, "placements"):
                    dist.broadcast(buffer, src=0)
        was_training = model.training
        model.eval()
        summed: dict[str, list[Tensor]] = {}
        limited = islice(batches.epoch(0), self.settings.evaluate.max_batches)
        try:
            in_step = _in_step(limited, case, control) if self.settings.is_sharded else zip(limited, repeat(True))
            for batch, counts in in_step:
                sums = training.forward(case, self._move(batch), case.eval_sums)
                if counts and sums is not None:
                    for name, value in sums.items():
                        summed.setdefault(name, []).append(value.detach())
        finally:
            model.train(was_training)
        rows = {name: torch.cat(values).cpu() for name, values in summed.items() if values[0].ndim == 2}
        plain = {name: values for name, values in summed.items() if name not in rows}
        totals = {name: float(torch.stack(values).cpu().double().sum()) for name, values in plain.items()}
        del summed, plain
        of_ranks = [(totals, bool(rows))]
        if control is not None:
            of_ranks *= dist.get_world_size(control)
            dist.all_gather_object(of_ranks, (totals, bool(rows)), group=control)
        mesh = case.place.mesh
        # Of a pipeline, the last stage has the sums; those over parts of sequences add up.
        copies = mesh.ranks_per_sample // (mesh.pp * mesh.cp)
        names = sorted({name for sums, _ in of_ranks for name in sums})
        joint = {name: sum(sums.get(name, 0.0) for sums, _ in of_ranks) / copies for name in names}
        if not joint:
            raise DataError("the case's eval_batches yielded nothing on any rank; check the evaluation data")
        has_rows = any(each for _, each in of_ranks)
        return case.metrics(joint) | (row_metrics(case, rows, control, copies) if has_rows else {})

    def save(self, progress: Progress) -> str:
        return self.checkpoints.save(progress)

    def finish_save(self) -> float:
        return self.checkpoints.finish_save()

    def comparison(self) -> Comparison:
        """Return the model as named arrays, to compare its first steps with another framework's."""
        return Comparison(self._case, self._training, self._device)

    def synchronize(self) -> None:
        platform.synchronize(self._device)

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start an all-reduce on the CPU, independent of the device."""
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def read() -> list[float]:
            work.wait()
            return [float(value) for value in tensor.tolist()]

        return read

    def mean(self, values: list[float]) -> list[float]:
        if self.world_size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._control)
        return [float(value) for value in (tensor / self.world_size).tolist()]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on the device so far; None on the CPU."""
        return platform.peak_memory_mib(self._device)

    def num_alloc_retries(self) -> int:
        """Return how often the device's allocator has freed its cache to find memory; 0 on the CPU."""
        statistics = platform.call(self._device, "memory_stats", self._device) or {}
        return int(statistics.get("num_alloc_retries", 0))

    def trained(self) -> None:
        """Log the number of compiled graphs."""
        if self._compilation is not None:
            self._compilation.report(self.settings.compile, self.log)

    def device_label(self) -> str:
        return f"{self._device} ({platform.device_name(self._device) or 'host memory'})"

    def is_out_of_memory(self, error: BaseException) -> bool:
        says_so = any(part in str(error) for part in ("can't allocate memory", "not enough memory"))
        return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and says_so)

    def close(self, *, together: bool) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if (together or self.world_size == 1) and hasattr(self, "checkpoints"):
            with suppress(RunError):  # training failed for another reason
                self.checkpoints.finish_save()
        if self._in_process is not None:
            return
        if dist.is_initialized() and (together or self.world_size == 1):
            dist.barrier()
            dist.destroy_process_group()


open_backend = PyTorchBackend
