"""The device of a TensorFlow rank, and reductions over all ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
import tensorflow as tf

from accelmark.frameworks.array_backend import processor_name
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import Precision

_JOIN_S: Final = 300.0
_LEAVE_S: Final = 60.0
_RETRY_S: Final = 0.2
_KINDS: Final = {"ring": "RING", "nccl": "NCCL"}


@final
class Ranks:
    """One device of each rank; several ranks are the workers of a ``MultiWorkerMirroredStrategy``."""

    def __init__(self, job: JobSpec, precision: Precision, threads: int, place: RankPlace) -> None:
        """Set threads and precision before TensorFlow opens the device, and join the other ranks."""
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
        self._place = place
        self.is_cpu = job.device_type == "cpu"
        self._open(job, place)
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
        self._gather: Any = tf.function(lambda values: self.run(self._gathered, (values,)), autograph=False)

    def _open(self, job: JobSpec, place: RankPlace) -> None:
        accelerators = tf.config.list_physical_devices("GPU")
        if self.is_cpu:
            tf.config.set_visible_devices([], "GPU")
            return
        if place.local_rank >= len(accelerators):
            raise RequestError(
                f"local rank {place.local_rank} has no {job.device_type}: TensorFlow {tf.__version__} finds "
                f"{len(accelerators)} here; check the driver and that the installed TensorFlow is a build for it"
            )
        device = accelerators[place.local_rank]
        tf.config.set_visible_devices(device, "GPU")
        tf.config.experimental.set_memory_growth(device, True)

    @property
    def name(self) -> str | None:
        """The name of the device or processor."""
        if self.is_cpu:
            return processor_name()
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        return str(details["device_name"]) if "device_name" in details else None

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

    def _gathered(self, values: Any) -> Any:
        if self._strategy is None:
            return values[None]
        return tf.distribute.get_replica_context().all_gather(values[None], axis=0)

    def gather(self, values: Any) -> np.ndarray:
        """Return the arrays of all ranks, of equal shape, along a new first dimension."""
        return np.asarray(self._gather(tf.convert_to_tensor(values)))

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_cpu:  # on the CPU, a graph is done when its call returns
            with tf.device("GPU:0"):
                tf.raw_ops.SyncDevice()

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where TensorFlow does not count."""
        return None if self.is_cpu else float(tf.config.experimental.get_memory_info("GPU:0")["peak"]) / 2**20

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
