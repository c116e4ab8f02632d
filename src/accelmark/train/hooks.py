"""Hooks that a vendor replaces in ``extern/__init__.py`` of its folder for a case, in any framework.

A framework with hooks has ``hooks.py`` in its folder: the class ``Hooks`` with the defaults, and their names in
``ALLOWED_HOOKS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.plugins.catalog import FolderRef, file_module
from accelmark.train.case import ArrayCase

H = TypeVar("H")


class ArrayHooks:
    """The hooks of every framework whose batches are NumPy arrays; ``create_optimizer`` is the framework's own.

    A hook may change *how* the chip computes; the audit repeats steps without the hooks.
    """

    def __init__(self, case: ArrayCase) -> None:
        self.case, self.settings, self.place = case, case.settings, case.place

    def convert_model(self, model: Any) -> Any:
        """Return the model as it is trained: with the same names and shapes of weights."""
        return model

    def train_step(self, training: Any, *inputs: Any) -> Any:
        """Take one optimizer step, by default that of the framework's ``training``, whose docstring says of what."""
        return training.take_step(*inputs)


_HIDING: Final = frozenset({
    "__init__", "__new__", "__init_subclass__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__",
    "__dir__", "__del__", "__call__", "__class__", "__set_name__", "__class_getitem__", "__reduce__", "__slots__",
})  # fmt: skip
"""Methods with which a class could hide its replacements; hooks do not need them."""


@dataclass(frozen=True)
class HookRecord:
    """The location and length of a vendor's hook."""

    file: str
    line: int
    num_lines: int

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def load_hooks(ref: FolderRef | None, base: type[H], allowed: Iterable[str]) -> type[H]:
    """Return the vendor's ``Extern``, or ``base``. Raises RequestError: it overrides what is not in ``allowed``."""
    if ref is None:
        return base
    path = ref.path / "extern" / "__init__.py"
    if not path.is_file():
        return base
    extern = getattr(file_module(f"accelmark_extern_{ref.name.replace('-', '_')}", path), "Extern", None)
    if not (isinstance(extern, type) and issubclass(extern, base)):
        raise RequestError(f"{path}: has no class Extern({base.__module__}.{base.__name__})")
    hidden = sorted({name for cls in _own_classes(extern, base) for name in vars(cls)} & _HIDING)
    if hidden or type(extern) is not type:
        what = f"a metaclass ({type(extern).__name__})" if type(extern) is not type else ", ".join(hidden)
        raise RequestError(
            f"{path}: Extern may not define {what}, which could hide what it replaces; "
            "initialise in convert_model, the first hook that is called"
        )
    forbidden = sorted(_replaced(extern, base) - set(allowed))
    if forbidden:
        names = ", ".join(f"{name!r} ({nearest(name, allowed)})" for name in forbidden)
        raise RequestError(f"{path}: Extern may replace {', '.join(allowed)} only, found {names}")
    return extern


def hook_records(hooks: type, base: type) -> dict[str, HookRecord]:
    """Return the hooks that a vendor overrides, by name."""
    records = {}
    for name in sorted(_replaced(hooks, base)):
        code = inspect.unwrap(getattr(hooks, name)).__code__
        num_lines = 0
        with suppress(OSError):
            num_lines = len(inspect.getsourcelines(code)[0])
        records[name] = HookRecord(code.co_filename, code.co_firstlineno, num_lines)
    return records


def _own_classes(hooks: type, base: type) -> list[type]:
    return [cls for cls in hooks.__mro__ if cls is not object and cls not in base.__mro__]


def _replaced(hooks: type, base: type) -> set[str]:
    """Public names that classes between ``hooks`` and ``base`` define."""
    return {name for cls in _own_classes(hooks, base) for name in vars(cls) if not name.startswith("_")}
