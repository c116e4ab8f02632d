"""What the audit compares of an inference run: hashes of the model, of what was compiled, and of whose engine ran."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path, PurePath
from typing import Final

from torch import nn

from accelmark.frameworks.pytorch.identity import structure_hash, weights_hash
from accelmark.frameworks.pytorch.integrity.reference_model import module_hash
from accelmark.infer.engine import Engine
from accelmark.spec.errors import DataError
from accelmark.spec.settings import Scalar

_OWN: Final = "accelmark.infer.engines."
_WEIGHTS_BESIDE: Final = ".data"
"""What the exporter calls the file of weights that are too large for an ONNX file, after its name."""


def model_traces(model: nn.Module) -> dict[str, Scalar]:
    """Return hashes of the structure, of the modules and of the weights of the model as its case built it."""
    return {
        "parameter_hash": structure_hash(model),
        "module_hash": module_hash(model),
        "weights_hash": weights_hash(model),
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file, and of the weights beside it where it keeps them there; of a directory, over its files.

    Raises:
        DataError: there is nothing at ``path``.
    """
    if not path.exists():
        raise DataError(f"{path}: is not there, so that it has no hash")
    digest = hashlib.sha256()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [file for file in (path, path.with_name(path.name + _WEIGHTS_BESIDE)) if file.is_file()]
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def engine_traces(engine: Engine) -> dict[str, Scalar]:
    """Return hashes of what the engine was built from and of what it keeps, and where its code stands if not here."""
    request = engine.request
    traces: dict[str, Scalar] = {"reads": engine.reads}
    if request.engine_path is not None:
        traces["engine_given_sha256"] = file_hash(request.engine_path)
    elif engine.reads == "onnx" and request.onnx_path is not None:
        traces["onnx_sha256"] = file_hash(request.onnx_path)
    if engine.file is not None and engine.file.exists():
        traces["engine_sha256"] = file_hash(engine.file)
    if not type(engine).__module__.startswith(_OWN):
        traces |= _code_of(type(engine))
    return traces


def _code_of(engine: type[Engine]) -> dict[str, Scalar]:
    path = Path(inspect.getfile(engine))
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    return {
        "engine_code": "/".join(PurePath(path).parts[-2:]),
        "engine_code_lines": lines,
        "engine_code_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
