"""Names of frameworks, launchers and collectives stay in their folders; no modules import each other in a cycle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
from networkx import DiGraph, strongly_connected_components

import accelmark

ROOT = Path(accelmark.__file__).parent
HOST_SIDE = ("audit", "cli", "datasets", "explain", "plan", "report", "results", "run", "spec", "telemetry", "train")
NAMES = re.compile(
    r"\b(?i:torch|torchrun|torch_npu|nccl|hccl|gloo|cuda|nvidia|amdsmi|pynvml)\b|MASTER_ADDR|MASTER_PORT"
    r"|TORCHINDUCTOR|\b(NCCL|CUDA|GLOO|HCCL|JAX|XLA)_"
)
EXEMPT = ("datasets/prepare/published.py", "cli/kit.py")
"""Preparations of weights that are published in the format of a framework; the stand-in, which is built for one."""


def test_host_side_code_names_no_framework_module_vendor_or_collective() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for package in HOST_SIDE
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in EXEMPT
        for line, text in words_of(path)
        if NAMES.search(text)
    ]
    assert not found, "\n".join(found)


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names and strings of a file's code, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, " ".join([*(name.name for name in node.names), getattr(node, "module", None) or ""])


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("accelmark", cache_dir=None)
    imports = DiGraph(
        (name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name)
    )
    cycles = [sorted(component) for component in strongly_connected_components(imports) if len(component) > 1]
    assert cycles == []
