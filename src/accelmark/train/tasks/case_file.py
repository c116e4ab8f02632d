"""The class ``Case`` of a case's file for a framework."""

from __future__ import annotations

from typing import TypeVar

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import FolderRef, folder_module

CaseT = TypeVar("CaseT")


def case_class(folder: FolderRef, framework: str, base: type[CaseT]) -> type[CaseT]:
    """Return the class ``Case`` of a case's ``<framework>.py``, which derives from ``base``.

    Raises:
        RequestError: the file does not define it.
    """
    module = folder_module(folder, framework)
    found = getattr(module, "Case", None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RequestError(f"{module.__file__}: has no class Case({base.__module__}.{base.__qualname__})")
    return found
