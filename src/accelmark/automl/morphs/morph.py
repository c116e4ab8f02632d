"""A morph as data: what is changed where, so that a family tree can be replayed from its seed."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from accelmark.spec.errors import AccelmarkError

MorphKind = Literal["deepen", "widen", "add-skip", "concat-skip", "kernel-grow"]
MORPH_KINDS: Final[tuple[MorphKind, ...]] = get_args(MorphKind)

WeightMode = Literal["carried", "from-scratch"]


class MorphError(AccelmarkError):
    """A morph that the network it is applied to does not allow."""


class Morph(BaseModel):
    """One change of a network.

    at       the node that it starts from: the ReLU after which to deepen or from which a skip leaves, the
             convolution to widen or whose kernel to grow
    to       where a skip joins the main chain again
    size     the new kernel (deepen, kernel-grow) or the new number of filters (widen)
    label    prefix of the names of inserted nodes
    seed     of everything random about it: which filters are doubled, how weights are split, fresh weights
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: MorphKind
    at: str
    to: str | None = None
    size: Annotated[int, Field(ge=0)] = 0
    label: str = ""
    seed: int = 0

    def __str__(self) -> str:
        target = f"{self.at} -> {self.to}" if self.to else self.at
        return f"{self.kind} {target}" + (f" ({self.size})" if self.size else "")
