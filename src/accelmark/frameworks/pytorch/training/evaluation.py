"""Evaluate over all ranks, every sample exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import Batch, Batches, TrainCase
from accelmark.frameworks.pytorch.data.feed import mover
from accelmark.frameworks.pytorch.state import Training
from accelmark.spec.errors import DataError


@torch.no_grad()
def evaluate(
    case: TrainCase, training: Training, batches: Batches, control: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the case's metrics over the batches of all ranks.

    The sums stay on the device until the end, and are added in double precision on the CPU.

    Raises:
        DataError: no rank has evaluation data.
    """
    settings = case.settings
    sharded = settings.is_sharded
    model = training.module
    share_buffers(model, control)
    was_training = model.training
    model.eval()
    move = mover(case.place.device, channels_last=settings.channels_last)
    found: dict[str, list[Tensor]] = {}
    try:
        given = islice(batches.epoch(0), settings.evaluate.max_batches)
        for batch, counts in _in_step(given, case, control) if sharded else ((batch, True) for batch in given):
            sums = training.forward(case, move(batch), case.eval_sums)
            if counts and sums is not None:
                for name, value in sums.items():
                    found.setdefault(name, []).append(value.detach())
    finally:
        model.train(was_training)
    rows = {name: torch.cat(values).cpu().double() for name, values in found.items() if values[0].ndim == 2}
    totals = {
        name: float(torch.stack(values).cpu().double().sum()) for name, values in found.items() if name not in rows
    }
    mesh = case.place.mesh
    # Of a pipeline, the last stage has the sums; those over parts of sequences add up.
    copies = mesh.ranks_per_sample // (mesh.pp * mesh.cp)
    totals = {name: value / copies for name, value in _over_ranks(totals, control).items()}
    if not totals:
        raise DataError("the case's eval_batches yielded nothing on any rank; check the evaluation data")
    return case.metrics(totals) | case.row_metrics(_rows_of_ranks(rows, control, copies))


def metrics_of(case: TrainCase, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of one batch from the result of the case's ``eval_sums``."""
    rows = {name: value.cpu().double().numpy() for name, value in sums.items() if value.ndim == 2}
    return case.metrics({name: float(value) for name, value in sums.items() if name not in rows}) | case.row_metrics(
        rows
    )


def _in_step(
    given: Iterator[Batch], case: TrainCase, control: dist.ProcessGroup | None
) -> Iterator[tuple[Batch, bool]]:
    """Yield (batch, counts) the same number of times on every rank, as sharded models need."""
    filler = case.synthetic_batch(1)
    while True:
        batch = next(given, None)
        some = torch.tensor([float(batch is not None)])
        if control is not None:
            dist.all_reduce(some, op=dist.ReduceOp.MAX, group=control)
        if not some.item():
            return
        yield (filler, False) if batch is None else (batch, True)


def _over_ranks(totals: dict[str, float], control: dist.ProcessGroup | None) -> dict[str, float]:
    """Add up over the ranks. Names are exchanged too, since a rank without batches has none."""
    if control is None or dist.get_world_size(control) == 1:
        return totals
    names = _shared_names(sorted(totals), control)
    values = torch.tensor([totals.get(name, 0.0) for name in names], dtype=torch.float64)
    dist.all_reduce(values, group=control)
    return dict(zip(names, values.tolist(), strict=True))


def _rows_of_ranks(
    rows: dict[str, Tensor], control: dist.ProcessGroup | None, copies: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the rows of all ranks; of ranks that share samples, ``copies`` at a time, those of the first."""
    if control is None or dist.get_world_size(control) == 1:
        return {name: part.numpy() for name, part in rows.items()}
    gathered = {}
    for name in _shared_names(sorted(rows), control):
        mine = rows.get(name, torch.empty(0, 0, dtype=torch.float64))
        shape = torch.tensor(mine.shape)
        shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size(control))]
        dist.all_gather(shapes, shape, group=control)
        count, width = torch.stack(shapes).amax(0).tolist()
        padded = torch.zeros(count, width, dtype=torch.float64)
        padded[: mine.shape[0], : mine.shape[1]] = mine
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded, group=control)
        gathered[name] = torch.cat([part[: int(size[0])] for part, size in zip(parts, shapes, strict=True)][::copies])
    return {name: part.numpy() for name, part in gathered.items()}


def _shared_names(names: list[str], control: dist.ProcessGroup) -> list[str]:
    """Return the names of all ranks, exchanged as text, without unpickling."""
    text = "\n".join(names).encode()
    length = torch.tensor([len(text)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=control)
    mine = torch.zeros(int(length), dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    dist.all_gather(gathered, mine, group=control)
    lists = [bytes(part.tolist()).rstrip(b"\0").decode().split("\n") for part in gathered]
    return sorted({name for part in lists for name in part if name})


def share_buffers(model: nn.Module, control: dist.ProcessGroup | None) -> None:
    """Copy rank 0's buffers (running statistics) to all ranks, so that all evaluate the same model."""
    if control is None or dist.get_world_size(control) == 1:
        return
    for buffer in model.buffers():
        if not hasattr(buffer, "placements"):
            dist.broadcast(buffer, src=0)
