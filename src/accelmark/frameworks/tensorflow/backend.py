"""The training backend of TensorFlow: data parallel, one process per device, each step one graph."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import tensorflow as tf

from accelmark.frameworks.array_backend import ArrayBackend, outputs_of_loss
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.frameworks.tensorflow import hooks, layers
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import Precision
from accelmark.train.batches import Arrays, seed_of
from accelmark.train.case import ArrayCase, Batch
from accelmark.train.loop.contract import HostClock, LossReader

_COMPUTE_TYPES: Final = {"bf16": tf.bfloat16, "fp16": tf.float16}
_JOIN_S: Final = 300.0
_LEAVE_S: Final = 60.0
_RETRY_S: Final = 0.2
_FIRST_SCALE: Final = 2.0**15
_GROWTH_STEPS: Final = 2000
"""Steps without overflow after which the loss scale doubles; an overflow halves it (Micikevicius et al. 2017)."""
_KINDS: Final = {"ring": "RING", "nccl": "NCCL"}


class Ranks:
    """One device of each rank; several ranks are the workers of a ``MultiWorkerMirroredStrategy``."""

    def __init__(self, job: JobSpec, precision: Precision, threads: int, place: RankPlace) -> None:
        """Set threads and precision before TensorFlow opens the device, and join the other ranks."""
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
        self._place = place
        self.is_cpu = job.device_type == "cpu"
        accelerators = tf.config.list_physical_devices("GPU")
        if self.is_cpu:
            tf.config.set_visible_devices([], "GPU")
        elif place.local_rank >= len(accelerators):
            raise RequestError(
                f"local rank {place.local_rank} has no {job.device_type}: TensorFlow {tf.__version__} finds "
                f"{len(accelerators)} here; check the driver and that the installed TensorFlow is a build for it"
            )
        else:
            tf.config.set_visible_devices(accelerators[place.local_rank], "GPU")
            tf.config.experimental.set_memory_growth(accelerators[place.local_rank], True)
        self._strategy: Any = None
        self._peers: list[socket.socket] = []
        if place.world_size > 1:
            addresses = self._exchange_addresses()
            cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": place.rank}}
            os.environ["TF_CONFIG"] = json.dumps(cluster)
            kinds = tf.distribute.experimental.CommunicationImplementation
            kind = getattr(kinds, _KINDS.get(job.collective_backend, "AUTO"))
            options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
            self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

        def gathered(values: Any) -> Any:
            return tf.distribute.get_replica_context().all_gather(values[None], axis=0)

        self._gather: Any = tf.function(lambda values: self.run(gathered, (values,)), autograph=False)

    def _exchange_addresses(self) -> list[str]:
        """Return ``HOST:PORT`` of every rank's TensorFlow server; connections to rank 0 stay open until it may end."""
        host, _, port = os.environ[COORDINATOR].rpartition(":")
        if self._place.rank == 0:
            return self._collect_addresses(host, int(port))
        deadline = time.monotonic() + _JOIN_S
        while True:
            try:
                peer = socket.create_connection((host, int(port)), timeout=_JOIN_S)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunError(f"rank 0 does not answer at {host}:{port} ({error})") from error
                time.sleep(_RETRY_S)
        address = peer.getsockname()[0]
        message = {"rank": self._place.rank, "address": f"{address}:{_free_port(address)}"}
        peer.sendall(json.dumps(message).encode() + b"\n")
        self._peers.append(peer)
        addresses: list[str] = json.loads(_line(peer))
        return addresses

    def _collect_addresses(self, host: str, port: int) -> list[str]:
        addresses = {0: f"{host}:{_free_port(host)}"}
        with socket.create_server((host, port)) as server:
            server.settimeout(_JOIN_S)
            while len(addresses) < self._place.world_size:
                try:
                    peer, _ = server.accept()
                except TimeoutError as error:
                    joined = f"{len(addresses)} of {self._place.world_size} ranks"
                    raise RunError(f"only {joined} joined at {host}:{port} in {_JOIN_S:.0f} s") from error
                peer.settimeout(_JOIN_S)
                message = json.loads(_line(peer))
                addresses[message["rank"]] = message["address"]
                self._peers.append(peer)
        everyone = [addresses[rank] for rank in range(self._place.world_size)]
        for peer in self._peers:
            peer.sendall(json.dumps(everyone).encode() + b"\n")
        return everyone

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call ``function`` where :meth:`mean_of` is possible; inside of a ``tf.function``."""
        return function(*arguments) if self._strategy is None else self._strategy.run(function, args=arguments)

    def mean_of(self, tensors: list[Any]) -> list[Any]:
        """Return the mean of each tensor over all ranks, in a function that :meth:`run` calls."""
        if self._strategy is None:
            return tensors
        joint: list[Any] = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, tensors)
        return joint

    def gather(self, values: Any) -> np.ndarray:
        """Return the arrays of all of several ranks, of equal shape, along a new first dimension."""
        return np.asarray(self._gather(tf.convert_to_tensor(values)))

    def leave(self) -> None:
        """Let rank 0, whose server the others need until their end, wait for the ends of their processes."""
        if self._strategy is None:
            return
        self.gather([0.0])
        if self._place.rank == 0:
            for peer in self._peers:
                peer.settimeout(_LEAVE_S)
                with suppress(OSError):
                    peer.recv(1)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _line(peer: socket.socket) -> bytes:
    with peer.makefile("rb") as stream:
        return stream.readline()


def _graph(function: Callable[..., Any]) -> Any:
    """Return a function that is traced once for each shape of its arguments; Python decides while it is traced."""
    return tf.function(function, autograph=False)


class Step:
    """A case's model with its optimizer; gradients are averaged over the ranks."""

    def __init__(self, case: ArrayCase, hooks: Any, dtype: Any, ranks: Ranks) -> None:
        """Build the model, the same on every rank; matrix products compute in ``dtype``."""
        self._case, self._settings, self._ranks, self._hooks = case, case.settings, ranks, hooks
        with layers.building(case.settings.seed, dtype):
            self.model: Any = hooks.convert_model(case.build_model())
        paths = self.model._flatten(predicate=lambda value: isinstance(value, tf.Variable), with_path=True)
        self.variables = {".".join(map(str, path)): variable for path, variable in paths}
        """All variables of the model by their path, for example ``blocks.0.conv1.kernel``."""
        self.parameters = {name: variable for name, variable in self.variables.items() if variable.trainable}
        self._optimizer: Any = None
        self._scale: Any = None
        self.take: Any = _graph(lambda *inputs: ranks.run(partial(hooks.train_step, self), inputs))
        """``take(batches, learning rate, seed) -> (loss, when the gradients were ready: seconds since 1970)``."""
        self.sums: Any = _graph(self._sums)
        self.outputs: Any = _graph(self._outputs)

    def build_optimizer(self) -> None:
        """Make the optimizer's state, and the loss scale of fp16."""
        self._optimizer = self._hooks.create_optimizer(self.parameters)
        if self._settings.precision == "fp16":
            self._scale = tf.Variable(_FIRST_SCALE, trainable=False)
            self._finite_steps = tf.Variable(0.0, trainable=False)

    def state(self) -> dict[str, Any]:
        """Return all variables that a step changes by name."""
        state = {f"model.{name}": variable for name, variable in self.variables.items()}
        if self._optimizer is not None:
            state |= {f"optimizer.{name}": variable for name, variable in self._optimizer.variables().items()}
        if self._scale is not None:
            state |= {"scale.value": self._scale, "scale.finite_steps": self._finite_steps}
        return state

    def take_step(self, batches: list[Batch], rate: Any, seed: Any) -> Any:
        """Apply the mean of all ranks' gradients, clipped, on each rank with its own batches and seed of dropout."""
        layers.set_training(self.model, training=True)
        total: Any = 0.0
        gradients: list[Any] = []
        parameters = list(self.parameters.values())
        with layers.drawing(seed):
            for batch in batches:
                with tf.GradientTape() as tape:
                    loss = self._case.loss(self.model, batch)
                    scaled = loss if self._scale is None else loss * self._scale
                of_batch = [tf.convert_to_tensor(each) / len(batches) for each in tape.gradient(scaled, parameters)]
                gradients = [old + new for old, new in zip_strict(gradients, of_batch)] if gradients else of_batch
                total += loss / len(batches)
        if self._scale is not None:
            gradients = [each / self._scale for each in gradients]
        with tf.control_dependencies(gradients):
            ready = tf.timestamp()
        total, *gradients = self._ranks.mean_of([total, *gradients])
        norm = tf.linalg.global_norm(gradients)
        if self._settings.gradient_clip_norm is not None:
            factor = tf.minimum(1.0, self._settings.gradient_clip_norm / (norm + 1e-6))
            gradients = [each * factor for each in gradients]
        named = dict(zip_strict(self.parameters, gradients))
        if self._scale is None:
            self._optimizer.apply(named, rate)
        else:  # a step whose scaled gradients overflowed is skipped

            def apply() -> float:
                self._optimizer.apply(named, rate)
                return 0.0

            finite = tf.math.is_finite(norm)
            tf.cond(finite, apply, lambda: 0.0)
            steps = self._finite_steps.assign(tf.where(finite, self._finite_steps + 1, 0.0))
            grows = steps >= _GROWTH_STEPS
            self._scale.assign(self._scale * tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5))
            self._finite_steps.assign(tf.where(grows, 0.0, steps))
        return total, ready

    def _sums(self, batch: Batch) -> Mapping[str, Any]:
        layers.set_training(self.model, training=False)
        return self._case.eval_sums(self.model, batch)

    def _outputs(self, batch: Batch) -> Any:
        layers.set_training(self.model, training=True)
        return outputs_of_loss(self._case, self.model, batch)


class TensorFlowBackend(ArrayBackend):
    """One rank's training in TensorFlow."""

    framework, title = "tensorflow", "TensorFlow"
    libraries = (tf,)
    tensor_of = staticmethod(tf.convert_to_tensor)
    array_of = staticmethod(lambda variable: variable.numpy())
    traces_hook = True
    layer_module: ClassVar = layers
    hooks_module: ClassVar = hooks
    _ready: Any

    def open_device(self) -> None:
        self.losses = LossReader(lambda losses: lambda: [float(loss) for loss in losses])
        self._ranks = ranks = Ranks(self.job, self.precision, self.threads, self.place)
        if self.place.world_size > 1:
            if ranks.is_cpu:
                self.clock = HostClock()  # and when the gradients of the last step were ready by it
                self.own_end = lambda: time.monotonic_ns() - int((time.time() - float(self._ready)) * 1e9)
            else:  # a graph is still being computed when its call returns
                self.own_part_unknown = "TensorFlow marks the end of a rank's own part on CPUs only"
        if not ranks.is_cpu:
            self.device_index = self.place.local_rank
            details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
            self.device_name = details.get("device_name")
        elif self.precision == "tf32":
            self.precision = "fp32"
        self._dtype = _COMPUTE_TYPES.get(self.precision, tf.float32)

    def build_model(self) -> str:
        self._step_graph = Step(self.case, self.hooks, self._dtype, self._ranks)
        return type(self._step_graph.model).__name__

    def variables(self, *, trained: bool) -> Mapping[str, Any]:
        variables = self._step_graph.variables.items()
        return {name: variable for name, variable in variables if variable.trainable == trained}

    def assign(self, variable: Any, array: np.ndarray) -> None:
        variable.assign(array)

    def training_outputs(self, batch: Batch) -> Any:
        return self._step_graph.outputs(self.to_device(dict(batch)))

    def disable_dropout(self) -> None:
        for layer in self._step_graph.model.submodules:
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0

    def build_training(self) -> None:
        self.timed(Event.CREATE_OPTIMIZER, self._step_graph.build_optimizer)

    def take_step(self, batches: list[Any], learning_rate: float) -> Any:
        seed = seed_of(self.settings.seed, self.place.rank, self.steps_done)
        halves = tf.constant((seed % 2**31, seed // 2**31), tf.int32)
        loss, self._ready = self._step_graph.take(batches, tf.constant(learning_rate, tf.float32), halves)
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.world_size > 1:
            for variable in self.variables(trained=False).values():
                variable.assign(self._ranks.gather(variable)[0])
        yield

    def eval_sums(self, batch: Arrays) -> Mapping[str, Any]:
        sums: Mapping[str, Any] = self._step_graph.sums(self.to_device(batch))
        return sums

    def state_variables(self) -> Mapping[str, Any]:
        return self._step_graph.state()

    def synchronize(self) -> None:
        if not self._ranks.is_cpu:  # on the CPU, a graph is done when its call returns
            with tf.device("GPU:0"):
                tf.raw_ops.SyncDevice()

    def gather(self, values: list[float]) -> Callable[[], np.ndarray]:
        """Collect the values of all ranks at once."""
        joint = self._ranks.gather(np.array(values))
        return lambda: joint

    def peak_bytes(self) -> float:
        return float(tf.config.experimental.get_memory_info("GPU:0")["peak"])

    def close(self, *, together: bool) -> None:
        if together:
            self._ranks.leave()


open_backend = TensorFlowBackend
