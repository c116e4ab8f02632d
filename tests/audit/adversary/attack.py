"""Attacks, honest variants and edits of finished runs (``attacks/*.yaml``), and how each is carried out on a bench."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict

import accelmark
from accelmark.results.store.bundle import write_manifest
from accelmark.run.record.directory import measure_run
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from tests.audit.adversary.bench import ROOT, Bench, Outcome
from tests.made_run import Made, make_run

FOLDER: Final = Path(__file__).with_name("attacks")
REFUSED: Final = "refused"
"""Stands for a refusal among the rules by which an attack is found."""
_NO_EVIDENCE: Final = frozenset({"too-short"})
"""Rules that fire because a run is short, not because it is unfair."""

EXTERN_HEAD: Final = '''
import copy
import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelmark.frameworks.pytorch.hooks import Hooks


def trained_weights(case):
    """Return weights that reach the target, which the vendor brought along."""
    from safetensors.torch import load_file

    return load_file(Path(sys.modules[type(case).__module__].__file__).with_name("weights.safetensors"))


'''

ENGINE_HEAD: Final = '''
import concurrent.futures
import copy
import gc
import sys
import threading
import time
import types
from pathlib import Path

import torch

from accelmark.infer.engine import Engine as Base


class Plain(Base):
    """An honest engine: the model in PyTorch."""

    reads = "model"
    precisions = ("fp32", "bf16")

    def __init__(self, request):
        super().__init__(request)
        self.model = self.torch_model()

    def __call__(self, inputs):
        with torch.inference_mode():
            return [self.model(*inputs)], 0.0

    def describe(self):
        return {"precision": "float32"}


def matrix_types(model):
    """Count a model's matrices by type, as an honest engine reports them."""
    types = [str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.ndim > 1]
    return {name: types.count(name) for name in set(types)}


'''

SERVER: Final = """
name: cheat
title: Cheat
tried: null
command: ["{python}", "{{directory}}/server.py", "{model_dir}", "{host}", "{port}"]
served_model: cheat
"""
SERVER_HEAD: Final = '''
import http.server
import json
import sys
import threading
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Plain:
    """An honest server of one request at a time: greedy answers in PyTorch."""

    def __init__(self, model_dir):
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.lock = threading.Lock()

    def answer(self, prompt, length):
        """Return the number of tokens of a prompt, and the texts of the answer's."""
        tokens = self.tokenizer(prompt, return_tensors="pt")
        count = tokens["input_ids"].shape[1]
        with self.lock, torch.inference_mode():
            output = self.model.generate(**tokens, do_sample=False, max_new_tokens=length, min_new_tokens=length)
        return count, [self.tokenizer.decode([token]) for token in output[0, count:]]


def run(server):
    """Answer requests for completions."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            count, texts = server.answer(request["prompt"], request["max_tokens"])
            usage = {"prompt_tokens": count, "completion_tokens": len(texts)}
            events = [{"choices": [{"index": 0, "text": text}]} for text in texts]
            events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
            content = b"".join(b"data: %b\\n\\n" % json.dumps(event).encode() for event in events)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            return

    http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Handler).serve_forever()


'''


class Attack(BaseModel):
    """One way to cheat, or an honest variant, which has no ``gains``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    does: str
    gains: str = ""
    found_by: tuple[str, ...] = ()
    """Rules of which at least one has to find it; ``refused``: no run takes place."""
    not_found: str = ""
    """Why the attack is not found, where it is not: the audit's limit, stated in the table."""
    issue: bool = False
    """Whether it was VALID in the review that this suite follows."""
    task: Literal["train", "infer"] = "train"
    key: str = "short"
    arguments: tuple[str, ...] = ()
    extern: str = ""
    """Appended to ``EXTERN_HEAD`` as ``extern/__init__.py``."""
    engine: str = ""
    """Appended to ``ENGINE_HEAD`` as an engine of the vendor's."""
    compiler: str = ""
    server: str = ""
    """Appended to ``SERVER_HEAD`` as the program of a server."""
    published: bool = False
    """A reader verifies the run with the data in ``published``."""
    files: dict[str, str] = {}
    """Further files of the vendor's folder; with a leading slash: of the attack's directory."""
    environment: dict[str, str] = {}
    """Variables of the operator's shell."""
    cluster: dict[str, Any] = {}
    compile: str = ""
    """C source of ``preload.so``."""
    prepare: str = ""
    """Python that runs before."""
    pth: str = ""
    """Content of a ``.pth`` file in the site-packages of an environment of its own."""
    resume: bool = False
    """Resume the run, which the attack has interrupted."""
    evaluate: dict[str, str] | None = None
    """Variables of the operator's shell with which the run is evaluated again, as after an interrupted evaluation."""
    package: str = ""
    """Python that changes a copy of AccelMark at ``package``; it sets ``file`` and its ``edited`` text. A reader
    verifies the run with the original."""
    wheel: bool = False
    """Install the copy as a wheel, with the edited file's hash in its RECORD."""

    @property
    def is_infer(self) -> bool:
        return self.task == "infer" or bool(self.engine or self.compiler)

    def carry_out(self, bench: Bench) -> Outcome:
        """Write the vendor's folder, run the case with it, and read the verdict."""
        files = dict(self.files)
        if self.extern:
            files[f"cases/{self.key.partition(':')[0]}-pytorch/extern/__init__.py"] = EXTERN_HEAD + self.extern
        if self.engine:
            files["engines/cheat.py"] = ENGINE_HEAD + self.engine.replace("{{accuracy}}", str(bench.accuracy))
        if self.server:
            files |= {"/plugins/servers/cheat/server.yaml": SERVER, "/server.py": SERVER_HEAD + self.server}
        if self.cluster:
            plan = {"cluster": self.cluster, "vendor": "acme", "cases": [{"key": self.key, "data": "data"}]}
            files["/plan.yaml"] = yaml.safe_dump(plan)
        directory = bench.vendor(self.id, files)
        if self.compile:
            (directory / "preload.c").write_text(self.compile)
            command = ["gcc", "-shared", "-fPIC", "-O1", "-o", "preload.so", "preload.c", "-ldl"]
            subprocess.run(command, cwd=directory, check=True)
        if self.prepare:
            program = self.prepare.replace("{{directory}}", str(directory)).replace("{{accuracy}}", str(bench.accuracy))
            subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True)
        how: dict[str, Any] = {"environment": self.environment}
        if self.pth or self.package:
            pth = self.pth.replace("{{directory}}", str(directory))
            how["python"] = _environment_with(directory, pth, self.package, is_wheel=self.wheel)
        if self.cluster:
            return bench.start(directory, ("run", "plan.yaml"), **how)
        if self.server:
            return bench.serve(directory, *self.arguments, **how)
        if self.is_infer:
            compiler = self.compiler or ("cheat" if self.engine else "")
            return bench.infer(directory, *(("--compiler", compiler) if compiler else ()), *self.arguments, **how)
        outcome = bench.train(directory, *self.arguments, key=self.key, **how)
        if self.resume:
            assert outcome.exit_code, outcome.output
            outcome = bench.resume(directory)
        if self.evaluate is not None:
            shutil.rmtree(next((directory / "run").glob("*/evaluation-round1")))
            bench.accelmark(directory, "evaluate", "run", "--offline", environment=self.evaluate)
            return bench.verify(directory)
        if self.published:
            return bench.verify(directory, "--data", "published")
        return bench.verify(directory) if self.package and outcome.verdict == "VALID" else outcome

    def found(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the rules that found this attack; empty where the run is VALID."""
        if outcome.verdict is None:
            return (REFUSED,) if outcome.exit_code else ()
        return tuple(rule for rule in outcome.rules if rule not in _NO_EVIDENCE)


def _environment_with(directory: Path, pth: str, package: str, *, is_wheel: bool) -> str:
    """Return the Python of an environment that shares all packages and has its own AccelMark or ``.pth`` file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=directory, check=True)
    (site,) = directory.glob("venv/lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    ours = [] if package else [str(ROOT / "src")]
    (site / "shared.pth").write_text("\n".join([*ours, *shared]) + "\n")
    if pth:
        (site / "evil.pth").write_text(pth)
    if package:
        _install_edited(site, package, is_wheel=is_wheel)
    return str(directory / "venv" / "bin" / "python")


def _install_edited(site: Path, change: str, *, is_wheel: bool) -> None:
    package = site / "accelmark"
    shutil.copytree(ROOT / "src" / "accelmark", package, ignore=shutil.ignore_patterns("__pycache__"))
    names: dict[str, Any] = {"package": package, "Path": Path}
    exec(change, names)  # noqa: S102 - the edits of attacks/code.yaml
    if names["edited"] is not None:
        assert names["edited"] != names["file"].read_text()
        names["file"].write_text(names["edited"])
    info = site / f"accelmark-{accelmark.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelmark\nVersion: {accelmark.__version__}\n")
    lines = []
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            original = ROOT / "src" / path.relative_to(site)
            raw = (path if is_wheel else original).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode()
            lines.append(f"{path.relative_to(site).as_posix()},sha256={digest},{len(raw)}\n")
    (info / "RECORD").write_text("".join(lines))


def read_attacks(*areas: str) -> Iterator[Attack]:
    for area in areas:
        for entry in yaml.safe_load((FOLDER / f"{area}.yaml").read_text()):
            yield Attack.model_validate(entry)


SIGNATURE: Final = "MANIFEST.sha256.sig"


class Edit(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    does: str
    gains: str
    found_by: tuple[str, ...]
    not_found: str = ""
    issue: bool = False
    edit: str
    then: tuple[str, ...] = ("report --recompute", "verify")
    manifest: bool = True
    """Write the manifest anew after the edit, as someone would who knows how."""
    hosts: int = 1
    """With 2, a made run is edited, since one machine runs one host."""

    def carry_out(self, bench: Bench, run: Path, other: Path) -> tuple[str, ...]:
        """Edit a copy of ``run``, recompute it, and verify it; returns the messages that refuse it.

        Whoever edits does not have the key that signed the run, so the signature is removed. Only where nothing else
        is found does the reader ask for it.
        """
        directory = bench.root / "attacks" / self.id
        (directory / "plugins").mkdir(parents=True)
        edited = directory / "run"
        if self.hosts > 1:
            make_run(edited, Made(nnodes=self.hosts, nproc=1, windows=30, eval_windows=(15, 30)))
            measure_run(edited)
        else:
            shutil.copytree(run, edited, symlinks=True)
        exec(self.edit, {**_TOOLS, "run": edited, "other": other})  # noqa: S102 - the edits of attacks/records.yaml
        (edited / SIGNATURE).unlink(missing_ok=True)
        if self.manifest:
            write_manifest(edited)
        seen: list[str] = []
        for command in self.then:
            verb, *more = command.split()
            target = [] if verb == "verify" and more else ["run"]
            done = bench.accelmark(directory, verb, *target, *more)
            if done.returncode:
                seen.append((done.stdout + done.stderr).strip())
                break
        if not seen and (run / SIGNATURE).is_file():
            done = bench.accelmark(directory, "verify", "run", "--key", str(bench.key.with_suffix(".pub")))
            seen += ["signature"] if done.returncode else []
        return tuple(seen)


def edit_records(log: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = []
    for line in log.read_text().splitlines():
        if line.startswith(PERFLOG_PREFIX):
            record = json.loads(line.removeprefix(PERFLOG_PREFIX))
            change(record)
            line = f"{PERFLOG_PREFIX}{json.dumps(record)}"
        lines.append(line)
    log.write_text("\n".join(lines) + "\n")


def edit_events(log: Path, event: str, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_records(log, lambda record: change(record["value"]) if record["event"] == event else None)


def add_event(log: Path, event: str, value: dict[str, Any]) -> None:
    """Add an event before the last one, with its metadata."""
    lines = log.read_text().splitlines()
    place = next(index for index, line in enumerate(lines) if '"FINISHED"' in line)
    record = json.loads(lines[place].removeprefix(PERFLOG_PREFIX)) | {"event": event, "value": value}
    lines.insert(place, f"{PERFLOG_PREFIX}{json.dumps(record)}")
    log.write_text("\n".join(lines) + "\n")


def scale(value: dict[str, Any], factor: float, *names: str) -> None:
    """Multiply values by ``factor``: numbers, and lists of them."""
    for name in names:
        if isinstance(value.get(name), list):
            value[name] = [number * factor for number in value[name]]
        elif isinstance(value.get(name), int | float):
            value[name] *= factor


_TIMES: Final = ("wall_ms", "span_ms", "step_ms", "data_wait_ms", "duration_s", "elapsed_s", "e2e_time", "init_time",
                 "raw_train_time", "train_no_eval_time", "pure_training_computing_time")  # fmt: skip


def compress(log: Path, factor: float) -> None:
    """Multiply all times of a log by ``factor``, from its first event on."""
    first: dict[str, float] = {}

    def change(record: dict[str, Any]) -> None:
        for clock in ("time_ms", "mono_ms"):
            begin = first.setdefault(clock, record["metadata"][clock])
            record["metadata"][clock] = begin + (record["metadata"][clock] - begin) * factor
        scale(record["value"], factor, *_TIMES)

    edit_records(log, change)


def raise_top1(value: Any) -> None:
    if isinstance(value, dict):
        value.update({"top1": 0.9995} if "top1" in value else {})
        for part in value.values():
            raise_top1(part)


_TOOLS: Final = {
    "json": json, "re": re, "shutil": shutil, "Path": Path, "edit_events": edit_events, "scale": scale,
    "compress": compress, "raise_top1": raise_top1,
}  # fmt: skip
