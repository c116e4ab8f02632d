"""Run cases with ranks on older Pythons and PyTorches: ``python -m benchmarks.versions [--short] [PYTHON...]``.

Each row makes a virtual environment in ``.environments``, runs small cases in it from this Python, stops the run in the
middle of training, resumes it, runs the cluster tests of that Python, and writes its row of ``benchmarks/versions.md``.
Rows that are not asked for are kept, with ``--only`` also the other cells of a row. With ``--short``, training takes 12
steps and inference four batches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from accelmark.run.preflight.checks import RANK_NEEDS
from accelmark.spec.plugins.requirements import requirement_texts

ROWS: Final = {"3.9": "2.4.1", "3.10": "2.6.0", "3.12": "2.8.0"}
"""Python -> PyTorch."""
_CASES: Final[dict[str, dict[str, Any]]] = {
    "resnet_mini, 2 ranks": {"key": "resnet_mini:pytorch:CPU:1:2"},
    "llama_mini": {"key": "llama_mini:pytorch:CPU:1:1"},
    "translation_mini (transformers)": {"key": "translation_mini:pytorch:CPU:1:1"},
    "resnet_mini in eager": {"key": "resnet_mini", "task": "infer", "settings": {"compiler": "eager"}},
    "resnet_mini in inductor": {"key": "resnet_mini", "task": "infer", "settings": {"compiler": "inductor"}},
}
_SHORT: Final[dict[str, dict[str, Any]]] = {
    "train": {"end.max_steps": 12, "evaluate.every_steps": 6},
    "infer": {"max_batches": 4, "inference_duration_s": 2.0},
}
_BROKEN_BY_SHORT: Final = {"target-missed", "partial-evaluation", "declared-open", "too-short"}
"""Rules of the audit."""
_CLUSTER: Final = "SSH hosts and container"
_FSDP2: Final = "fsdp2"
_COLUMNS: Final = (*_CASES, _CLUSTER, _FSDP2)
_TABLE: Final = Path(__file__).with_name("versions.md")
_HEAD: Final = f"""\
# Older Pythons and PyTorches

Written by `make test-versions`. The coordinator ran on Python {platform.python_version()}; ranks, evaluation and
replay on the row's, and so did agents on SSH hosts and in the container. Each run was stopped in its first training
and resumed. A verdict with a metric is that of the standard case. *short*: 12 steps or four batches, in which the
audit found nothing but the missed target, the short time, the part of the data and the changed settings. *SSH hosts and
container*: a small case on two SSH hosts, on one in a container of podman, whose Python was the row's, and with Python
3.9 in an image built from Debian 11. *fsdp2*: the setting was refused before the start. Python 3.9 has no transformers
5.

| Python | PyTorch | Date | {" | ".join(_COLUMNS)} |
|---|---|---|{"---|" * len(_COLUMNS)}
"""


def main(arguments: list[str]) -> int:
    """Run the rows, write the table; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="*", default=list(ROWS))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", action="append", choices=_COLUMNS, default=[])
    parser.add_argument("--out", type=Path, default=_TABLE)
    options = parser.parse_args(arguments)
    table: Path = options.out
    has_failed = False
    for python in options.python:
        place = environment(python, ROWS[python])
        found = check(python, place, options.only or _COLUMNS, is_short=options.short)
        lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
        rows = {name: line for name in ROWS for line in lines if line.startswith(f"| {name} |")}
        kept = rows[python].strip("| ").split(" | ")[3:] if options.only else ["-"] * len(_COLUMNS)
        results = dict(zip(_COLUMNS, kept, strict=True)) | found
        cells = [python, ROWS[python], datetime.now(UTC).date().isoformat(), *results.values()]
        rows[python] = f"| {' | '.join(cells)} |"
        print(rows[python], flush=True)
        table.write_text(_HEAD + "".join(rows[name] + "\n" for name in ROWS if name in rows), encoding="utf-8")
        has_failed |= "failed" in rows[python]
    return int(has_failed)


def environment(python: str, torch: str) -> Path:
    """Return a virtual environment with this PyTorch and what ranks need; make it if it does not exist."""
    place = Path(".environments").absolute() / f"python{python}-torch{torch}"
    if not (place / "complete").is_file():
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
        program = str(pyenv[-1]) if pyenv else f"python{python}"  # pyenv's shims refuse what is not chosen
        subprocess.run([program, "-m", "venv", "--clear", place], check=True)
        needs = [need.requirement for need in RANK_NEEDS] + ["safetensors", f"torch=={torch}"]
        needs += requirement_texts(["accelmark[models]"]) if has_transformers(python) else []
        subprocess.run([place / "bin/python", "-m", "pip", "install", "--quiet", *needs], check=True)
        (place / "complete").touch()
    return place


def has_transformers(python: str) -> bool:
    """Return whether transformers 5 runs on a Python."""
    return tuple(map(int, python.split("."))) >= (3, 10)


def check(python: str, place: Path, columns: Sequence[str], *, is_short: bool) -> dict[str, str]:
    """Return {column: result} of the columns of one row that apply to it."""
    chosen = {name: case for name, case in _CASES.items() if name in columns}
    chosen = {name: case for name, case in chosen.items() if has_transformers(python) or "transformers" not in name}
    if is_short:
        chosen = {
            name: {**case, "settings": {**case.get("settings", {}), **_SHORT[case.get("task", "train")]}}
            for name, case in chosen.items()
        }
    results = {name: "-" for name in columns if name in _CASES}
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        file = _run_file(run.with_name("run.yaml"), place, list(chosen.values()), is_open=is_short)
        if chosen:
            process = _accelmark("run", file, "--out", run)
            while process.poll() is None and not _has_trained(run):
                time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            stopped = process.wait()
            _accelmark("resume", run).wait()
            if stopped == 130 and (run / "summary.json").is_file():
                cases = json.loads((run / "summary.json").read_text(encoding="utf-8"))["cases"]
                results |= {name: _result(case, is_short) for name, case in zip(chosen, cases, strict=True)}
            else:
                results |= dict.fromkeys(chosen, f"failed: exit code {stopped}")
        if _FSDP2 in columns:
            sharded = {"key": "llama_mini:pytorch:CPU:1:2", "settings": {"parallelism": "fsdp2"}}
            _accelmark("run", _run_file(file, place, [sharded]), "--out", run.with_name("fsdp2")).wait()
            results[_FSDP2] = "failed: it was started" if run.with_name("fsdp2").exists() else "refused"
    if _CLUSTER in columns:
        tests = [sys.executable, "-m", "pytest", "-q", "tests/cluster/test_old_python.py"]
        variables = os.environ | {"ACCELMARK_OLD_PYTHON": str(place / "bin/python")}
        done = subprocess.run(tests, env=variables, text=True, stdout=subprocess.PIPE, check=False)
        print(done.stdout, flush=True)
        results[_CLUSTER] = ("VALID" if "passed" in done.stdout else "-") if done.returncode == 0 else "failed"
    return results


def _has_trained(run: Path) -> bool:
    return any('"STEP_END"' in log.read_text() for log in run.rglob("rank0.out.log"))


def _accelmark(*arguments: str | Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen([sys.executable, "-m", "accelmark", *arguments], env=environment)


def _run_file(file: Path, place: Path, cases: list[dict[str, Any]], *, is_open: bool = False) -> Path:
    cluster = {"environments": {"pytorch": str(place)}}
    file.write_text(yaml.safe_dump({"name": "versions", "open": is_open, "cluster": cluster, "cases": cases}))
    return file


def _result(case: dict[str, Any], is_short: bool) -> str:
    """Return the cell of a case in ``summary.json``."""
    rules = {each["rule"] for each in case["findings"] if each["severity"] in ("error", "open")}
    rules -= _BROKEN_BY_SHORT if is_short else set()
    if rules or case["state"] != "succeeded":
        return f"failed: {', '.join(sorted(rules)) or case['state']}"
    metric = case["figures"].get("final_metric") or case["figures"].get("engine_metric") or {}
    return "short" if is_short else f"{case['verdict']}, {metric.get('mean'):.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
