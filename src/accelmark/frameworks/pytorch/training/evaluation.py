"""Evaluate over all ranks, every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from accelmark.frameworks.pytorch.batches import mover
from accelmark.frameworks.pytorch.case import Batch, Batches, TrainCase
from accelmark.frameworks.pytorch.state import Training
from accelmark.spec.errors import DataError


@torch.no_grad()
def evaluate(
    case: TrainCase, training: Training, batches: Batches, control: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the case's metrics over the batches of all ranks.

    The sums stay on the device until the end, and are added in double precision on the CPU.
    """
    settings = case.settings
    sharded = settings.is_sharded
    model = training.module
    if control is not None and dist.get_world_size(control) > 1:  # all evaluate with rank 0's running statistics
        for buffer in model.buffers():
            if not hasattr(buffer, "placements"):
                dist.broadcast(buffer, src=0)
    was_training = model.training
    model.eval()
    move = mover(case.place.device, channels_last=settings.channels_last)
    summed: dict[str, list[Tensor]] = {}
    try:
        limited = islice(batches.epoch(0), settings.evaluate.max_batches)
        for batch, counts in _in_step(limited, case, control) if sharded else ((batch, True) for batch in limited):
            sums = training.forward(case, move(batch), case.eval_sums)
            if counts and sums is not None:
                for name, value in sums.items():
                    summed.setdefault(name, []).append(value.detach())
    finally:
        model.train(was_training)
    rows = {name: torch.cat(values).cpu() for name, values in summed.items() if values[0].ndim == 2}
    totals = {
        name: float(torch.stack(values).cpu().double().sum()) for name, values in summed.items() if name not in rows
    }
    del summed
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
    return case.metrics(joint) | (row_metrics(case.row_metrics, rows, control, copies) if has_rows else {})


def row_metrics(
    compute: Callable[[dict[str, npt.NDArray[np.float64]]], dict[str, float]],
    rows: dict[str, Tensor],
    control: dist.ProcessGroup | None,
    copies: int,
) -> dict[str, float]:
    """Return the metrics of the rows of all ranks; ``copies`` consecutive ranks hold the same rows.

    Rank 0 alone collects the rows, which may be gigabytes, and computes; its DataError is raised on every rank.
    """
    if control is None:
        return compute(_joined([rows]))
    is_first = dist.get_rank() == 0
    collected: list[Any] = [None] * dist.get_world_size(control)
    dist.gather_object(rows, collected if is_first else None, dst=0, group=control)
    result: list[Any] = [None]
    if is_first:
        try:
            result = [compute(_joined(collected[::copies]))]
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
