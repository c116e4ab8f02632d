"""What a rank sees of a vendor's code while it runs: before it is loaded, after setting up, and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.frameworks.pytorch.hooks import Hooks
from accelmark.frameworks.pytorch.integrity.monkeypatch import Functions, foreign_functions, shadowed
from accelmark.frameworks.pytorch.integrity.probes import Probes
from accelmark.spec.events import Inspected
from accelmark.spec.job import JobSpec

MOST_NAMED: Final = 20
"""Replaced functions that are named; a reader needs no more."""


def runs_vendor_code(job: JobSpec) -> bool:
    """Tell whether anything of a vendor's own gets into the ranks: hooks, a module, kernels, packages, a script."""
    files = job.adaptation
    carried_out = files is not None and (files.has_build or files.has_environment or bool(files.requirements))
    return job.extern is not None or job.framework_module is not None or carried_out


@final
@dataclass(slots=True)
class Inspection:
    """To be made before any of the vendor's code is loaded, and only where there is some."""

    case_class: type[TrainCase] | None
    by_module: tuple[str, ...] = ()
    """PyTorch's functions that ``framework_module`` replaced when it was imported."""
    hooks: Hooks | None = None
    case: TrainCase | None = None
    hooks_class: type[Hooks] = Hooks
    probes: Probes | None = None
    _functions: Functions = field(init=False)
    _foreign: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Take down the functions as they are."""
        self._functions = Functions(self.case_class)
        self._foreign = foreign_functions()

    def module_imported(self) -> None:
        """Take down what the framework's module replaced of PyTorch; of AccelMark's there is nothing for it to do."""
        self.by_module = tuple(name for name in self._functions.replaced() if name.startswith("torch"))

    def replaced(self) -> tuple[str, ...]:
        """Return what is replaced now, beyond what the framework's module did to PyTorch."""
        found = [*self._foreign, *(name for name in self._functions.replaced() if name not in self.by_module)]
        if self.hooks is not None and self.case is not None:
            found += shadowed(self.hooks, self.case, self.hooks_class, self.case_class or type(self.case))
        return tuple(dict.fromkeys(found))[:MOST_NAMED]

    def ended(self) -> Inspected:
        """Return what is to be seen when training has ended."""
        told = self.probes.told() if self.probes is not None else {}
        return Inspected(replaced_functions=self.replaced(), **told)
