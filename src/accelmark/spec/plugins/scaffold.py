"""Create the folder of a new vendor or case from its template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from accelmark.spec.catalog import Kind, folders, look_again
from accelmark.spec.errors import RequestError

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_ADAPTATION: Final = "adaptation"
_CODE: Final = ".in"
"""Suffix of template files, so that they are not treated as code of this package."""


def new_folder(kind: Kind, name: str, into: Path) -> Path:
    """Create ``into/<kind>/<name>`` and return it.

    Raises:
        RequestError: the name is invalid or taken, or the folder exists.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} cannot be a name: lower-case letters, digits and underscores, a letter first")
    known = folders(kind)
    if name in known:
        raise RequestError(f"{name!r} is taken: {known[name].path} ({known[name].origin})")
    folder = into / kind / name
    if folder.exists():
        raise RequestError(f"{folder}: exists already; choose another name or remove it")
    template = _TEMPLATES / kind
    for source in sorted(path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        parts = (*source.relative_to(template).parts[:-1], source.name.removesuffix(_CODE))
        if parts[0] == _ADAPTATION:
            parts = ("cases", "resnet_mini-pytorch", *parts[1:])
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        target.write_text(text.replace("@NAME@", name).replace("@UPPER@", name.upper()), encoding="utf-8")
    look_again()
    return folder
