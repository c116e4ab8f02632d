"""Run cases with ranks on older Pythons and PyTorches: ``python -m benchmarks.versions [PYTHON...]`` (``3.9``).

Each row makes a virtual environment in ``.environments``, runs small cases in it from this Python, stops the run in the
middle of training, resumes it, and writes its row of ``benchmarks/versions.md``. Rows that are not asked for are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from accelmark.run.preflight.packages import RANK_NEEDS

ROWS: Final = {"3.9": "2.4.1", "3.10": "2.6.0", "3.12": "2.8.0"}
"""Python -> PyTorch."""
_SHORT: Final = {"end.max_steps": 12, "evaluate.every_steps": 6}
_CASES: Final[dict[str, dict[str, Any]]] = {
    "resnet_mini, 2 ranks": {"key": "resnet_mini:pytorch:CPU:1:2", "settings": _SHORT},
    "llama_mini": {"key": "llama_mini:pytorch:CPU:1:1", "settings": _SHORT},
    "eager": {"key": "resnet_mini", "task": "infer", "settings": {"compiler": "eager", "max_batches": 4}},
    "inductor": {"key": "resnet_mini", "task": "infer", "settings": {"compiler": "inductor", "max_batches": 4}},
    "translation_mini (transformers)": {"key": "translation_mini:pytorch:CPU:1:1", "settings": _SHORT},
}
_EXPECTED: Final = {"target-missed", "partial-evaluation", "declared-open"}
"""Rules that a short run breaks."""
_TABLE: Final = Path(__file__).with_name("versions.md")
_HEAD: Final = f"""\
# Older Pythons and PyTorches

`make test-versions`. Agents and coordinator ran on this machine's Python; ranks, evaluation and replay on the row's.
*passed*: the short training was stopped, resumed, evaluated and replayed outside, and the audit found nothing but the
missed target and the part of the data; the inference answered as the framework. Python 3.9 has no transformers 5.

| Python | PyTorch | Date | {" | ".join(_CASES)} |
|---|---|---|{"---|" * len(_CASES)}
"""


def main(chosen: list[str]) -> int:
    """Run the rows, write the table; return 1 if a case failed."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines() if _TABLE.is_file() else []
    rows = {python: line for python in ROWS for line in lines if line.startswith(f"| {python} |")}
    for python in chosen or ROWS:
        found = check(python, environment(python, ROWS[python]))
        cells = [python, ROWS[python], datetime.now(UTC).date().isoformat(), *found.values()]
        rows[python] = f"| {' | '.join(cells)} |"
        print(rows[python], flush=True)
        _TABLE.write_text(_HEAD + "".join(rows[name] + "\n" for name in ROWS if name in rows), encoding="utf-8")
    return int(any("failed" in rows[python] for python in chosen or ROWS))


def environment(python: str, torch: str) -> Path:
    """Return a virtual environment with this PyTorch and what ranks need; make it if it does not exist."""
    place = Path(".environments").absolute() / f"python{python}-torch{torch}"
    if not (place / "complete").is_file():
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
        program = shutil.which(f"python{python}") or str(pyenv[-1])
        subprocess.run([program, "-m", "venv", "--clear", place], check=True)
        needs = [need.requirement for need in RANK_NEEDS] + ["safetensors", f"torch=={torch}"]
        needs += ["transformers>=5.0"] if has_transformers(python) else []
        subprocess.run([place / "bin/python", "-m", "pip", "install", "--quiet", *needs], check=True)
        (place / "complete").touch()
    return place


def has_transformers(python: str) -> bool:
    """Return whether transformers 5 runs on a Python."""
    return tuple(map(int, python.split("."))) >= (3, 10)


def check(python: str, place: Path) -> dict[str, str]:
    """Return {case: ``passed``, or what failed} of one row."""
    names = [name for name in _CASES if has_transformers(python) or "transformers" not in name]
    with tempfile.TemporaryDirectory() as directory:
        file, run = Path(directory) / "run.yaml", Path(directory) / "run"
        cluster = {"environments": {"pytorch": str(place)}}
        spec = {"name": "versions", "open": True, "cluster": cluster, "cases": [_CASES[name] for name in names]}
        file.write_text(yaml.safe_dump(spec), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-m", "accelmark"]
        process = subprocess.Popen([*command, "run", str(file), "--out", str(run)], env=environment)
        while process.poll() is None and not any('"STEP_END"' in log.read_text() for log in run.rglob("rank0.out.log")):
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        stopped = process.wait()
        subprocess.run([*command, "resume", str(run)], env=environment, check=False)
        if not (run / "summary.json").is_file():
            return dict.fromkeys(_CASES, f"failed: exit code {stopped}")
        cases = json.loads((run / "summary.json").read_text(encoding="utf-8"))["cases"]
    found = dict.fromkeys(_CASES, "-")
    for name, case in zip(names, cases, strict=True):
        errors = {each["rule"] for each in case["findings"] if each["severity"] in ("error", "open")} - _EXPECTED
        found[name] = f"failed: {', '.join(sorted(errors))}" if errors else "passed"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
