"""Load a vendor's hooks, and record what they replace."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.frameworks.pytorch.hooks import ALLOWED_HOOKS, Hooks
from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.plugins.catalog import FolderRef, file_module

_HIDING: Final = frozenset({
    "__init__", "__new__", "__init_subclass__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__",
    "__dir__", "__del__", "__call__", "__class__", "__set_name__", "__class_getitem__", "__reduce__", "__slots__",
})  # fmt: skip
"""Methods with which a class could hide what it replaces; hooks need none of them."""
_REPLACED_BY_ENGINES: Final = frozenset({"model_to_ddp", "create_grad_scaler", "backward", "train_step"})


@final
@dataclass(frozen=True, slots=True)
class HookRecord:
    """The location and length of a vendor's hook."""

    file: str
    line: int
    num_lines: int

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def load_hooks(ref: FolderRef | None) -> type[Hooks]:
    """Return the vendor's ``Extern`` from ``extern/__init__.py`` of its folder, or the defaults where it has none.

    Raises:
        RequestError: the file does not define ``Extern(Hooks)``, or overrides something that is not a hook.
    """
    if ref is None:
        return Hooks
    path = ref.path / "extern" / "__init__.py"
    if not path.is_file():
        return Hooks
    module = file_module(f"accelmark_extern_{ref.name.replace('-', '_')}", path)
    extern = getattr(module, "Extern", None)
    if not (isinstance(extern, type) and issubclass(extern, Hooks)):
        raise RequestError(f"{path}: has no class Extern(accelmark.frameworks.pytorch.hooks.Hooks)")
    hidden = sorted({name for cls in _own_classes(extern) for name in vars(cls)} & _HIDING)
    if hidden or type(extern) is not type:
        what = f"a metaclass ({type(extern).__name__})" if type(extern) is not type else ", ".join(hidden)
        raise RequestError(
            f"{path}: Extern may not define {what}, which could hide what it replaces; "
            "initialise in convert_model, the first hook that is called"
        )
    forbidden = sorted(_replaced(extern) - set(ALLOWED_HOOKS))
    if forbidden:
        names = ", ".join(
            f"{name!r} ({_where(inspect.getattr_static(extern, name), path)}; {nearest(name, ALLOWED_HOOKS)})"
            for name in forbidden
        )
        raise RequestError(f"{path}: Extern may replace {', '.join(ALLOWED_HOOKS)} only, found {names}")
    return extern


def hook_records(hooks: type[Hooks]) -> dict[str, HookRecord]:
    """Return the hooks that a vendor overrides, by name."""
    names = [name for name in ALLOWED_HOOKS if name in _replaced(hooks)]
    return {name: _record(getattr(hooks, name)) for name in names}


def refuse_hooks(hooks: Hooks, engine: str) -> None:
    """Raise RequestError where a vendor replaces hooks that ``engine``, which takes the steps, replaces too."""
    if wrong := sorted(_replaced(type(hooks)) & _REPLACED_BY_ENGINES):
        what = f"the vendor's hooks {', '.join(wrong)} do what {engine} does"
        raise RequestError(f"parallelism {hooks.settings.parallelism}: {what}; set parallelism=fsdp2, or remove them")


def _own_classes(hooks: type[Hooks]) -> list[type]:
    """Classes between ``hooks`` and :class:`Hooks`, mixed in ones too."""
    return [cls for cls in hooks.__mro__ if cls is not object and cls not in Hooks.__mro__]


def _replaced(hooks: type[Hooks]) -> set[str]:
    """Public names that classes between ``hooks`` and :class:`Hooks` define."""
    own = _own_classes(hooks)
    private = {name for name in vars(Hooks) if name.startswith("_") and not name.startswith("__")}
    return {name for cls in own for name in vars(cls) if not name.startswith("_") or name in private}


def _record(function: Any) -> HookRecord:
    code = inspect.unwrap(function).__code__
    try:
        num_lines = len(inspect.getsourcelines(code)[0])
    except OSError:
        num_lines = 0
    return HookRecord(code.co_filename, code.co_firstlineno, num_lines)


def _where(attribute: Any, path: Path) -> str:
    code = getattr(getattr(attribute, "__func__", attribute), "__code__", None)
    return f"{path.name}:{code.co_firstlineno}" if code is not None else path.name
