"""How a model is replicated, sharded and split over the ranks of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Annotated, Any, Final, Literal, Union

from pydantic import BeforeValidator, Field, PlainSerializer, PositiveInt
from typing_extensions import Self

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import nearest


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism. Of ranks, ``tp`` is the fastest axis, then cp, fsdp, pp, dp; ``ep`` divides dp, fsdp."""

    dp: int | None = None
    """Replicas; None: as many as the ranks allow."""
    pp: int = 1
    """Stages of a pipeline."""
    fsdp: int = 1
    """Ranks over which parameters are sharded."""
    cp: int = 1
    """Parts of a sequence."""
    tp: int = 1
    """Parts of a layer."""
    ep: int = 1
    """Groups of experts."""

    def __str__(self) -> str:
        """Return the axes in use, as a setting is written: ``fsdp=2,tp=4``."""
        used = {name: degree for name, degree in self.degrees().items() if degree > 1}
        if self.dp is not None:
            used = {"dp": self.dp, **used}
        return ",".join(f"{name}={degree}" for name, degree in used.items()) or "dp=1"

    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis but ``dp``."""
        return dict(zip_strict(AXES[1:], astuple(self)[1:]))

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that work on the same samples: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def shares_layers(self) -> bool:
        """Whether ranks work together within a forward or backward pass, by tp, pp, cp or ep."""
        return self.ranks_per_sample > 1 or self.ep > 1

    def data_rank(self, rank: int) -> int:
        """Return the number of a rank's share of the samples, from 0; the ranks of tp, pp and cp have the same."""
        replica, inside = divmod(rank, self.fsdp * self.ranks_per_sample)
        return replica * self.fsdp + inside // (self.tp * self.cp) % self.fsdp

    def sized(self, num_ranks: int) -> Self:
        """Return the mesh with its number of replicas; raises ValueError: it has another number of ranks."""
        others = self.fsdp * self.ranks_per_sample
        replicas, rest = divmod(num_ranks, others)
        if rest or replicas != (self.dp or replicas):
            needed = "a multiple of " if self.dp is None else ""
            raise ValueError(f"needs {needed}{others * (self.dp or 1)} ranks, the job has {num_ranks}")
        return replace(self, dp=replicas)


AXES: Final = tuple(field.name for field in fields(Mesh))
NAMES: Final = ("ddp", "fsdp2", "hsdp", "deepspeed")
ONE_RANK: Final = Mesh(dp=1)


def _parse(given: Any) -> Any:
    """Read a name, a mapping, or the form of ``str(Mesh)``."""
    if isinstance(given, str) and "=" in given:
        parts = (part.partition("=") for part in given.split(","))
        given = {name.strip(): degree.strip() for name, _, degree in parts}
    if isinstance(given, Mapping):
        for axis, degree in given.items():
            if axis not in AXES:
                raise ValueError(f"unknown axis {axis!r} ({nearest(str(axis), AXES)})")
            if not str(degree).isdecimal() or int(degree) < 1:
                raise ValueError(f"{axis} is {degree!r}, not a positive number of ranks")
        return Mesh(**{axis: int(degree) for axis, degree in given.items()})
    if isinstance(given, str) and given not in NAMES:
        raise ValueError(f"{given!r} is none of {', '.join(NAMES)}, and no mesh such as fsdp=2,tp=2")
    return given


_Name = Literal["ddp", "fsdp2", "hsdp", "deepspeed"]
_Written = Union[
    _Name, Annotated[str, Field(pattern="=")], dict[Literal["dp", "pp", "fsdp", "cp", "tp", "ep"], PositiveInt]
]
Parallelism = Annotated[
    Union[_Name, Mesh], BeforeValidator(_parse, json_schema_input_type=_Written), PlainSerializer(str, return_type=str)
]


def mesh_of(parallelism: Parallelism, num_ranks: int, ranks_per_host: int) -> Mesh:
    """Return the mesh that a setting describes; raises ValueError: it does not fit the number of ranks."""
    if isinstance(parallelism, Mesh):
        return parallelism.sized(num_ranks)
    sharded = {"ddp": 1, "fsdp2": num_ranks, "hsdp": ranks_per_host, "deepspeed": num_ranks}[parallelism]
    return Mesh(fsdp=sharded).sized(num_ranks)


def has_part(parallelism: object, part: str) -> bool:
    """Return whether a setting, or its text, is the name ``part`` or a mesh in which the axis ``part`` has ranks."""
    return part in [axis.partition("=")[0] for axis in str(parallelism).split(",")]


def fitting(num_ranks: int, sizes: Mapping[str, int]) -> list[int]:
    """Return the degrees of an axis that divide the number of ranks and every one of ``sizes``."""
    common = math.gcd(num_ranks, *sizes.values())
    return [degree for degree in range(1, common + 1) if common % degree == 0]
