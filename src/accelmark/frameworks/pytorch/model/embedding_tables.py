"""Embedding tables as one matrix, whose rows ranks can share among each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

_GOLDEN: Final = 0.6180339887
_BLOCK: Final = 1 << 22


class EmbeddingTables(nn.Module):
    """Embedding tables of one width; the rows of the ids that a sample has of a table are added up.

    All tables are one matrix. Its rows are in an order in which consecutive ids are far apart, so that each part of the
    matrix has about the same share of every table. Where ranks share the rows, each looks up those that it has, and
    adds up the rows of the same sample and table before it sends the result. Gradients have only rows that were looked
    up. ``rows`` and ``ids`` are the rows of each table, and its ids in a sample.
    """

    columns: Tensor
    tables: Tensor

    def __init__(self, rows: Sequence[int], ids: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows, self.num_ids = tuple(rows), tuple(ids)
        self.total = sum(rows)
        self._stride = next(n for n in range(max(1, int(self.total * _GOLDEN)), 2**62) if math.gcd(n, self.total) == 1)
        self.weight = nn.Parameter(torch.empty(self.total, width))
        table = torch.arange(len(rows)).repeat_interleave(torch.tensor(ids), output_size=sum(ids))
        first = torch.tensor([0, *rows[:-1]]).cumsum(0)
        self.register_buffer("columns", first[table], persistent=False)
        self.register_buffer("tables", table, persistent=False)
        self.timed: Callable[[Callable[[], Any]], Any] = lambda exchange: exchange()
        """Calls an exchange with other ranks."""
        self._shared: Tensor | None = None
        """This rank's rows of the matrix, consecutive ones, once ranks look up rows on each other."""
        self._reset()

    def extra_repr(self) -> str:
        """Describe the tables."""
        return f"rows={self.rows}, ids={self.num_ids}, width={self.weight.shape[1]}"

    @torch.no_grad()
    def _reset(self) -> None:
        """Draw a table of n rows uniformly from -1/sqrt(n) to 1/sqrt(n), as TorchRec does."""
        if self.weight.is_meta:
            return
        ends, inverse = torch.tensor(self.rows).cumsum(0), pow(self._stride, -1, self.total)
        limits = torch.tensor(self.rows).rsqrt()
        for start in range(0, self.total, _BLOCK):
            part = self.weight[start : start + _BLOCK]
            row = torch.arange(start, start + len(part)) * inverse % self.total
            part.uniform_(-1, 1).mul_(limits[torch.bucketize(row, ends, right=True)][:, None])

    def forward(self, ids: Tensor) -> Tensor:
        """Return the sums of shape (samples, tables, width) for ids of shape (samples, ids of all tables)."""
        places = (ids.long() + self.columns) * self._stride % self.total
        if self._shared is not None:
            sums = self._look_up(places, self._shared)
        else:
            first = torch.tensor([0, *self.num_ids[:-1]], device=ids.device).cumsum(0)
            starts = torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1] + first
            sums = _added(places.flatten(), self.weight, starts.flatten())
        return sums.view(len(ids), len(self.rows), -1)

    def share_rows(self, devices: Any, device: torch.device) -> None:
        """Keep this rank's part of the rows, on ``device``; ``devices`` is a mesh of one dimension with all ranks."""
        from torch.distributed.tensor import DTensor, Shard

        whole = self.weight.detach()
        size = self._rows_of_rank()
        part = whole[devices.get_local_rank() * size :][:size]
        part = part if whole.is_meta else part.to(device, copy=True)
        shape, stride = whole.shape, whole.stride()
        self.weight = nn.Parameter(DTensor.from_local(part, devices, [Shard(0)], shape=shape, stride=stride))

    @torch.no_grad()
    def receive(self, whole: Tensor | None) -> None:
        """Take this rank's rows from rank 0, which has all of them."""
        local_rows = self._own()
        if whole is None:
            if len(local_rows):
                dist.recv(local_rows, 0)
            return
        for rank, part in enumerate(torch.split(whole, self._rows_of_rank())):
            if rank:
                dist.send(part.to(local_rows.device), rank)
            else:
                local_rows.copy_(part)

    def open_rows(self) -> None:
        """Look up rows on the ranks that have them from now on."""
        self._shared = self._own().detach().requires_grad_()
        self.weight.own_rows = self._shared  # type: ignore[attr-defined]

    def _own(self) -> Tensor:
        shard: Any = self.weight
        own: Tensor = shard.to_local()
        return own

    def _rows_of_rank(self) -> int:
        return -(-self.total // dist.get_world_size())

    def _look_up(self, places: Tensor, own: Tensor) -> Tensor:
        """Return the sums of shape (samples x tables, width) of rows of the whole matrix, of shape (samples, ids)."""
        num_ranks, size, num_tables = dist.get_world_size(), self._rows_of_rank(), len(self.rows)
        num_bags = len(places) * num_tables
        bags = torch.arange(len(places), device=places.device)[:, None] * num_tables + self.tables
        owners = places.flatten() // size
        order = owners.argsort(stable=True)
        owners = owners[order]
        parts, lengths = torch.unique_consecutive(owners * num_bags + bags.flatten()[order], return_counts=True)
        sent = torch.stack([owners.bincount(minlength=num_ranks), (parts // num_bags).bincount(minlength=num_ranks)], 1)
        received = torch.empty_like(sent)
        self.timed(lambda: dist.all_to_all_single(received, sent))
        (ids_out, parts_out), (ids_in, parts_in) = sent.T.tolist(), received.T.tolist()
        requested, requested_lengths = places.new_empty(sum(ids_in)), lengths.new_empty(sum(parts_in))
        self.timed(lambda: dist.all_to_all_single(requested, places.flatten()[order], ids_in, ids_out))
        self.timed(lambda: dist.all_to_all_single(requested_lengths, lengths, parts_in, parts_out))
        starts = requested_lengths.cumsum(0) - requested_lengths
        rows = _added(requested - dist.get_rank() * size, own, starts)
        answers: Tensor = _Returned.apply(rows, parts_in, parts_out, self.timed)  # type: ignore[no-untyped-call]
        return answers.new_zeros(num_bags, answers.shape[1]).index_add(0, parts % num_bags, answers)


def _added(rows: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of the rows of each bag; a bag begins at each of ``starts``."""
    if not len(starts):
        return weight[:0] + 0  # embedding_bag refuses no bag at all
    return F.embedding_bag(rows, weight, starts, mode="sum", sparse=not weight.is_meta)


class _Returned(torch.autograd.Function):
    """Rows that are sent to the ranks that asked for them; backward, the mean over ranks of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], own_sizes: list[int], timed: Callable[..., Any]) -> Tensor:
        ctx.sizes, ctx.own_sizes, ctx.timed = sizes, own_sizes, timed
        answers = rows.new_empty(sum(own_sizes), rows.shape[1])
        timed(lambda: dist.all_to_all_single(answers, rows, own_sizes, sizes))
        return answers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        received = gradient.new_empty(sum(ctx.sizes), gradient.shape[1])
        ctx.timed(lambda: dist.all_to_all_single(received, gradient.contiguous(), ctx.sizes, ctx.own_sizes))
        return received / dist.get_world_size(), None, None, None
