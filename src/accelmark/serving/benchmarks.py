"""Let lm-evaluation-harness measure the accuracy of a served model, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from accelmark.serving.request import Endpoint
from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import SCORES_FILE, BenchmarkScore
from accelmark.spec.settings.serving import ServeSettings

LOG_FILE: Final = "harness.log"
"""In the node's directory: output of the harness."""
_POLL_S: Final = 1.0
_LAST_LINES: Final = 3


def run_benchmarks(
    settings: ServeSettings,
    target: Endpoint,
    model_dir: Path | None,
    data_dirs: Mapping[str, Path],
    node_dir: Path,
    watch: Callable[[], None],
) -> None:
    """Run the tasks of the settings one after the other; append a :class:`BenchmarkScore` for each.

    Args:
        settings: with the tasks and their limits.
        target: the server.
        model_dir: directory of the model, for its tokenizer.
        data_dirs: task -> directory of its data set, a clone of the repository on Hugging Face.
        node_dir: for the scores, and the harness's log and cache.
        watch: called every second; what it raises ends the task.

    Raises:
        RunError: the harness failed, or took longer than ``benchmark_timeout_s``.
    """
    for task in settings.benchmarks:
        request = {
            "task": task,
            "url": target.url("completions"),
            "model": target.model,
            "tokenizer": str(model_dir) if model_dir is not None else None,
            "data": str(data_dirs[task]),
            "limit": settings.benchmark_limit,
            "num_concurrent": max(settings.load.concurrency, default=1),
        }
        file = node_dir / f"harness_{task}.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        score = BenchmarkScore.model_validate(_run(file, node_dir, settings.benchmark_timeout_s, watch))
        with (node_dir / SCORES_FILE).open("a", encoding="utf-8") as stream:
            stream.write(score.model_dump_json() + "\n")


def _run(request: Path, node_dir: Path, timeout_s: float, watch: Callable[[], None]) -> object:
    result = request.with_suffix(".result.json")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(node_dir / "harness"), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "accelmark.serving.harness", str(request), str(result)]
    log = node_dir / LOG_FILE
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, env=os.environ | offline, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    end_s = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            watch()
            if time.monotonic() > end_s:
                raise RunError(
                    f"{request.stem}: no result within {timeout_s:g} s (benchmark_timeout_s); see {LOG_FILE}"
                )
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = " / ".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise RunError(f"lm-evaluation-harness ended with status {process.returncode}: {last}; see {LOG_FILE}")
    found: object = json.loads(result.read_text(encoding="utf-8"))
    return found
