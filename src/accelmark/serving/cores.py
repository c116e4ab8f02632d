"""Cores of the client and of the server: the client has its own, so that a server on the CPU does not delay it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

_HAS_AFFINITY: Final = hasattr(os, "sched_setaffinity")


@final
@dataclass(frozen=True)
class Cores:
    """Cores of a run; both have all cores where they are not divided."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def are_divided(self) -> bool:
        """Whether the client's cores are its own."""
        return not set(self.server) & set(self.client)

    @classmethod
    def divided(cls, num_client: int) -> Cores:
        """Give the client the last ``num_client`` of the cores that this process may use, and the server the others.

        They are not divided where that leaves the server none, or where the system cannot bind processes to cores.
        """
        cores = tuple(sorted(os.sched_getaffinity(0))) if _HAS_AFFINITY else tuple(range(os.cpu_count() or 1))
        if not _HAS_AFFINITY or len(cores) <= num_client:
            return cls(cores, cores)
        return cls(cores[:-num_client], cores[-num_client:])


@contextmanager
def started_on(cores: Sequence[int]) -> Iterator[None]:
    """Let processes that this thread starts inside run on ``cores`` only."""
    if not _HAS_AFFINITY:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
