"""The devices of a JAX job: opening them, joining the ranks, arrays over all of them, memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accelmark.frameworks.array_backend import processor_name
from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import Precision

_DATA: Final = "data"
_MATRIX_PRECISION: Final = {"fp32": "float32", "tf32": "tensorfloat32"}


@final
class Devices:
    """One device of each rank, as a mesh of one axis over which batches are split."""

    def __init__(self, device_type: str, precision: Precision, threads: int, place: RankPlace) -> None:
        """Set threads and precision before JAX opens the device, and join the other ranks."""
        os.environ["NPROC"] = str(threads)  # the size of XLA's thread pool on the CPU
        jax.config.update("jax_platforms", device_type)
        if precision in _MATRIX_PRECISION:
            jax.config.update("jax_default_matmul_precision", _MATRIX_PRECISION[precision])
        self._is_one_of_many = place.world_size > 1
        if self._is_one_of_many:
            if device_type == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                os.environ[COORDINATOR],
                num_processes=place.world_size,
                process_id=place.rank,
                local_device_ids=None if device_type == "cpu" else [place.local_rank],
            )
        self.own = jax.local_devices()[0]
        self.mesh = Mesh(np.array(jax.devices() if self._is_one_of_many else [self.own]), (_DATA,))
        self._whole, self._split = (NamedSharding(self.mesh, spec) for spec in (PartitionSpec(), PartitionSpec(_DATA)))

    @property
    def name(self) -> str | None:
        """The device's name; on the CPU that of the processor."""
        return self.own.device_kind if self.own.platform != "cpu" else processor_name()

    def batch(self, arrays: Any) -> Any:
        """Return this rank's batch as its part of the batch of all ranks."""
        if not self._is_one_of_many:  # a call copies them; device_put, and an array of all ranks, take 0.1 ms of Python
            return arrays
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(self._split, array), arrays)

    def replicated(self, tree: Any) -> Any:
        """Return a tree of equal arrays on every rank as arrays replicated over all devices."""
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self._whole), tree)

    def local(self, tree: Any) -> Any:
        """Return this rank's copy of replicated arrays."""
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)

    def reduced(self, values: list[float], reduce: Callable[..., jax.Array]) -> Callable[[], list[float]]:
        """Start a reduction of each value over all ranks in double precision; the returned function waits for it."""
        with jax.enable_x64(True):
            mine = jax.make_array_from_process_local_data(self._split, np.array([values], np.float64))
            joint = jax.jit(lambda array: reduce(array, axis=0), out_shardings=self._whole)(mine)
        return lambda: [float(value) for value in np.asarray(joint.addressable_data(0))]

    def peak_memory_mib(self) -> float | None:
        """Return the largest allocation on this rank's device; None on the CPU, where JAX does not count."""
        statistics = self.own.memory_stats()
        return None if not statistics else float(statistics["peak_bytes_in_use"]) / 2**20
