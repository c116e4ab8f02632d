"""Mark the collectives of a sharded model: the rest of a step is the rank's own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelmark.frameworks.pytorch.model.embedding_tables import EmbeddingTables
from accelmark.train.loop.contract import StepClock

_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Under the names that they have from PyTorch 2.13 on."""


@final
class ShardExchange:
    """The collectives of FSDP2 and the exchanges of embedding tables, marked in the streams that they run in.

    A rank waits for others inside of them, so that those of the slowest rank are the shortest. Without replicas these
    are all-gathers and reduce-scatters; with replicas the all-reduce over them follows the reduce-scatter.
    """

    def __init__(self, model: nn.Module, clock: StepClock, *, has_replicas: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._clock, self._model = clock, model
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Timed(_all_gather, self))  # type: ignore[arg-type]
                reduce = _ReplicatedReduce if has_replicas else _Timed
                module.set_custom_reduce_scatter(reduce(_reduce_scatter, self))  # type: ignore[arg-type]
                if has_replicas:
                    module.set_all_reduce_hook(self._end_reduction)
            elif isinstance(module, EmbeddingTables):
                module.timed = self.timed

    def timed(self, exchange: Callable[[], Any]) -> Any:
        """Mark begin and end of an exchange, unless it is part of an evaluation."""
        if not self._model.training:
            return exchange()
        begin = self._clock.mark()
        work = exchange()
        self._marks.append((begin, self._clock.mark()))
        return work

    def begin_reduction(self) -> None:
        """Mark the begin of a reduction over shards and replicas."""
        if self._begin is not None:
            self._clock.release([self._begin])
        self._begin = self._clock.mark()

    def _end_reduction(self, _reduced: Tensor) -> None:
        """Mark its end; called in the stream of the all-reduce."""
        self._marks.append((self._begin, self._clock.mark()))
        self._begin = None

    def take(self) -> list[tuple[Any, Any]]:
        """Return the marks since the last call."""
        marks, self._marks = self._marks, []
        return marks


class _Timed:
    """A collective as FSDP2 calls it (``torch.distributed.fsdp``, ``AllGather`` and ``ReduceScatter``)."""

    def __init__(self, collective: Callable[..., Any], owner: ShardExchange) -> None:
        self._collective, self._owner = collective, owner

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for its input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **options: Any
    ) -> Any:
        """Exchange."""
        if args:
            options["op"] = args[0]
        return self._exchange(lambda: self._collective(output_tensor, input_tensor, group=group, **options))

    def _exchange(self, exchange: Callable[[], Any]) -> Any:
        return self._owner.timed(exchange)


@final
class _ReplicatedReduce(_Timed):
    """A reduce-scatter before an all-reduce over replicas, from the allocation of its output on.

    FSDP2 allocates it in the stream of the reduce-scatter, also where one rank has all shards and nothing is scattered.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for its input or output."""
        self._owner.begin_reduction()
        return super().allocate(size, dtype=dtype, device=device)

    def _exchange(self, exchange: Callable[[], Any]) -> Any:
        return exchange()
