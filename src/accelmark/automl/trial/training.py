"""A trial on one rank: its network in PyTorch, as a case of the training driver, and the run of the driver.

On several devices of a host a process trains on each, gradients averaged, alive as long as the worker.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import operator
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.functional import cross_entropy

from accelmark.automl import records
from accelmark.automl.config import DatasetConfig, TrainingConfig, WeightMode
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.model import graph
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import INPUT, Network, infer_shapes
from accelmark.automl.model.morphs import apply_morph
from accelmark.automl.model.seeds import small
from accelmark.automl.model.weights import Array, Weights, carry_weights, fitted_weights
from accelmark.automl.records import TrainedWeights, TrialEnded, TrialListener, TrialOrder, TrialResult
from accelmark.automl.search.schedule import stops_early
from accelmark.datasets.images import Images, LabeledArrays
from accelmark.frameworks.pytorch.backend import InProcess, PyTorchBackend
from accelmark.frameworks.pytorch.batches import permutation
from accelmark.frameworks.pytorch.case import Batch, Place, TrainCase
from accelmark.frameworks.pytorch.training.platform import join_ranks
from accelmark.spec.errors import DataError, RunError
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.log.events import EndReason, Evaluation, Event, Finished, Started, StepWindow
from accelmark.spec.log.perflog import finite
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings import training as settings_of
from accelmark.train.batches import Share
from accelmark.train.loop.ends import End
from accelmark.train.loop.rank import run_training
from accelmark.train.loop.window import RunTotals

_EVALUATION_BATCH: Final = 512
_CALIBRATION_IMAGES: Final = 256
_COMPUTED_IN: Final = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_STATUS: Final[Mapping[EndReason, records.TrialStatus]] = {
    "max_epochs": "finished",
    "early_stop": "finished",
    "cancelled": "cut",
    "nonfinite_loss": "diverged",
    "out_of_memory": "out-of-memory",
}
_USEFUL: Final = ("finished", "cut")
_START_S: Final = 300.0
_POLL_S: Final = 0.2


class _Apply(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function: Final = function

    def forward(self, *sources: Tensor) -> Tensor:
        return self.function(*sources)


def _build(layer: graph.Layer, source: graph.Shape) -> nn.Module:
    match layer:
        case graph.Convolution(filters=filters, kernel=kernel):
            return nn.Conv2d(source[0], filters, kernel, layer.stride, layer.padding, bias=layer.bias)
        case graph.BatchNorm():
            return (nn.BatchNorm2d if len(source) == 3 else nn.BatchNorm1d)(source[0], eps=layer.epsilon)
        case graph.ReLU():
            return nn.ReLU()
        case graph.Add():
            return _Apply(lambda *sources: reduce(operator.add, sources))
        case graph.Concat():
            return _Apply(lambda *sources: torch.cat(sources, dim=1))
        case graph.MaxPool():
            return nn.MaxPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case graph.AveragePool():
            return nn.AvgPool2d(layer.kernel, stride=layer.stride, padding=layer.padding)
        case graph.GlobalPool():
            return _Apply(lambda image: image.mean(dim=(2, 3)))
        case graph.Dense():
            return nn.Linear(source[0], layer.units, bias=layer.bias)
        case graph.Dropout():
            return nn.Dropout(layer.rate)
        case graph.Flatten():
            return nn.Flatten()
        case graph.Softmax():
            return nn.Softmax(dim=1)


class GraphModule(nn.Module):
    """Executes the nodes of ``network`` except the final softmax; convolutions are initialized by He (fan-out)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        shapes = infer_shapes(network)
        self.network: Final = network
        self.layers = nn.ModuleDict({node.name: _build(node.layer, shapes[node.inputs[0]]) for node in network.nodes})
        self._last_use: Final = {source: node.name for node in network.nodes for source in node.inputs}
        for layer in self.layers.values():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes) of images (batch, channels, height, width)."""
        values: dict[str, Tensor] = {INPUT: images}
        for node in self.network.nodes[:-1]:
            values[node.name] = self.layers[node.name](*[values[source] for source in node.inputs])
            for source in set(node.inputs):
                if self._last_use[source] == node.name:
                    del values[source]
        return values[self.network.nodes[-1].inputs[0]]


def to_weights(module: GraphModule) -> dict[str, Array]:
    """Copy parameters and running statistics into float32 arrays by ``<node>.<name>``."""
    state = {key: value for key, value in module.layers.state_dict().items() if "num_batches_tracked" not in key}
    return {key: value.to("cpu", torch.float32).numpy().copy() for key, value in state.items()}


def load_weights(module: GraphModule, weights: Weights) -> None:
    """Copy arrays into a module; raises RuntimeError, in one line, where names or shapes differ."""
    state = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in weights.items()}
    try:
        module.layers.load_state_dict(state)
    except RuntimeError as error:  # only the first line of an error is recorded, and PyTorch's names no weight
        raise RuntimeError(shorten(str(error), 400)) from error


def channel_statistics(module: GraphModule, images: Tensor, name: str) -> tuple[Array, Array]:
    """Return mean and biased variance per channel of a node's output in training mode; the module is left unchanged."""
    copied, outputs = deepcopy(module).train(), list[Tensor]()
    copied.layers[name].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    with torch.no_grad():
        copied(images)
    axes = tuple(axis for axis in range(outputs[0].dim()) if axis != 1)
    variance, mean = torch.var_mean(outputs[0].float(), dim=axes, correction=0)
    return mean.cpu().numpy(), variance.cpu().numpy()


class ImageBatches:
    """One rank's share of a set of images; training images are augmented."""

    def __init__(self, images: Images, batch_size: int, place: Place, *, train: bool) -> None:
        self._images, self._place, self._train = images, place, train
        self._share = Share(len(images), batch_size, place, train)
        self.num_samples = self._share.num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield raw images (uint8) and labels from batch ``skip`` on."""
        place = self._place
        generator = np.random.default_rng([place.shared_seed, number, place.rank]) if self._train else None
        for position, indices in enumerate(self._share.indices(permutation, number)):
            pixels = np.ascontiguousarray(self._images.batch(indices, generator))
            if position >= skip:
                yield {"images": torch.from_numpy(pixels), "labels": torch.from_numpy(self._images.labels[indices])}


class TrialCase(TrainCase):
    """One trial's network. Images are scaled on the device, so that they are transferred as bytes."""

    def __init__(self, trial: _Trial, *args: Any) -> None:
        super().__init__(*args)
        self._trial: Final = trial
        trial.case = self
        self._mean, self._deviation = (
            torch.tensor(values, device=self.place.device).view(1, -1, 1, 1)
            for values in (trial.data.mean, trial.data.deviation)
        )

    def build_model(self) -> nn.Module:
        """Build the network, with its parent's weights where there are any, carried through the order's morphs."""
        order, network, carried = self._trial.order, self._trial.order.parent_network, self._trial.weights
        built = self._trial.module = GraphModule(order.network)
        if network is None or carried is None:
            return built
        for morph in order.morphs:
            statistics = None
            if morph.kind == "deepen":  # mean and variance for some training images
                module = GraphModule(network)
                load_weights(module, carried)
                indices = np.arange(min(_CALIBRATION_IMAGES, len(self._trial.data.training)))
                images = torch.from_numpy(self._trial.data.training.batch(indices, None))
                statistics = channel_statistics(module, self._scaled(images), morph.at)
            child = apply_morph(network, morph)
            carried = carry_weights(network, child, morph, carried, statistics)
            network = child
        load_weights(built, fitted_weights(order.network, carried))
        self._trial.started_from = "carried"
        return built

    def train_batches(self) -> ImageBatches:
        return ImageBatches(self._trial.data.training, self.settings.batch_size, self.place, train=True)

    def eval_batches(self) -> ImageBatches:
        return ImageBatches(self._trial.data.validation, self.settings.eval_batch_size, self.place, train=False)

    def synthetic_batch(self, size: int) -> Batch:
        """Return black images, with which the driver counts operations."""
        images = torch.zeros(size, *self._trial.order.network.input_shape, dtype=torch.uint8)
        return {"images": images, "labels": torch.zeros(size, dtype=torch.int64)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the smoothed cross-entropy, and report the images of all ranks to the listener."""
        scores: Tensor = model(self._scaled(batch["images"]))
        smoothing = self._trial.order.training.label_smoothing
        loss = cross_entropy(scores.float(), batch["labels"], label_smoothing=smoothing)
        if not loss.is_meta:
            self._trial.listener.report(len(scores) * self.place.world_size)
        return loss

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of cross-entropy, correct predictions and images."""
        scores, labels = model(self._scaled(batch["images"])), batch["labels"]
        self._trial.listener.report(len(scores) * self.place.world_size)
        return {
            "loss": cross_entropy(scores.float(), labels, reduction="sum"),
            "correct": (scores.argmax(dim=1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy, mean loss, and the number of images."""
        number = sums["count"]
        return {"accuracy": sums["correct"] / number, "loss": sums["loss"] / number, "count": number}

    def flops_per_sample(self) -> float:
        """Return the scored matrix work of one image, forward and backward."""
        return float(count(self._trial.order.network, "accelmark").matrix)

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean.to(images.device)) / self._deviation.to(images.device)


@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's rank for all its trials; ``threads`` None is its share of the cores."""

    device_type: str
    ranks: RankPlace = field(default_factory=RankPlace)
    control: dist.ProcessGroup | None = None
    threads: int | None = None


def device_type() -> str:
    """Return the type of this machine's accelerators; ``cpu`` where there are none."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if kind is None else kind.type


def run_trial(
    data: Dataset, place: RankContext, order: TrialOrder, weights: TrainedWeights, listener: TrialListener
) -> TrialEnded:
    """Run a trial as one rank; a trial that fails is reported in its result."""
    hyper, training, images = order.hyperparameters, order.training, len(data.training)
    if hyper.batch_size > images:
        raise DataError(f"a batch of {hyper.batch_size} is larger than the training split of {images} images")
    optimizer = settings_of.OptimizerSettings(
        name="sgd", lr=hyper.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
    )
    final_ratio = training.final_learning_rate / hyper.learning_rate
    # Without a limit in time: the driver would evaluate a trial that reaches one once more.
    settings = settings_of.TrainSettings(
        batch_size=max(1, hyper.batch_size // place.ranks.world_size),
        eval_batch_size=_EVALUATION_BATCH,
        precision=training.precision,
        seed=order.seed,
        threads=place.threads,
        optimizer=optimizer,
        end=settings_of.EndSettings(max_epochs=order.epochs),
        evaluate=settings_of.EvaluateSettings(every_epochs=1),
        schedule=settings_of.ScheduleSettings(name="linear", final_lr_ratio=final_ratio),
    )
    work = TrainJob(unit="image", units_per_sample=1, target=None, reference_loss=None, settings=settings)
    return _Trial(data, place, order, weights, listener, work).run()


@dataclass
class _Trial:
    """Receives the driver's events, reports epochs, and requests the end; decides equally on all ranks."""

    data: Dataset
    place: RankContext
    order: TrialOrder
    weights: TrainedWeights
    """Of the order's parent network; None: from scratch."""
    listener: TrialListener
    work: TrainJob
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    interruptible: bool = False
    backend: PyTorchBackend | None = None
    case: TrialCase | None = None
    module: GraphModule | None = None
    """The trained network without wrappers, once it is built."""
    started_from: WeightMode = "from-scratch"
    started: Started | None = None
    best: TrainedWeights = None
    best_accuracy: float = -1.0
    epoch: int = 1
    images: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    data_wait_s: float = 0.0
    validation_losses: list[float] = field(default_factory=list)

    def run(self) -> TrialEnded:
        totals = RunTotals(process_start=self.began, job=self.work)
        training = run_training(self.work, self._open, self, totals, self, self.evaluated)
        end, backend = training.end, training.backend
        finished = totals.finished(end)
        if finished.global_steps > self.steps:  # a part of an epoch
            self._report(finished, in_step=training.in_step)
        status = _STATUS.get(end.reason, "crashed")
        outcome: dict[str, Any] = {"status": status, "reason": end.message or end.reason}
        if status in _USEFUL:
            outcome |= {"reason": ""} | self._held_out()
        if backend is not None:
            backend.close(together=training.in_step)
        return TrialEnded(self._result(outcome, finished), self.best if outcome["status"] in _USEFUL else None)

    def _open(self) -> PyTorchBackend:
        """Open the driver's backend; network and digest replace the case's folder and its hash."""
        network, kind, folder = self.order.network, self.place.device_type, Path(__file__).parent
        job = JobSpec(
            key=CaseKey(model="trial", framework="pytorch", hardware=kind, nproc=self.place.ranks.world_size),
            round=1,
            case=FolderRef(name=network.name, path=folder, package="accelmark.automl.trial", sha256=network.digest),
            case_version=1,
            vendor=kind,
            device_type=kind,
            framework_module=None,
            collective_backend=dist.get_default_backend_for_device(torch.device(kind)),
            data_dirs={},
            checkpoint_dir=Path("checkpoints"),
            work=self.work,
        )

        provided = InProcess(partial(TrialCase, self), self.place.control)
        self.backend = PyTorchBackend(job, self.work, self.place.ranks, self, provided)
        return self.backend

    @property
    def requested(self) -> str | None:
        """The reason to stop; polled by the driver after each step."""
        if self.listener.should_stop():
            return "the search"
        limit_s = self.order.limit_s
        return "the end of its time" if limit_s is not None and time.monotonic() >= self.began + limit_s else None

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Receive an event of the driver."""
        if event == Event.TRAIN_START:
            self.since = time.monotonic()
        elif isinstance(value, Started):
            self.started = value
        elif isinstance(value, StepWindow):
            self.losses += [math.nan if loss is None else loss for loss in value.losses]
            self.data_wait_s += sum(value.data_wait_ms) / 1e3

    def evaluated(self, evaluation: Evaluation) -> End | None:
        """Report the epoch that this evaluation closes, keep its weights if they are the best, and decide on an end."""
        self._report(evaluation)
        accuracy, loss = evaluation.metrics["accuracy"], evaluation.metrics["loss"]
        if loss is None or not math.isfinite(loss):
            return End("nonfinite_loss", f"the validation loss of epoch {self.epoch - 1} is {loss}")
        if self.module is not None and accuracy is not None and accuracy > self.best_accuracy:
            self.best_accuracy, self.best = accuracy, to_weights(self.module)
        self.validation_losses.append(loss)
        order = self.order
        ends = order.early_stop and stops_early(order.round, self.validation_losses)
        self.since = time.monotonic()
        return End("early_stop") if ends else None

    def _report(self, event: Evaluation | Finished, *, in_step: bool = True) -> None:
        """Report an epoch that an evaluation closes, or the part of one that was trained before the end."""
        now = time.monotonic()
        evaluation = event if isinstance(event, Evaluation) else None
        metrics: Mapping[str, float | None] = evaluation.metrics if evaluation else {}
        evaluating_s = evaluation.duration_s if evaluation else 0.0
        training_s = max(0.0, now - self.since - evaluating_s)
        train_loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        if in_step and self.backend is not None:
            (train_loss,) = self.backend.mean([train_loss])
        report = records.EpochReport(
            epoch=self.epoch,
            begun_s=self.since - self.began,
            ended_s=now - self.began,
            trained_images=event.num_trained_samples - self.images,
            evaluated_images=round(metrics.get("count") or 0),
            steps=event.global_steps - self.steps,
            training_s=training_s,
            data_wait_s=min(self.data_wait_s, training_s),
            evaluating_s=evaluating_s,
            train_loss=finite(train_loss),
            validation_loss=finite(metrics.get("loss")),
            validation_accuracy=metrics.get("accuracy"),
            complete=evaluation is not None,
        )
        self.images, self.steps = event.num_trained_samples, event.global_steps
        self.epoch, self.losses, self.data_wait_s, self.since = self.epoch + 1, [], 0.0, now
        self.listener.report(report)

    def _held_out(self) -> dict[str, Any]:
        """Evaluate the best epoch's weights on all ranks; return the fields of the result that this determines."""
        case, module, backend, began = self.case, self.module, self.backend, time.monotonic()
        if case is None or module is None or backend is None or self.best is None:
            return {}
        outcome: dict[str, Any] = {}
        try:
            load_weights(module, self.best)
            images = ImageBatches(self.data.held_out, _EVALUATION_BATCH, case.place, train=False)
            outcome["held_out_accuracy"] = backend.evaluate_on(images)["accuracy"]
        except Exception as error:  # noqa: BLE001 - any failure is recorded; the worker goes on
            reason, message = backend.explain(error)
            outcome["status"] = "out-of-memory" if reason == "out_of_memory" else "crashed"
            outcome["reason"] = f"evaluating the held-out split: {message}"
        return outcome | {"held_out_s": time.monotonic() - began}

    def _result(self, outcome: Mapping[str, Any], finished: Finished) -> TrialResult:
        started, facts = self.started, dict[str, Any]()
        if started is not None:
            # Autocast's type, else the parameters', where fp32 may be TF32; the rules have no width for other types.
            kind = started.compute_type or "unknown"
            precision = started.precision if kind == "float32" else _COMPUTED_IN.get(kind, kind)
            facts |= {"precision": precision, "device": started.device_name}
        return TrialResult(
            **outcome,
            **facts,
            weights=self.started_from,
            executed=self.module.network.digest if self.module is not None else None,
            trained_images=finished.num_trained_samples,
            flops_per_image=finished.flops_per_sample,
            computing_s=finished.pure_training_computing_time,
            peak_memory_mib=finished.peak_device_memory_mib,
            host=platform.node(),
            ranks=self.place.ranks.world_size,
            seconds=time.monotonic() - self.began,
        )


def warm_up(place: RankContext) -> None:
    """Train a tiny network, so that one-time initialization is not part of a trial."""
    size, classes = 8, 2
    number = 4 * place.ranks.world_size
    images = LabeledArrays(np.zeros((number, 1, size, size), np.uint8), np.arange(number) % classes)
    dataset = Dataset("warm-up", images, images, images, (0.0,), (1.0,), "", "warm-up")
    order = TrialOrder(
        round=1,
        network=small((1, size, size), classes, filters=(2,), name="warm-up"),
        hyperparameters=records.Hyperparameters(batch_size=number, learning_rate=0.1),
        training=TrainingConfig(precision="bf16"),
        epochs=1,
        early_stop=False,
        seed=0,
    )
    run_trial(dataset, place, order, None, TrialListener())


_Arguments = tuple[DatasetConfig, Network, int]
"""Data, seed network, and threads of a rank, 0: its share."""


class RankGroup:
    """Rank processes that train together. If one fails, its trial fails and all are restarted for the next one."""

    def __init__(self, dataset: DatasetConfig, network: Network, *, devices: int, threads: int) -> None:
        self._devices: Final = devices
        self._arguments: Final[_Arguments] = (dataset, network, threads)
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._start()

    def run(self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener) -> TrialEnded:
        """Run a trial on all ranks."""
        self._start()
        self._is_cut.value = False
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # that the rank ended is received next
                pipe.send((order, weights))
        ended: dict[int, TrialEnded] = {}
        while len(ended) < self._devices:
            if listener.should_stop():
                self._is_cut.value = True
            for rank, message in self._receive(_POLL_S):
                match message:
                    case None:
                        self.close()
                        reason = f"rank {rank} of {self._devices} ended"
                        return TrialEnded(TrialResult(status="crashed", reason=reason), None)
                    case TrialEnded(result):
                        ended[rank] = message
                        if result.status in ("crashed", "out-of-memory"):
                            self.close()  # the other ranks would wait for this one
                            return TrialEnded(result, None)
                    case _:
                        listener.report(message)
        return ended[0]

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self.processes:
            self._folder.cleanup()
        self.processes, self._pipes = [], []

    def _start(self) -> None:
        """Start the ranks unless they run; raises RunError where one does not start."""
        if self.processes:
            return
        context = multiprocessing.get_context("spawn")
        self._is_cut = context.RawValue(ctypes.c_bool, False)
        self._folder = tempfile.TemporaryDirectory(prefix="accelmark-ranks-", ignore_cleanup_errors=True)
        for rank in range(self._devices):
            here, there = context.Pipe()
            place = RankPlace(rank, rank, self._devices, self._devices)
            arguments = (place, self._folder.name, there, self._is_cut, self._arguments)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)
        ready: set[int] = set()
        while len(ready) < self._devices:
            found = dict(self._receive(_START_S))
            if not found or None in found.values():
                self.close()
                rank = next((rank for rank, message in found.items() if message is None), -1)
                raise RunError(f"rank {rank} did not start; see the worker's standard error")
            ready |= found.keys()

    def _receive(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yield messages with their ranks, None from a rank that ended; waits at most ``timeout_s`` for the first."""
        for pipe in wait(self._pipes, timeout_s):
            rank = self._pipes.index(pipe)  # type: ignore[arg-type]
            try:
                yield rank, self._pipes[rank].recv()
            except (EOFError, OSError):
                yield rank, None


def _run_rank(ranks: RankPlace, folder: str, pipe: Connection, is_cut: ctypes.c_bool, given: _Arguments) -> None:
    """Run trials as one rank until the pipe closes."""
    config, network, threads = given
    data = open_dataset(config, network)
    kind = device_type()
    own, store = dist.get_default_backend_for_device(kind), FileStore(f"{folder}/rendezvous", ranks.world_size)
    if kind != "cpu":
        torch.accelerator.set_device_index(ranks.local_rank)
    group = join_ranks(own, ranks, torch.device(kind), needed=True, store=store)
    place = RankContext(kind, ranks, group, threads or None)
    warm_up(place)
    listener = TrialListener(should_stop=lambda: is_cut.value)
    if ranks.rank == 0:  # reports for all ranks
        listener = listener._replace(report=pipe.send)
    pipe.send("ready")
    with suppress(EOFError, OSError):  # the worker ended
        while True:
            order, weights = pipe.recv()
            result, trained = run_trial(data, place, order, weights, listener)
            pipe.send(TrialEnded(result, trained if ranks.rank == 0 else None))
    dist.destroy_process_group()
