"""Detect monkey-patching: functions of PyTorch and of AccelMark's training that vendor code replaced."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import accelmark

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import TrainCase
    from accelmark.frameworks.pytorch.hooks import Hooks

_TORCH: Final = Path(torch.__file__).parent
_OURS: Final = Path(accelmark.__file__).parent
_PACKAGES: Final = ("site-packages", "dist-packages")
"""Names of the directories into which pip and distributions install; an image may have several."""
_OWN_DIRECTORIES: Final = (_OURS, _TORCH.parent, Path(sysconfig.get_path("stdlib")))
"""Other directories whose functions AccelMark's modules may have."""
_TRAINING: Final = ("accelmark.train", "accelmark.frameworks", "accelmark.cases")
_WATCHED: Final[Mapping[str, Any]] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.autograd": torch.autograd,
    "torch.accelerator": torch.accelerator,
    "torch.distributed": torch.distributed,
    "torch.nn.Module": nn.Module,
    "torch.nn.parallel.DistributedDataParallel": DistributedDataParallel,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.autocast": torch.autocast,
    "torch.amp.GradScaler": GradScaler,
    "time": time,
}


@final
class Functions:
    """The functions of PyTorch, AccelMark and the case before vendor code is loaded."""

    def __init__(self, case_class: type[TrainCase] | None = None) -> None:
        self._case_class = case_class
        self._before = {name: (function, _body(function)) for name, function in _functions(case_class)}

    def replaced(self) -> tuple[str, ...]:
        """Return the functions that were replaced or have another body, with the places of the replacements.

        Wrappers that PyTorch itself puts around some of its functions at their first use do not count.
        """
        now = dict(_functions(self._case_class))
        return tuple(
            f"{name} -> {locate(now[name])}"
            for name, (function, body) in sorted(self._before.items())
            if name in now
            and _is_replaced(now[name], function, body)
            and not (name.startswith("torch") and _is_from_torch(now[name]))
        )


def foreign_functions() -> tuple[str, ...]:
    """Return functions of AccelMark's training that come neither from its files nor from installed packages."""
    return tuple(
        sorted(f"{name} -> {locate(function)}" for name, function in _ours(None) if not _is_expected(function))
    )


def shadowed(hooks: Hooks, case: TrainCase, hooks_class: type[Hooks], case_class: type[TrainCase]) -> tuple[str, ...]:
    """Return methods that are overridden on the objects themselves, and replaced objects."""
    found: list[str] = []
    for held, cls in ((hooks, hooks_class), (case, case_class)):
        if type(held) is not cls:
            found.append(f"the class of {cls.__name__} -> {type(held).__name__}")
        found += [
            f"{cls.__name__}.{name} of the object -> {locate(value)}"
            for name, value in sorted(vars(held).items())
            if callable(inspect.getattr_static(cls, name, None))
        ]
    found += [
        f"{hooks_class.__name__}.{name} -> {type(getattr(hooks, name)).__name__}"
        for name, value in (("case", case), ("settings", case.settings), ("place", case.place))
        if getattr(hooks, name) is not value
    ]
    return tuple(found)


def locate(function: Any) -> str:
    """Return the place of a function, ``file:line``; the name of its type where it has no code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{'/'.join(PurePath(code.co_filename).parts[-3:])}:{code.co_firstlineno}"


def _functions(case_class: type[TrainCase] | None) -> Iterator[tuple[str, Any]]:
    for prefix, holder in _WATCHED.items():
        for name, value in list(vars(holder).items()):
            if callable(value) and not inspect.isclass(value) and not inspect.ismodule(value):
                yield f"{prefix}.{name}", value
    for name, value in list(vars(nn).items()):
        if inspect.isclass(value) and issubclass(value, nn.Module):
            yield f"torch.nn.{name}.forward", value.forward
            yield f"torch.nn.{name}.__call__", value.__call__
    for name, value in list(vars(torch.optim).items()):
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
            yield f"torch.optim.{name}.step", value.step
    yield from _ours(case_class)


def _ours(case_class: type[TrainCase] | None) -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.startswith(_TRAINING):
            yield from _of_module(module)
    for cls in case_class.__mro__ if case_class is not None else ():
        if not cls.__module__.startswith(_TRAINING) and cls is not object:
            yield from _of_class(cls)
            owner = sys.modules.get(cls.__module__)
            if owner is not None and cls.__module__ != "abc":
                yield from _of_module(owner)


def _of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if inspect.isclass(value):
            # The class too: it could be replaced as a whole.
            yield f"{module.__name__}.{name}", value
            if value.__module__ == module.__name__:
                yield from _of_class(value)
        elif callable(value):
            yield f"{module.__name__}.{name}", value


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in list(vars(cls).items()):
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        if inspect.isfunction(function):
            yield f"{cls.__module__}.{cls.__qualname__}.{name}", function


def _body(function: Any) -> tuple[Any, ...]:
    """Return the parts of a Python function that determine its behaviour; they can be replaced in place."""
    return tuple(getattr(function, part, None) for part in ("__code__", "__defaults__", "__kwdefaults__"))


def _is_replaced(now: Any, function: Any, body: tuple[Any, ...]) -> bool:
    return now is not function or any(new is not old for new, old in zip(_body(now), body, strict=True))


def _is_from_torch(function: Any) -> bool:
    # Not unwrapped: a wrapper around PyTorch's function counts as its author's code.
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(_TORCH)


def _is_expected(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return True  # built in, or generated by dataclasses
    path = Path(code.co_filename)
    return any(path.is_relative_to(place) for place in _OWN_DIRECTORIES) or any(
        name in path.parts for name in _PACKAGES
    )
