"""Hashes of the model, the compiled files and the engine's code, for the audit."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path, PurePath
from typing import Final

from torch import nn

from accelmark.frameworks.pytorch.model.identity import module_hash, structure_hash, weights_hash
from accelmark.infer.engine import Engine
from accelmark.spec.errors import DataError
from accelmark.spec.settings.training import Scalar

_OWN: Final = "accelmark.infer.engines."
_EXTERNAL_WEIGHTS: Final = ".data"
"""Suffix of the exporter's file for weights that are too large for an ONNX file."""


def model_hashes(model: nn.Module) -> dict[str, Scalar]:
    """Return hashes of the structure, the modules and the weights of the model that the case created."""
    return {
        "parameter_hash": structure_hash(model),
        "module_hash": module_hash(model),
        "weights_hash": weights_hash(model),
    }


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file with its external weights, or over the files of a directory.

    Raises:
        DataError: ``path`` does not exist.
    """
    if not path.exists():
        raise DataError(f"{path}: does not exist, so it cannot be hashed")
    digest = hashlib.sha256()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [file for file in (path, path.with_name(path.name + _EXTERNAL_WEIGHTS)) if file.is_file()]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def engine_hashes(engine: Engine) -> dict[str, Scalar]:
    """Return hashes of the engine's input and of its saved file."""
    request = engine.request
    hashes: dict[str, Scalar] = {"reads": engine.reads}
    if request.engine_path is not None:
        hashes["engine_given_sha256"] = file_hash(request.engine_path)
    elif engine.reads != "model" and request.onnx_path is not None:
        hashes["onnx_sha256"] = file_hash(request.onnx_path)
    if engine.file is not None and engine.file.exists():
        hashes["engine_sha256"] = file_hash(engine.file)
    return hashes


def code_of(engine: type[Engine]) -> dict[str, Scalar]:
    """Return place, length and hash of an engine's code; nothing for AccelMark's own."""
    if engine.__module__.startswith(_OWN):
        return {}
    path = Path(inspect.getfile(engine))
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    return {
        "engine_code": "/".join(PurePath(path).parts[-2:]),
        "engine_code_lines": lines,
        "engine_code_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
