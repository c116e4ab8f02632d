"""The training backend of PyTorch."""

from __future__ import annotations

import math
import platform as machine
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from accelmark.frameworks.pytorch.attention import with_attention
from accelmark.frameworks.pytorch.blocks import CompileCounter, wrap_blocks
from accelmark.frameworks.pytorch.case import Batch, Batches, Place, TrainCase
from accelmark.frameworks.pytorch.checkpoint import Checkpoints
from accelmark.frameworks.pytorch.clock import DeviceClock, DeviceLosses, HostClock, HostLosses
from accelmark.frameworks.pytorch.evaluation import evaluate
from accelmark.frameworks.pytorch.extern import hook_records, load_hooks
from accelmark.frameworks.pytorch.feed import Ahead, mover, pinned, skipped, steps_of
from accelmark.frameworks.pytorch.hooks import Hooks, Training
from accelmark.frameworks.pytorch.identity import count_flops, num_parameters, structure_hash, weights_hash
from accelmark.frameworks.pytorch.in_process import InProcess
from accelmark.frameworks.pytorch.integrity.equivalence import difference, outputs_of
from accelmark.frameworks.pytorch.integrity.inspection import MAX_LISTED, Inspection, runs_vendor_code
from accelmark.frameworks.pytorch.integrity.monkeypatch import foreign_functions
from accelmark.frameworks.pytorch.integrity.probes import Probes
from accelmark.frameworks.pytorch.integrity.reference_model import (
    NUM_SHOWN,
    ReferenceModel,
    compute_type,
    module_hash,
    optimizer_facts,
    unwrapped,
)
from accelmark.frameworks.pytorch.optimizers import needs_length
from accelmark.frameworks.pytorch.platform import (
    device_name,
    forget_peak_memory,
    join_ranks,
    library_versions,
    open_device,
    peak_memory_mib,
    set_precision,
    set_threads,
    uncompilable,
)
from accelmark.frameworks.pytorch.seeds import rank_seed, seed_everything
from accelmark.frameworks.pytorch.synthetic import SyntheticBatches
from accelmark.spec.errors import AccelmarkError, DataError, RequestError
from accelmark.spec.events import Compiled, EndReason, Event, Inspected, Started
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.perflog import EventLog
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Backend, LossReader, Progress, Replay, StepClock
from accelmark.train.loop.ends import total_steps


def open_backend(job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> Backend:
    """Return the backend of a rank that has its own process."""
    return PyTorchBackend(job, train, place, log)


@final
class PyTorchBackend:
    """One rank's training in PyTorch; see :class:`accelmark.train.loop.contract.Backend`."""

    def __init__(
        self, job: JobSpec, train: TrainJob, ranks: RankPlace, log: EventLog, in_process: InProcess | None = None
    ) -> None:
        self._job = job
        self._train = train
        self._settings = train.settings
        self._ranks = ranks
        self._log = log
        self._tenancy = in_process
        self._device = torch.device("cpu")
        self._phase = "initialisation"
        self._inspection: Inspection | None = None
        self._probes = Probes(reason="no code of a vendor's runs")
        self._feed: Ahead[Batch] | None = None
        self._eval_batches: Batches | None = None
        self._compiled: CompileCounter | None = None
        self.world_size = ranks.world_size
        self.immediate = True
        self.clock: StepClock | None = HostClock()
        self.losses: LossReader = HostLosses()
        self.num_parameters = 0
        self.flops_per_sample: float | None = None
        self.flops_per_sample_formula: float | None = None

    def prepare(self) -> Started:
        """Build device, data, model, optimizer and schedule, and log an event for each."""
        settings, ranks = self._settings, self._ranks
        # Before vendor code is loaded, which could replace what is compared later.
        case_class = self._case_class() if self._tenancy is None else None
        seen = self._inspection = Inspection(case_class) if runs_vendor_code(self._job) else None
        self._device = device = open_device(self._job, ranks)
        if seen is not None:
            seen.module_imported()
        threads = set_threads(settings, ranks)
        precision = set_precision(settings.precision, device)
        if precision != settings.precision:
            message = f"{settings.precision} is not available on {device.type}; computing in {precision}"
            self._log.event(Event.WARNING, {"message": message})
        if device.type != "cpu":
            self.immediate = False
            clock = DeviceClock(device)
            self.clock, self.losses = clock, DeviceLosses(clock)
        self._control = self._join(device)
        shared_seed = settings.seed
        place = Place(ranks.rank, ranks.world_size, device, rank_seed(shared_seed, ranks.rank), shared_seed)
        hooks_class = load_hooks(self._job.extern)
        records = hook_records(hooks_class)
        replaced = {
            name: {"file": record.file, "line": record.line, "num_lines": record.num_lines}
            for name, record in records.items()
        }
        self._log.event(Event.LAUNCH_TRAINING, {"hooks": replaced})
        case = self._case = self._make_case(case_class, place)
        hooks = hooks_class(case)
        if seen is not None:
            seen.hooks, seen.case, seen.hooks_class = hooks, case, hooks_class
        self._batches = self._open_data(case)
        seed_everything(shared_seed)
        model = self._build_model(case, hooks)
        weights = weights_hash(model) if ranks.rank == 0 else None
        self.flops_per_sample_formula = case.flops_per_sample()
        if ranks.rank == 0:
            self.flops_per_sample, uncounted = count_flops(case, model)
            if uncounted is not None:
                self._log.event(Event.WARNING, {"message": f"FLOPs per sample were not counted: {uncounted}"})
        standard = ReferenceModel.of(model)
        if seen is not None:
            self._probes = seen.probes = Probes.of(case, model)
        is_sharded = settings.parallelism == "fsdp2"
        compares = seen is not None and ranks.rank == 0 and not is_sharded
        outputs = outputs_of(case, model, torch.device("cpu")) if compares else None
        started = self._build(hooks, model, standard, is_changed=seen is not None)
        left = unwrapped(self._training.model)
        self._probes.open(left)
        # all ranks take part in gathering the shards
        trained = weights_hash(left) if seen is not None and (ranks.rank == 0 or is_sharded) else None
        apart = difference(outputs, outputs_of(case, left, device)) if compares else None
        seed_everything(place.seed)
        return started.model_copy(
            update={
                "replaced_functions": seen.replaced() if seen is not None else foreign_functions(),
                "module_functions": seen.module_functions[:MAX_LISTED] if seen is not None else (),
                "num_module_functions": len(seen.module_functions) if seen is not None else 0,
                "output_difference": apart,
                "threads": threads,
                "seed": place.seed,
                "precision": precision,
                "checkpoint_hash": weights,
                "trained_checkpoint_hash": trained if ranks.rank == 0 else None,
                "hooks": {name: record.place for name, record in records.items()},
                "hook_lines": {name: record.num_lines for name, record in records.items()},
            }
        )

    def _join(self, device: torch.device) -> dist.ProcessGroup | None:
        if self._tenancy is not None:
            forget_peak_memory(device)
            return self._tenancy.control
        return join_ranks(self._job, self._ranks, device, needed=self._settings.parallelism == "fsdp2")

    def _case_class(self) -> type[TrainCase]:
        module = folder_module(self._job.case, "pytorch")
        case_class = getattr(module, "Case", None)
        if not (isinstance(case_class, type) and issubclass(case_class, TrainCase)):
            raise RequestError(f"{module.__file__}: has no class Case(accelmark.frameworks.pytorch.case.TrainCase)")
        return case_class

    def _make_case(self, case_class: type[TrainCase] | None, place: Place) -> TrainCase:
        make = self._tenancy.make_case if self._tenancy is not None else case_class or self._case_class()
        return make(self._settings, self._job.data_dirs, place)

    def _open_data(self, case: TrainCase) -> Batches:
        settings = self._settings
        batches: Batches = SyntheticBatches(case) if settings.loader.synthetic else case.train_batches()
        per_round = settings.batch_size * self.world_size
        self.samples_per_step = per_round * settings.gradient_accumulation_steps
        self.steps_per_epoch = batches.num_samples // per_round // settings.gradient_accumulation_steps
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the training data has {batches.num_samples} samples, fewer than the {self.samples_per_step} of one "
                "optimizer step over all ranks; lower batch_size or gradient_accumulation_steps"
            )
        return batches

    def _build_model(self, case: TrainCase, hooks: Hooks) -> nn.Module:
        """Build the model with its weights, or without them where FSDP2 copies them from rank 0.

        Vendor hooks may read weights: with them, every rank builds the full model.
        """
        hooks.scatters_weights = self._settings.parallelism == "fsdp2" and self.world_size > 1 and type(hooks) is Hooks
        if hooks.scatters_weights and self._ranks.rank != 0:
            try:
                with torch.device("meta"):
                    return case.build_model()
            except (RuntimeError, NotImplementedError) as error:
                message = (
                    f"the model cannot be built on the meta device ({_first_line(error)}): this rank builds all of it"
                )
                self._log.event(Event.WARNING, {"message": message})
        return case.build_model()

    def _build(self, hooks: Hooks, model: nn.Module, standard: ReferenceModel, *, is_changed: bool) -> Started:
        """Call the model hooks in order; an event records the duration of each."""
        settings = self._settings
        model = self._timed(Event.CONVERT_MODEL, lambda: hooks.convert_model(model))
        model.train()
        self.num_parameters = num_parameters(model)
        class_name = type(model).__name__
        inner, autocast = self._timed(Event.MODEL_TO_FP16, lambda: hooks.model_to_fp16(model))
        autocast = with_attention(autocast, settings.attention)
        self._wrap(inner)
        wrapped = self._timed(Event.MODEL_TO_DDP, lambda: hooks.model_to_ddp(inner))
        optimizer = self._timed(Event.CREATE_OPTIMIZER, lambda: hooks.create_optimizer(wrapped))
        standard_class, changes = optimizer_facts(
            optimizer, self._case.build_optimizer(wrapped) if is_changed else optimizer
        )
        schedule = self._case.build_schedule(optimizer, self._schedule_length(), self.steps_per_epoch)
        self._training = training = Training(wrapped, optimizer, schedule, hooks.create_grad_scaler(), autocast)
        left = unwrapped(wrapped)
        replaced = standard.replaced_in(left)
        self.step: Callable[[list[Any]], Any] = partial(hooks.train_step, training)
        self._checkpoints = Checkpoints(
            self._job.checkpoint_dir, settings, training, self._device, self._ranks.rank, self.world_size
        )
        if not settings.loader.synthetic:
            self._eval_batches = self._timed(Event.INIT_EVALUATION, self._case.eval_batches)
        return Started(
            framework="pytorch",
            framework_version=torch.__version__,
            device_type=self._device.type,
            device_name=device_name(self._device) or machine.processor() or machine.machine() or None,
            device_index=self._device.index,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=0,
            seed=0,
            precision=settings.precision,
            model_class=class_name,
            num_parameters=self.num_parameters,
            parameter_hash=structure_hash(left),
            standard_parameter_hash=standard.parameter_hash,
            standard_num_parameters=standard.num_parameters,
            module_hash=module_hash(left),
            standard_module_hash=standard.module_hash,
            replaced_modules=replaced[:NUM_SHOWN],
            num_replaced_modules=len(replaced),
            checkpoint_hash=None,
            optimizer_class=type(optimizer).__name__,
            standard_optimizer_class=standard_class,
            optimizer_changes=changes,
            train_samples=self._batches.num_samples,
            eval_samples=self._eval_batches.num_samples if self._eval_batches is not None else None,
            compute_type=compute_type(left, autocast, self._device),
            hooks={},
            library_versions=library_versions(),
        )

    def _timed(self, event: Event, build: Callable[[], Any]) -> Any:
        start = time.monotonic()
        built = build()
        self._log.event(event, {"duration_s": round(time.monotonic() - start, 6)})
        return built

    def _wrap(self, model: nn.Module) -> None:
        """Apply activation checkpointing and compilation in place, before any data-parallel wrapper.

        Blocks are compiled where activations are checkpointed or FSDP2 shards block by block, else the whole model.
        """
        settings = self._settings
        mode = self._compile_mode()
        checkpointing = settings.activation_checkpointing
        blocks = self._case.checkpointed_blocks(model)
        if checkpointing != "off" and not blocks:
            raise RequestError(
                f"activation_checkpointing: case {self._job.case.name!r} has no repeated blocks for it; leave it off"
            )
        if checkpointing != "off" or (mode is not None and blocks and settings.parallelism == "fsdp2"):
            wrap_blocks(blocks, checkpointing, mode)
        elif mode is not None:
            model.compile(mode=mode)

    def _compile_mode(self) -> str | None:
        """Return the compilation mode; None where nothing is compiled."""
        mode = self._settings.compile
        if mode == "off":
            return None
        if (why := uncompilable(self._device)) is not None:
            message = f"compile: {mode}: this host cannot compile, so the model is trained without compilation ({why})"
            self._log.event(Event.WARNING, {"message": message})
            return None
        self._compiled = CompileCounter()
        return mode

    def _log_compilation(self) -> None:
        """Log the number of compiled graphs; warn where nothing was compiled although it was requested."""
        if self._compiled is None:
            return
        graphs, breaks = self._compiled.read()
        self._log.event(Event.COMPILED, Compiled(graphs=graphs, graph_breaks=breaks))
        if not graphs:
            message = f"compile: {self._settings.compile}: nothing of the model was compiled"
            self._log.event(Event.WARNING, {"message": message})

    def _schedule_length(self) -> int:
        settings = self._settings
        length = total_steps(settings.end, self.steps_per_epoch, self.samples_per_step)
        if length is None and needs_length(settings.schedule):
            raise RequestError(
                f"schedule.{settings.schedule.name} needs the number of steps: give end.max_steps, max_epochs or "
                "max_samples in addition to max_duration_s"
            )
        return length if length is not None else self.steps_per_epoch

    def restore(self) -> Progress | None:
        """Load the newest checkpoint where the job resumes and there is one."""
        newest = self._checkpoints.newest() if self._job.resume else None
        return None if newest is None else self._checkpoints.load(newest)

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Batch]]:
        """Yield the batches of each optimizer step, prefetched and pinned where the device is not the CPU."""
        self._phase = f"epoch {epoch}"
        settings = self._settings
        accumulation = settings.gradient_accumulation_steps
        batches = skipped(iter(self._batches.epoch(epoch)), skip_steps * accumulation)
        self._close_feed()
        self._probes.close_step()
        if self._device.type != "cpu" and not settings.loader.synthetic:
            pin = settings.loader.pin_memory is not False
            batches = self._feed = Ahead(map(pinned, batches) if pin else batches, settings.loader.prefetch)
        self._checkpoints.restore_random()
        steps = steps_of(batches, accumulation, mover(self._device, channels_last=settings.channels_last))
        return self._probes.over(steps)

    def _close_feed(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        rate: float = self._training.optimizer.param_groups[0]["lr"]
        return rate

    def evaluate(self, weights: Path | None = None) -> dict[str, float]:
        """Return the case's metrics over all ranks' evaluation data, with a checkpoint's weights if one is given."""
        if self._eval_batches is None:
            raise RequestError("there is no evaluation on synthetic data")
        if weights is not None:
            self._checkpoints.load(weights)
        return self.evaluate_on(self._eval_batches)

    def replay(self, checkpoint: Path, num_steps: int) -> Replay:
        """Restore a checkpoint, and take ``num_steps`` optimizer steps from it."""
        progress = self._checkpoints.load(checkpoint)
        parameters = [parameter for parameter in self._training.model.parameters() if parameter.requires_grad]
        replay = Replay(progress.global_steps + 1, [], [])
        epoch, skipped_steps = progress.epoch, progress.step_in_epoch
        while len(replay.losses) < num_steps:
            if skipped_steps == self.steps_per_epoch:
                epoch, skipped_steps = epoch + 1, 0
            left = min(num_steps - len(replay.losses), self.steps_per_epoch - skipped_steps)
            for batches in islice(self.open_epoch(epoch, skipped_steps), left):
                before = [parameter.detach().clone() for parameter in parameters]
                replay.losses.append(float(self.step(batches)))
                replay.update_norms.append(_distance(parameters, before))
            skipped_steps += left
        return replay

    def evaluate_on(self, batches: Batches) -> dict[str, float]:
        """Return the case's metrics over given data; all ranks take part."""
        self._probes.close_step()
        return evaluate(self._case, self._training, batches, self._control)

    def save(self, progress: Progress, *, final: bool = False) -> str:
        """Write a checkpoint and return its name; the ``final`` one is kept in addition to those of ``keep``."""
        return self._checkpoints.save(progress, final=final)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        """Start an all-reduce on the CPU, independent of the device."""
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def read() -> list[float]:
            work.wait()
            return [float(value) for value in tensor.tolist()]

        return read

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all ranks."""
        if self.world_size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._control)
        return [float(value) for value in (tensor / self.world_size).tolist()]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on the device so far; None on the CPU."""
        return peak_memory_mib(self._device)

    def inspected(self) -> Inspected | None:
        """Inspect vendor code again at the end of training."""
        self._log_compilation()
        return self._inspection.ended() if self._inspection is not None else None

    def explain(self, error: BaseException) -> tuple[EndReason, str]:
        """Distinguish out-of-memory from other errors, and say what to do."""
        if _is_out_of_memory(error):
            settings = self._settings
            return "out_of_memory", (
                f"out of memory on {self._device} ({device_name(self._device) or 'host memory'}) in {self._phase}, "
                f"with batch_size {settings.batch_size}, precision {settings.precision}, "
                f"parallelism {settings.parallelism}; try a smaller batch_size with more gradient_accumulation_steps, "
                "activation_checkpointing, precision bf16, or parallelism fsdp2 over more devices "
                f"({_first_line(error)})"
            )
        if isinstance(error, AccelmarkError):
            return "error", str(error)
        return "error", f"{type(error).__name__}: {_first_line(error)}"

    def close(self, *, together: bool) -> None:
        """Leave the process group, in step with the other ranks (``together``) unless they may be gone."""
        self._close_feed()
        if self._tenancy is not None:
            return
        if dist.is_initialized() and (together or self.world_size == 1):
            dist.barrier()
            dist.destroy_process_group()


@torch.no_grad()
def _distance(parameters: list[nn.Parameter], before: list[torch.Tensor]) -> float:
    """Return the Euclidean distance of parameters from earlier values; only of this rank's shards where sharded."""
    pairs = ((_local(now), _local(old)) for now, old in zip(parameters, before, strict=True))
    return math.sqrt(sum(float((now - old).double().square().sum()) for now, old in pairs))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    shard: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor.detach() if shard is None else shard().detach()


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
