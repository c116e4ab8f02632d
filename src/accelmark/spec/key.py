"""Keys name a workload: ``model:framework[_version]:hardware:nnodes:nproc:repeat``."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field
from typing_extensions import Self

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import Spec

_PARTS: Final = ("model", "framework", "hardware", "nnodes", "nproc", "repeat")


class CaseKey(Spec):
    """A case on a scale; ``nproc`` counts devices per host. An inference key has a model and a framework only."""

    model: str
    framework: str
    framework_version: str | None = None
    hardware: str
    nnodes: int = Field(default=1, ge=1)
    nproc: int = Field(default=1, ge=1)
    repeat: int = Field(default=1, ge=1)

    @property
    def world_size(self) -> int:
        """Number of devices over all hosts."""
        return self.nnodes * self.nproc

    @property
    def case(self) -> str:
        """``model:framework``: the case without scale, chip or version."""
        return f"{self.model}:{self.framework}"

    @property
    def slug(self) -> str:
        """Directory name: the key without its repeat and characters special to shells or container engines."""
        return f"{self.model}-{self._versioned}-{self.hardware}x{self.nnodes}x{self.nproc}"

    @property
    def _versioned(self) -> str:
        return f"{self.framework}_{self.framework_version}" if self.framework_version else self.framework

    def __str__(self) -> str:
        return f"{self.model}:{self._versioned}:{self.hardware}:{self.nnodes}:{self.nproc}:{self.repeat}"

    @classmethod
    def parse(cls, text: str, *, hardware: str, where: str = "key") -> Self:
        """Parse a key; trailing parts have defaults. Raises SpecError: a part is wrong; the error names ``where``."""
        parts = text.split(":")
        if len(parts) > len(_PARTS):
            raise SpecError([Problem(where, text, f"has {len(parts)} parts, expected at most 6", ":".join(_PARTS))])
        named = dict(zip(_PARTS, parts))
        problems = []
        for part, value in named.items():
            if part in _PARTS[:3] and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value):
                problems.append(Problem(where, text, f"{part} {value!r} is not a name", "letters, digits, . _ + -"))
            if part in _PARTS[3:] and not re.fullmatch(r"[0-9]*[1-9][0-9]*", value):
                problems.append(Problem(where, text, f"{part} {value!r} is not a whole number of at least 1"))
        if problems:
            raise SpecError(problems)
        framework_name, _, version = named.get("framework", "pytorch").partition("_")
        return cls(
            model=named["model"],
            framework=framework_name,
            framework_version=version or None,
            hardware=named.get("hardware", hardware),
            **{part: int(named.get(part, "1")) for part in _PARTS[3:]},
        )


def is_version(installed: str, named: str) -> bool:
    """Return whether a version (``2.13.0+cpu``) is the one that a key names (``2.13``), as far as that is stated."""
    parts, wanted = installed.partition("+")[0].split("."), named.partition("+")[0].split(".")
    return parts[: len(wanted)] == wanted
