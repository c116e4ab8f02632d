"""Files of named arrays, read and written with NumPy alone (https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import UNREADABLE, RunError, raising

Array = npt.NDArray[Any]
_TYPES: Final = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?",
}  # fmt: skip
_NAMES: Final = {np.dtype(code): name for name, code in _TYPES.items()}


def write_tensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to ``path``, through a temporary name; raises RunError: the file cannot be written."""
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligned
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).tobytes())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def read_tensors(path: Path) -> dict[str, Array]:
    """Return the arrays of a file by name; raises RunError: it is missing, damaged, or has an unknown type."""
    with raising(RunError, f"{path}: cannot be read as a safetensors file", *UNREADABLE):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:start])
        header.pop("__metadata__", None)
        tensors: dict[str, Array] = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            own = data[start + first : start + last]
            tensors[name] = np.frombuffer(own, _TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors
