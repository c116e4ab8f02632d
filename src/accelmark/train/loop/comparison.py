"""Take the first optimizer steps of a case from given weights on given batches, and write each step's results.

Every step starts from the weights that the reference job had before it, so that differences of rounding, which the
first steps of a training amplify, do not accumulate; the optimizer's state is the job's own.
Frameworks are compared by these files. Weights have the names and the layout of the reference framework: a case's file
for another framework declares how its names are converted (``reference_names``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from accelmark.spec.equivalence import INITIAL_FILE, batches_file, results_file
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import CompareJob
from accelmark.spec.parallelism import mesh_of
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.tensor_file import Array, read_tensors, write_tensors
from accelmark.train.loop.contract import Backend
from accelmark.train.loop.ends import End

_MAX_OUTPUTS: Final = 2**22
"""Largest number of output values of a batch that are written."""


class Comparison(Protocol):
    """A backend's model as NumPy arrays, returned by ``Backend.comparison``, which also turns dropout off."""

    reference_names: Mapping[str, str]
    """Regular expression -> replacement, applied in order to this framework's names of weights."""

    def parameters(self) -> dict[str, Array]:
        """Return the trainable weights as float32, in the layout of PyTorch's layers; all ranks call it together."""

    def statistics(self) -> dict[str, Array]:
        """Return other state of the layers as float32, for example the running means of batch normalization."""

    def load(self, weights: Mapping[str, Array]) -> None:
        """Set all parameters and statistics from arrays as the two methods above return them."""

    def arrays(self, batch: object) -> dict[str, Array]:
        """Return a batch of ``Backend.open_epoch`` as arrays; only the reference framework needs it."""

    def batch(self, arrays: Mapping[str, Array]) -> object:
        """Return a batch for ``Backend.step`` from this rank's arrays."""

    def outputs(self, arrays: Mapping[str, Array]) -> Array:
        """Return the model's outputs in training mode for this rank's arrays, as float32, and change no state."""


def take_first_steps(work: CompareJob, backend: Backend, place: RankPlace) -> End:
    """Take ``work.num_steps`` optimizer steps, and write the results of each."""
    if not hasattr(backend, "comparison"):
        raise RequestError("the backend of this framework has no comparison(): it cannot be compared with another one")
    comparison: Comparison = backend.comparison()
    settings = work.train.settings
    num_parts = settings.num_data_ranks(place.world_size)
    num_own, rest = divmod(work.num_batches, num_parts)
    if rest:
        raise RequestError(f"{work.num_batches} batches of a step cannot be divided among {num_parts} ranks")
    if work.reference is None:
        _export(work, backend, comparison)
    first = mesh_of(settings.parallelism, place.world_size, place.local_world_size).data_rank(place.rank) * num_own
    for step in range(1, work.num_steps + 1):
        if step == 1:
            before = read_tensors(work.inputs / INITIAL_FILE)
        else:  # as the reference job had it
            done = read_tensors((work.reference or work.results) / results_file(step - 1, 0))
            parts = ((name.partition("/"), array) for name, array in done.items())
            before = {name: array for (kind, _, name), array in parts if kind in ("weights", "statistics")}
        _load(before, comparison)
        batches = _batches(work, step)[first : first + num_own]
        results = {
            f"outputs/{first + number}": comparison.outputs(arrays).reshape(-1)[:_MAX_OUTPUTS]
            for number, arrays in enumerate(batches)
        }
        loss = backend.step([comparison.batch(arrays) for arrays in batches])
        read = backend.losses.fetch([backend.losses.keep(loss)])
        results["loss"] = np.array(backend.mean(read())[0], np.float64)
        for name, array in comparison.parameters().items():
            results[f"weights/{reference_name(name, comparison)}"] = array
        if place.world_size == 1:  # of several ranks, each has the statistics of its own batches
            for name, array in comparison.statistics().items():
                results[f"statistics/{reference_name(name, comparison)}"] = array
        if place.rank:
            results = {name: array for name, array in results.items() if name.startswith("outputs/")}
        write_tensors(work.results / results_file(step, place.rank), results)
    return End("max_steps")


def _export(work: CompareJob, backend: Backend, comparison: Comparison) -> None:
    write_tensors(work.inputs / INITIAL_FILE, {**comparison.parameters(), **comparison.statistics()})
    step = epoch = 0
    while step < work.num_steps:
        for batches in backend.open_epoch(epoch, 0):
            step += 1
            arrays = [comparison.arrays(batch) for batch in batches]
            named = {f"{n}/{name}": array for n, batch in enumerate(arrays) for name, array in batch.items()}
            write_tensors(work.inputs / batches_file(step), named)
            if step == work.num_steps:
                break
        epoch += 1


def _batches(work: CompareJob, step: int) -> list[dict[str, Array]]:
    batches: list[dict[str, Array]] = [{} for _ in range(work.num_batches)]
    for name, array in read_tensors(work.inputs / batches_file(step)).items():
        number, _, array_name = name.partition("/")
        batches[int(number)][array_name] = array
    return batches


def reference_name(name: str, comparison: Comparison) -> str:
    """Return the reference framework's name of a weight."""
    for pattern, replacement in comparison.reference_names.items():
        name = re.sub(pattern, replacement, name)
    return name


def _load(arrays: Mapping[str, Array], comparison: Comparison) -> None:
    targets = {**comparison.parameters(), **comparison.statistics()}
    names = {reference_name(name, comparison): name for name in targets}
    own = {name: targets[mine].shape for name, mine in names.items()}
    given = {name: array.shape for name, array in arrays.items()}
    if wrong := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
        shapes = f"{wrong[0]} has shape {given.get(wrong[0])} in the reference, {own.get(wrong[0])} here"
        problem = f"reference_names of the case's file does not match {len(wrong)} weights"
        raise RunError(f"{problem}: {shapes} (None: there is no such weight)")
    comparison.load({names[name]: array for name, array in arrays.items()})
