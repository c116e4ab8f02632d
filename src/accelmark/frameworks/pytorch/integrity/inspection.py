"""Inspect a vendor's code in a rank: before it is loaded, after set-up, and at the end of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, final

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.frameworks.pytorch.hooks import Hooks
from accelmark.frameworks.pytorch.integrity.monkeypatch import Functions, foreign_functions, shadowed
from accelmark.frameworks.pytorch.integrity.probes import Probes
from accelmark.frameworks.pytorch.training.platform import reduced_modes
from accelmark.spec.events import Inspected
from accelmark.spec.job import JobSpec
from accelmark.spec.settings import Precision

_MAX_LISTED: Final = 20
"""Largest number of replaced functions in the list."""


def runs_vendor_code(job: JobSpec) -> bool:
    """Return whether ranks run a vendor's code: hooks, a module, kernels, packages or a script."""
    files = job.adaptation
    carried_out = files is not None and (files.has_build or files.has_environment or bool(files.requirements))
    return job.extern is not None or job.framework_module is not None or carried_out


@final
@dataclass(slots=True)
class Inspection:
    """The inspection of one rank; created before vendor code is loaded, and only where there is some."""

    case_class: type[TrainCase] | None
    module_functions: tuple[str, ...] = ()
    """PyTorch's functions that ``framework_module`` replaced when it was imported."""
    precision: Precision = "fp32"
    hooks: Hooks | None = None
    case: TrainCase | None = None
    hooks_class: type[Hooks] = Hooks
    probes: Probes | None = None
    _functions: Functions = field(init=False)
    _foreign: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Record the current functions."""
        self._functions = Functions(self.case_class)
        self._foreign = foreign_functions()

    def module_imported(self) -> None:
        """Record which functions of PyTorch the device's module replaced. It has no reason to replace AccelMark's."""
        self.module_functions = tuple(name for name in self._functions.replaced() if name.startswith("torch"))

    def replaced(self) -> tuple[str, ...]:
        """Return the functions that are replaced now, except those of PyTorch that the device's module replaced."""
        found = [*self._foreign, *(name for name in self._functions.replaced() if name not in self.module_functions)]
        if self.hooks is not None and self.case is not None:
            found += shadowed(self.hooks, self.case, self.hooks_class, self.case_class or type(self.case))
        return tuple(dict.fromkeys(found))[:_MAX_LISTED]

    def started(self) -> dict[str, Any]:
        """Return the fields of :class:`~accelmark.spec.events.Started` about functions."""
        return {
            "replaced_functions": self.replaced(),
            "reduced_modes": reduced_modes(self.precision),
            "module_functions": self.module_functions[:_MAX_LISTED],
            "num_module_functions": len(self.module_functions),
        }

    def ended(self) -> Inspected:
        """Return the result at the end of training."""
        fields = self.probes.result() if self.probes is not None else {}
        modes = reduced_modes(self.precision)
        return Inspected(replaced_functions=self.replaced(), reduced_modes=modes, **fields)
