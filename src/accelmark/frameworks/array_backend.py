"""The training backend of frameworks whose batches and checkpoints are NumPy arrays, without the framework's part.

A framework subclasses :class:`ArrayBackend`. It keeps the same state on every rank, so that any rank can save it.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, RunError
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import Event, Started, UpdateSquares
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TYPE_OF_PRECISION, Precision
from accelmark.spec.tensor_file import Array
from accelmark.train.batches import Arrays, Batches, SyntheticBatches, log_bad_samples, steps_of
from accelmark.train.case import ArrayCase, Batch, case_class, use_layers
from accelmark.train.hooks import ArrayHooks, hook_records, load_hooks
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory, name_of, reading
from accelmark.train.loop.comparison import reference_name
from accelmark.train.loop.contract import Backend, Progress, Replay
from accelmark.train.loop.ends import EpochSize, repeat_steps
from accelmark.train.loop.process import handle_signals_again

NamedArrays = Mapping[str, npt.NDArray[Any]]
_OUT_OF_MEMORY: Final = (
    "RESOURCE_EXHAUSTED", "ResourceExhausted", "Out of memory", "out of memory", "bad_alloc", "Cannot allocate memory",
    "Allocate memory failed", "Alloc device memory failed",
)  # fmt: skip
_NAMES: Final = {
    "kernel": "weight", "scale": "weight", "gamma": "weight", "embedding": "weight", "embedding_table": "weight",
    "beta": "bias", "mean": "running_mean", "_mean": "running_mean", "moving_mean": "running_mean",
    "var": "running_var", "_variance": "running_var", "moving_variance": "running_var",
}  # fmt: skip
"""A framework's name of an array of a layer -> PyTorch's."""
_KERNEL_AXES: Final = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1)}
"""Dimensions of a kernel -> its axes in PyTorch's order, which is (out, in, ...) instead of (..., in, out)."""


class ArrayBackend(Backend):
    """One rank's training; see :class:`accelmark.train.loop.contract.Backend`."""

    framework: ClassVar[str]
    title: ClassVar[str]
    libraries: ClassVar[tuple[ModuleType, ...]]
    """The framework, and its libraries that change results."""
    layer_module: ClassVar[ModuleType]
    """The framework's layers; see :mod:`accelmark.train.case`."""
    hooks_module: ClassVar[ModuleType]
    """The framework's hooks; see :mod:`accelmark.train.hooks`."""
    traces_hook: ClassVar[bool] = False
    """Whether the framework calls the hook of a step while it traces ``take_step``."""
    tensor_of: ClassVar[Any]
    """Returns an array as a tensor on the device."""
    array_of: ClassVar[Any]
    """Returns a copy of a variable as an array."""
    sgd_class: ClassVar[str] = "SGD"
    checkpoints: CheckpointDirectory

    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        super().__init__(job, train, place, log)
        self.precision: Precision = self.settings.precision
        self.device_name: str | None = None
        """The product's name; None: not known, or the host's processor."""
        self.device_index: int | None = None
        self.is_open = False
        self.steps_done = 0
        self.own_part_unknown: str | None = None

    @abstractmethod
    def open_device(self) -> None:
        """Open this rank's device with ``threads``, set its name and index and the precision, and join the ranks."""

    @abstractmethod
    def build_model(self) -> str:
        """Build the model of ``self.case`` with the same weights on every rank; returns the name of its class."""

    def variables(self, *, trained: bool) -> Mapping[str, Any]:
        """Return the trainable parameters, or the running statistics, by name, on every rank.

        Matrices and kernels of shape (..., in, out), which PyTorch has as (out, in, ...), are named ``kernel``.
        """
        raise NotImplementedError

    def assign(self, variable: Any, array: npt.NDArray[Any]) -> None:
        """Set a variable."""
        raise NotImplementedError

    def weights(self, *, trained: bool) -> NamedArrays:
        """Return copies of the trainable parameters, or of the running statistics, by name, on every rank."""
        return {name: self.array_of(variable) for name, variable in self.variables(trained=trained).items()}

    def set_weights(self, arrays: NamedArrays) -> None:
        """Set parameters and running statistics, as :meth:`weights` returns them."""
        variables = {**self.variables(trained=True), **self.variables(trained=False)}
        for name, array in arrays.items():
            self.assign(variables[name], array)

    @abstractmethod
    def training_outputs(self, batch: Batch) -> Any:
        """Return the model's output in the case's loss, computed as in a training step, as an array."""

    @abstractmethod
    def disable_dropout(self) -> None:
        """Let all values through dropout from now on; called before the first step."""

    @abstractmethod
    def build_training(self) -> None:
        """Convert the model and build the optimizer, by ``self.hooks``, and the other parts of a step."""

    def to_device(self, batch: Arrays) -> Any:
        """Return a batch on the device."""
        return {name: self.tensor_of(array) for name, array in batch.items()}

    @abstractmethod
    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        """Take one optimizer step over some batches, and return its loss without waiting for the device."""

    @abstractmethod
    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        """Return the case's sums over a batch of evaluation data, scalars."""

    def state_variables(self) -> Mapping[str, Any]:
        """Return all that a step changes by name."""
        raise NotImplementedError

    def state(self) -> NamedArrays:
        """Return all that a step changes, as arrays by name."""
        return {name: self.array_of(variable) for name, variable in self.state_variables().items()}

    def set_state(self, arrays: NamedArrays) -> None:
        """Restore what :meth:`state` returned. Raises KeyError, ValueError: one is missing, or of another shape."""
        for name, variable in self.state_variables().items():
            if arrays[name].shape != tuple(variable.shape):
                shapes = f"{tuple(variable.shape)}, in the checkpoint {arrays[name].shape}"
                raise ValueError(f"{name} has shape {shapes}")
            self.assign(variable, arrays[name])

    @abstractmethod
    def gather(self, values: list[float]) -> Callable[[], npt.NDArray[Any]]:
        """Start to collect the values of all of several ranks in double precision; the result has a row for each."""

    @abstractmethod
    def peak_bytes(self) -> float | None:
        """Return the largest allocation on this rank's device, which is no CPU; None where it is not counted."""

    def compute_type(self) -> str:
        """Return the type of a matrix product in a step."""
        return TYPE_OF_PRECISION[self.precision]

    def comparison(self) -> Comparison:
        """Return the model as named arrays, to compare its first steps with another framework's."""
        self.disable_dropout()
        return Comparison(self)

    def device_label(self) -> str:
        kind, index = self.job.device_type, self.device_index
        return kind if kind == "cpu" or index is None else f"{kind}:{index}"

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that evaluates with the running statistics of rank 0, which it also saves."""
        return nullcontext()

    def prepare(self) -> Started:
        job, settings, place, log = self.job, self.settings, self.place, self.log
        base, allowed = self.hooks_module.Hooks, self.hooks_module.ALLOWED_HOOKS
        hooks_class: type[ArrayHooks] = load_hooks(job.extern, base, allowed)
        records = hook_records(hooks_class, base)
        use_layers(self.layer_module)
        make_case = case_class(job.case, self.framework, ArrayCase)  # type: ignore[type-abstract]
        self.open_device()
        self.is_open = True
        handle_signals_again()
        if self.precision != settings.precision:
            lack = f"{self.title} has no {settings.precision} on {self.device_label()}"
            log.event(Event.WARNING, {"message": f"{lack}; computing in {self.precision}"})
        log.event(Event.LAUNCH_TRAINING, {"hooks": {name: asdict(record) for name, record in records.items()}})
        case = self.case = make_case(settings, job.data_dirs, place)
        hooks: Any = hooks_class(case)
        self.hooks = hooks
        self._take = self.take_step if self.traces_hook else partial(hooks.train_step, self)
        if settings.loader.synthetic:
            batch = case.synthetic_batch(settings.batch_size)
            batches: Batches = SyntheticBatches(batch, settings, self.world_size)
        else:
            batches = case.train_batches()
        self._batches = batches
        size = EpochSize.of(settings, batches.num_samples, self.world_size)
        self.samples_per_step, self.steps_per_epoch = size.samples_per_step, size.steps_per_epoch
        self._learning_rate = size.learning_rate(settings, case.peak_learning_rate())
        model_class = self.timed(Event.CONVERT_MODEL, self.build_model)
        if (stored := case.initial_weights()) is not None:
            self._set_initial_weights(*stored)
        initial = self.weights(trained=True)
        structure = array_hash(initial, values=False)
        weights = array_hash(initial) if place.rank == 0 else None
        optimizer = {"sgd": self.sgd_class, "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}[settings.optimizer.name]
        self.num_parameters = sum(array.size for array in initial.values())
        del initial
        self.flops_per_sample_formula = case.flops_per_sample()
        self.build_training()
        self.checkpoints = CheckpointDirectory(job.checkpoint_dir, place, self.exchange_max)
        if not settings.loader.synthetic:
            self.eval_batches = self.timed(Event.INIT_EVALUATION, case.eval_batches)
        versions = {module.__name__: module.__version__ for module in self.libraries}
        processor = platform.processor() or platform.machine() if job.device_type == "cpu" else None
        return Started(
            framework=self.framework,
            framework_version=versions.pop(self.libraries[0].__name__),
            device_type=job.device_type,
            device_name=self.device_name or processor or None,
            device_index=self.device_index,
            world_size=self.world_size,
            hostname=socket.gethostname(),
            threads=self.threads,
            seed=settings.seed,
            precision=self.precision,
            model_class=model_class,
            num_parameters=self.num_parameters,
            parameter_hash=structure,
            standard_parameter_hash=structure,
            checkpoint_hash=weights,
            optimizer_class=optimizer,
            standard_optimizer_class=optimizer,
            compute_type=self.compute_type(),
            train_samples=batches.num_samples,
            eval_samples=None if self.eval_batches is None else self.eval_batches.num_samples,
            hooks={name: record.place for name, record in records.items()},
            hook_lines={name: record.num_lines for name, record in records.items()},
            library_versions={"python": platform.python_version(), "numpy": np.__version__, **versions},
            own_part_unknown=self.own_part_unknown,
        )

    def _set_initial_weights(self, path: Path, arrays: Mapping[str, Any]) -> None:
        """Set the weights that the case starts from. Raises DataError: they are of another model."""
        model = Comparison(self)
        weights = model.arrays_of(trained=True)
        for name, own in weights.items():
            reference = reference_name(name, model)
            if reference not in arrays or arrays[reference].shape != own.shape:
                raise DataError(f"{path}: has no {reference} of shape {own.shape}: is it of this case's model?")
            weights[name] = arrays[reference]
        model.load({**model.statistics(), **weights})

    def step(self, batches: list[Any]) -> Any:
        """Take one optimizer step over some batches and return its loss, without waiting for the device."""
        loss = self._take(batches, self.learning_rate())
        self.steps_done += 1
        return loss

    def learning_rate(self) -> float:
        return self._learning_rate(self.steps_done)

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        """Yield the batches of each step on the device; the next step's are copied while one is computed."""
        self.phase = f"epoch {epoch}"
        count = self.settings.gradient_accumulation_steps
        batches = log_bad_samples(self._batches.epoch(epoch, skip_steps * count), self._batches, self.log)
        ahead: list[Any] | None = None
        for chosen in steps_of(batches, count):
            copied = [self.to_device(batch) for batch in chosen]
            if ahead is not None:
                yield ahead
            ahead = copied
        if ahead is not None:
            yield ahead

    def evaluate_on(self, batches: Batches) -> dict[str, float]:
        sums: dict[str, list[Any]] = {}
        with self.evaluating():
            for batch in islice(batches.epoch(0), self.settings.evaluate.max_batches):
                for name, value in self.eval_sums(batch).items():
                    sums.setdefault(name, []).append(value)
        if not sums:
            raise DataError("the case's eval_batches yielded nothing; check the evaluation data")
        names = sorted(sums)
        means = self.mean([math.fsum(map(float, sums[name])) for name in names])
        return self.case.metrics({name: mean * self.world_size for name, mean in zip_strict(names, means)})

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        gathered = self.gather(values)
        return lambda: [float(value) for value in gathered().max(0)]

    def mean(self, values: list[float]) -> list[float]:
        if self.world_size == 1 or not values:
            return values
        return [float(value) for value in self.gather(values)().mean(0)]

    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, and return the progress of training.

        Raises RunError: it is damaged, or was written by another number of ranks.
        """
        world_size = self.place.world_size
        with reading(checkpoint):
            record = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
            with np.load(checkpoint / "state.npz", allow_pickle=False) as stored:
                arrays = dict(stored)
            if (saved := record["world_size"]) != world_size:
                problem = f"the checkpoint {checkpoint} has world_size {saved}, this job {world_size}"
                raise RunError(f"{problem}; use the same, or train again")
            self.set_state(arrays)
            progress = Progress(**record["progress"])
        self.steps_done = progress.global_steps
        return progress

    def save(self, progress: Progress) -> str:
        """Write a checkpoint by the lowest of the ranks that share the directory; return its name when it is complete.

        Raises RunError: it could not be written, as on a full disk.
        """
        name, place, directory = name_of(progress.global_steps), self.place, self.checkpoints
        temporary = directory.temporary(name)
        try:
            if directory.leader() == place.rank:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                np.savez(temporary / "state.npz", allow_pickle=False, **self.state())
                record = {"world_size": place.world_size, "writer": place.rank, "progress": asdict(progress)}
                (temporary / "progress.json").write_text(json.dumps(record), encoding="utf-8")
                directory.complete(name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"the checkpoint {temporary} could not be written: {error}") from error
        self.mean([0.0])
        return name

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        progress = Progress() if start is None else self.load(start)
        before = self.weights(trained=True)
        replay = repeat_steps(self, progress, num_steps)
        if end is not None:
            replayed, buffers = self.weights(trained=True), self.weights(trained=False)
            self.load(end)
            replay.update = _update_squares(before, replayed, self.weights(trained=True))
            zeros = dict.fromkeys(buffers, np.zeros(()))
            if self.place.rank == 0:  # whose buffers are saved
                replay.state["buffers"] = _update_squares(zeros, buffers, self.weights(trained=False))
        return replay

    def peak_memory_mib(self) -> float | None:
        num_bytes = self.peak_bytes() if self.is_open and self.job.device_type != "cpu" else None
        return None if num_bytes is None else num_bytes / 2**20

    def is_out_of_memory(self, error: BaseException) -> bool:
        text = f"{type(error).__name__}: {error}"
        return any(part in text for part in _OUT_OF_MEMORY)


class Comparison:
    """See :class:`accelmark.train.loop.comparison.Comparison`."""

    def __init__(self, backend: ArrayBackend) -> None:
        self._backend = backend
        self.reference_names = backend.case.reference_names

    def parameters(self) -> dict[str, Array]:
        """Return the trainable weights."""
        return self.arrays_of(trained=True)

    def statistics(self) -> dict[str, Array]:
        """Return the running means and variances."""
        return self.arrays_of(trained=False)

    def arrays_of(self, *, trained: bool) -> dict[str, Array]:
        """Return the trainable weights, or the running means and variances."""
        arrays: dict[str, Array] = {}
        for name, array in self._backend.weights(trained=trained).items():
            renamed, axes = _in_pytorch(name, array.ndim)
            arrays[renamed] = np.ascontiguousarray(array.transpose(axes), np.float32)
        return arrays

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace all parameters and statistics."""
        arrays: dict[str, Array] = {}
        for name, array in {**self._backend.weights(trained=True), **self._backend.weights(trained=False)}.items():
            renamed, axes = _in_pytorch(name, array.ndim)
            arrays[name] = np.ascontiguousarray(weights[renamed].transpose(np.argsort(axes)))
        self._backend.set_weights(arrays)

    def arrays(self, batch: Any) -> dict[str, Array]:
        """Return a batch on the host."""
        return {name: np.asarray(tensor) for name, tensor in batch.items()}

    def batch(self, arrays: Mapping[str, Array]) -> Any:
        """Return a batch on the device."""
        return self._backend.to_device(dict(arrays))

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return the model's output in the case's loss."""
        before = self._backend.weights(trained=False)
        outputs = np.array(self._backend.training_outputs(dict(arrays)), np.float32)
        self._backend.set_weights(before)
        return outputs


def _in_pytorch(name: str, num_dimensions: int) -> tuple[str, tuple[int, ...]]:
    layer, dot, last = name.rpartition(".")
    axes = _KERNEL_AXES.get(num_dimensions) if last == "kernel" else None
    return f"{layer}{dot}{_NAMES.get(last, last)}", axes or tuple(range(num_dimensions))


def outputs_of_loss(case: ArrayCase, model: Any, batch: Batch) -> Any:
    """Return what ``model`` returns where the case computes its loss. Raises RunError: the loss does not call it."""
    outputs: list[Any] = []

    def recorded(*inputs: Any) -> Any:
        outputs.append(model(*inputs))
        return outputs[-1]

    case.loss(recorded, batch)
    if not outputs:
        raise RunError(f"{type(model).__name__} was not called by loss()")
    return outputs[0]


def _update_squares(before: NamedArrays, replayed: NamedArrays, saved: NamedArrays) -> UpdateSquares:
    """Compare the change of the parameters by replayed steps with that by training, in double precision."""
    squares = [0.0, 0.0, 0.0]
    for name, array in before.items():
        start = array.astype(np.float64)
        changes = (replayed[name] - start, saved[name] - start)
        for index, change in enumerate((*changes, changes[0] - changes[1])):
            squares[index] += float(np.square(change).sum())
    return UpdateSquares(replayed=squares[0], saved=squares[1], difference=squares[2])


def array_hash(arrays: NamedArrays, *, values: bool = True) -> str:
    """SHA-256 over names, shapes, types and ``values`` of all parameters, in order of their names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        if values:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
