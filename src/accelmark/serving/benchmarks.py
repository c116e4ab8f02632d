"""Let lm-evaluation-harness measure the accuracy of a served or offline model, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

from accelmark.serving.request import Watch
from accelmark.spec.errors import RunError
from accelmark.spec.log.inference import SCORES_FILE, BenchmarkScore
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.settings.inference import BenchmarkSettings

LOG_FILE: Final = "harness.log"


def run_benchmarks(
    settings: BenchmarkSettings,
    model: Mapping[str, object],
    data_dirs: Mapping[str, Path],
    node_dir: Path,
    watch: Watch,
    engine: Callable[..., Any] | None = None,
) -> None:
    """Run the tasks of the settings one after the other; append a :class:`BenchmarkScore` for each in ``node_dir``.

    ``model`` has ``url``, ``model``, ``tokenizer`` and ``num_concurrent`` of a server, or ``model_dir`` and
    ``batch_size`` of an engine, which executes the commands ``score`` and ``answer``. ``data_dirs`` are clones of the
    tasks' repositories on Hugging Face. ``watch`` is called every second; its exceptions end the task.
    """
    for task in settings.benchmarks:
        request = {"task": task, "data": str(data_dirs[task]), "limit": settings.benchmark_limit, "model": dict(model)}
        file = node_dir / f"harness_{task}.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        result = _run(file, node_dir, settings.benchmark_timeout_s, watch, engine)
        score = BenchmarkScore.model_validate_json(result.read_bytes())
        with (node_dir / SCORES_FILE).open("a", encoding="utf-8") as stream:
            stream.write(score.model_dump_json() + "\n")


def _run(request: Path, node_dir: Path, timeout_s: float, watch: Watch, engine: Callable[..., Any] | None) -> Path:
    result = request.with_suffix(".result.json")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(node_dir / "harness"), "TOKENIZERS_PARALLELISM": "false"}
    ours, theirs = Pipe()
    handed = theirs.fileno()
    command = module_command(sys.executable, "accelmark.serving.harness", str(request), str(result), str(handed))
    log = node_dir / LOG_FILE
    with log.open("ab") as stream, theirs:
        process = subprocess.Popen(
            command, env=os.environ | offline, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            pass_fds=[handed],
        )  # fmt: skip
    end_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                if ours.poll(1.0):
                    command, values = json.loads(ours.recv_bytes())
                    ours.send_bytes(json.dumps(engine(command, **values) if engine else None).encode())
            except (EOFError, OSError):
                break  # the harness ended
            watch()
            if time.monotonic() > end_s:
                problem = f"no result within {timeout_s:g} s (benchmark_timeout_s)"
                raise RunError(f"{request.stem}: {problem}; see {LOG_FILE}")
        process.wait()
    finally:
        ours.close()
        process.kill()
        process.wait()
    if process.returncode:
        last = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise RunError(f"lm-evaluation-harness ended with status {process.returncode}: {last}; see {LOG_FILE}")
    return result
