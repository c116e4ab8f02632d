"""Check answers: those under load by the framework's own greedy answers, a model's by lm-evaluation-harness.

``python -m accelmark.serving.answers MODEL_DIR DEVICE DTYPE PROMPTS ANSWERS`` lets the framework answer one prompt at a
time: it reads JSON lines with ``text``, ``max_tokens`` and ``pinned``, writes a JSON string for each, and prints the
:class:`StartTimes` of the model in its last line. With the device ``auto``, accelerate spreads the layers over all
devices.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accelmark.serving.request import PlannedRequest, Watch
from accelmark.serving.server_process import run_reporting
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.inference import ANSWERS_FILE, SCORES_FILE, Answer, BenchmarkScore, RequestRecord, StartTimes
from accelmark.spec.plugins.framework import module_command
from accelmark.spec.settings.inference import BenchmarkSettings
from accelmark.spec.settings.serving import ServeSettings
from accelmark.train.loop.process import process_start

if TYPE_CHECKING:
    from accelmark.serving.load import ServedModel  # not timed as loading of the model

_HARNESS_LOG: Final = "harness.log"
_DTYPES: Final = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "bfloat16"}


class AnswerSample:
    """A uniform sample of the answers of a run (reservoir sampling, Vitter 1985, algorithm R)."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.answers: list[tuple[str, RequestRecord, str]] = []
        """Prompt, record and text of each."""
        self._size = size
        self._rng = rng
        self._num_seen = 0

    def add(self, request: PlannedRequest, record: RequestRecord, text: str) -> None:
        """Consider an answer; those to a chat are left out, since their prompt depends on a template."""
        if not isinstance(request.content, str) or self._size == 0:
            return
        self._num_seen += 1
        if len(self.answers) < self._size:
            self.answers.append((request.content, record, text))
        elif (place := self._rng.randrange(self._num_seen)) < self._size:
            self.answers[place] = request.content, record, text


def compare_answers(
    settings: ServeSettings, job: JobSpec, model: ServedModel, sample: AnswerSample, node_dir: Path, report: Watch
) -> StartTimes | None:
    """Let the framework answer the sampled prompts in its own process; write an :class:`Answer` for each.

    It uses several devices where the job did: one may not hold the model. ``report`` is called every second meanwhile.
    Returns the times in which it loaded the model; None without a tokenizer, where nothing is compared.
    """
    tokens = model.tokens
    if tokens is None:
        return None
    prompts, answers = node_dir / "compared_prompts.jsonl", node_dir / "framework_answers.jsonl"
    lines = (
        json.dumps({"text": prompt, "max_tokens": record.requested_tokens, "pinned": settings.is_pinned})
        for prompt, record, _ in sample.answers
    )
    prompts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    device = "auto" if job.key.nproc > 1 and job.device_type != "cpu" else job.device_type
    command = module_command(
        sys.executable, "accelmark.serving.answers", str(model.directory), device,
        _DTYPES[settings.precision], str(prompts), str(answers),
    )  # fmt: skip
    done = run_reporting(command, report)
    if done.returncode:
        last = " / ".join(done.stderr.splitlines()[-3:])
        raise RunError(f"the framework could not answer the sampled prompts: {last}")
    with (node_dir / ANSWERS_FILE).open("w", encoding="utf-8") as stream:
        expected = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
        for (_, record, answer), text in zip_strict(sample.answers, expected):
            wanted = tokens(text)
            agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(tokens(answer), wanted))
            compared = Answer(
                stage=record.stage, number=record.number, prompt=record.prompt, num_tokens=len(wanted),
                num_agreeing=sum(1 for _ in agreeing),
            )  # fmt: skip
            stream.write(compared.model_dump_json() + "\n")
    return StartTimes.model_validate_json(done.stdout.splitlines()[-1])


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
        result = _run_task(file, node_dir, settings.benchmark_timeout_s, watch, engine)
        score = BenchmarkScore.model_validate_json(result.read_bytes())
        with (node_dir / SCORES_FILE).open("a", encoding="utf-8") as stream:
            stream.write(score.model_dump_json() + "\n")


def _run_task(request: Path, node_dir: Path, timeout_s: float, watch: Watch, engine: Callable[..., Any] | None) -> Path:
    result = request.with_suffix(".result.json")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(node_dir / "harness"), "TOKENIZERS_PARALLELISM": "false"}
    ours, theirs = Pipe()
    handed = theirs.fileno()
    command = module_command(sys.executable, "accelmark.serving.harness", str(request), str(result), str(handed))
    log = node_dir / _HARNESS_LOG
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
                raise RunError(f"{request.stem}: {problem}; see {_HARNESS_LOG}")
        process.wait()
    finally:
        ours.close()
        process.kill()
        process.wait()
    if process.returncode:
        last = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise RunError(f"lm-evaluation-harness ended with status {process.returncode}: {last}; see {_HARNESS_LOG}")
    return result


def main(arguments: list[str]) -> int:
    """Answer the prompts; return the exit code."""
    model_dir, device, dtype, prompts, answers = arguments
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    placement = {"device_map": device} if device == "auto" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, local_files_only=True, dtype=getattr(torch, dtype), **placement
    )
    model = (model if placement else model.to(device)).eval()
    loaded = StartTimes(cpu_s=time.process_time(), wall_s=time.monotonic() - process_start())
    with Path(answers).open("w", encoding="utf-8") as stream:
        for line in Path(prompts).read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)
            inputs = tokenizer(prompt["text"], return_tensors="pt").to(model.device)
            length = prompt["max_tokens"]
            least = length if prompt["pinned"] else None
            output = model.generate(**inputs, do_sample=False, max_new_tokens=length, min_new_tokens=least)
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            stream.write(json.dumps(text) + "\n")
    print(loaded.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
