"""A machine to cheat on: a short case with generated data, one vendor folder for each attack, and the real command."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

ROOT: Final = Path(__file__).parents[3]
CASE: Final = Path(__file__).with_name("case")
CASES: Final = {"short": 2, "long": 6, "folders": 2}
"""Names of the case, by its number of epochs of 100 steps; ``folders`` reads its files from a directory ``idx`` whose
contents it does not fix."""
_NUM_IMAGES: Final = {"train": 6_400, "t10k": 1_027}
"""The last batch of inference is a short one: 1,027 = 16 x 64 + 3."""
_TIMEOUT_S: Final = 600
_MAIN: Final = "from accelmark.cli import main; main()"

VENDOR: Final = """
name: acme
title: Acme (made up for tests; its device is the CPU)
frameworks:
  pytorch: {device_type: cpu, collective_backend: gloo}
visible_devices_env: null
telemetry:
  detect: {always: true}
  tool:
    command: ["{{directory}}/acme-smi"]
    timeout_s: 5
    forms:
      - header: ['ID Temp Power']
        rows: ['(?P<index>\\d+) (?P<temperature_c>\\d+C) (?P<power_w>\\d+W)']
        source: made up for tests
chips: []
"""
TOOL: Final = """#!/bin/sh
echo 'ID Temp Power'
echo "0 31C 5$(date +%N | cut -c 3)W"
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a run as a reader sees it."""

    exit_code: int
    output: str
    verdict: str | None
    """None where the run was refused, or failed before it had one."""
    findings: tuple[tuple[str, str, str], ...] = ()
    """(severity, rule, text), errors and open ones only."""

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule for _, rule, _ in self.findings))


@dataclass(frozen=True)
class Bench:
    """The case with its data, made once; ``python`` runs the command of each attack."""

    root: Path

    @property
    def accuracy(self) -> float:
        """Accuracy of the inference case's weights on the evaluation images."""
        return float((self.root / "accuracy").read_text())

    @classmethod
    def make(cls, root: Path) -> Bench:
        """Generate data and weights, and write the case around their hashes."""
        data, case = root / "data", root / "plugins" / "cases" / "short"
        data.mkdir(parents=True)
        case.mkdir(parents=True)
        patterns = np.random.default_rng(0).normal(size=(10, 7, 7)).repeat(4, 1).repeat(4, 2)
        files: list[dict[str, Any]] = []
        for seed, (split, count) in enumerate(_NUM_IMAGES.items(), start=1):
            chance = np.random.default_rng(seed)
            labels = chance.integers(0, 10, count)
            noise = chance.normal(size=(count, 28, 28)) * 4
            images = ((patterns + patterns[:, :, ::-1])[labels] * 0.7 + noise) * 30 + 128
            parts = {f"{split}-images-idx3-ubyte": images, f"{split}-labels-idx1-ubyte": labels}
            for name, values in parts.items():
                raw = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}i", *values.shape)
                raw += values.clip(0, 255).astype(np.uint8).tobytes()
                (data / name).write_bytes(raw)
                files.append({"path": name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)})
        for file in CASE.glob("*.py"):
            shutil.copy(file, case)
        _write_weights(case, data)
        settings = yaml.safe_load((CASE / "case.yaml").read_text())
        settings["data"][0]["files"] = files
        for name, epochs in CASES.items():
            settings["name"] = name
            settings["train"]["settings"]["end"]["max_epochs"] = epochs
            if name != case.name:
                shutil.copytree(case, case.with_name(name))
            if name == "folders":
                settings["data"][0] |= {
                    "files": [],
                    "tree": [{"path": "idx", "suffixes": ["ubyte"], "by_class": False}],
                }
                program = case.with_name(name) / "pytorch.py"
                program.write_text(program.read_text().replace('["images"]', '["images"] / "idx"'))
            (case.with_name(name) / "case.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        return cls(root)

    @property
    def key(self) -> Path:
        """The SSH key of an operator who signs runs; readers have ``key.pub``."""
        return self.root / "key"

    def vendor(self, name: str, files: Mapping[str, str]) -> Path:
        """Write a vendor's folder (``files`` relative to it) with its own copy of the data; returns its directory."""
        directory = self.root / "attacks" / name
        folder = directory / "plugins" / "vendors" / "acme"
        folder.mkdir(parents=True)
        shutil.copytree(self.root / "data", directory / "data")
        for path, text in {"vendor.yaml": VENDOR, "/acme-smi": TOOL, **files}.items():
            target = directory / path[1:] if path.startswith("/") else folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{{directory}}", str(directory)).replace("{{python}}", sys.executable))
            if text.startswith("#!"):
                target.chmod(0o755)
        return directory

    def accelmark(
        self,
        directory: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {
            "ACCELMARK_PLUGINS": f"{directory / 'plugins'}{os.pathsep}{self.root / 'plugins'}",
            "XDG_STATE_HOME": str(self.root / "state"),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        variables |= {name: text.replace("{{directory}}", str(directory)) for name, text in (environment or {}).items()}
        return subprocess.run(
            [python, "-c", _MAIN, *arguments],
            cwd=directory,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )

    def start(self, directory: Path, command: Sequence[str], **options: Any) -> Outcome:
        """Run a case to its end in ``directory``/run, and read its verdict."""
        given = [word.replace("{{directory}}", str(directory)) for word in command]
        offline = () if command[0] == "serve" else ("--offline",)
        return read_outcome(directory / "run", self.accelmark(directory, *given, "--out", "run", *offline, **options))

    def verify(self, directory: Path, *more: str) -> Outcome:
        """Verify the run in ``directory`` as a reader with the original AccelMark; differences are findings, too."""
        done = self.accelmark(directory, "verify", "run", "--json", *more)
        try:
            verified = json.loads(done.stdout)
        except ValueError:
            return Outcome(done.returncode, done.stdout + done.stderr, None)
        outcome = _outcome(verified["cases"][0], done)
        differences = tuple(("error", "verify", text) for text in verified["differences"])
        return replace(outcome, findings=outcome.findings + differences)

    def train(self, directory: Path, *more: str, key: str = "short", **options: Any) -> Outcome:
        return self.start(directory, ("train", key, "--vendor", "acme", "--data", "data", *more), **options)

    def resume(self, directory: Path) -> Outcome:
        return read_outcome(directory / "run", self.accelmark(directory, "resume", "run", "--failed"))

    def infer(self, directory: Path, *more: str, **options: Any) -> Outcome:
        return self.start(directory, ("infer", "short", "--vendor", "acme", "--data", "data", *more), **options)

    def serve(self, directory: Path, *more: str, **options: Any) -> Outcome:
        """Serve the small Llama with the server of ``directory`` for a few seconds."""
        load = ("--concurrency", "2", "--duration", "6", "--set", "load.warmup_requests=0")
        command = ("serve", "llama_mini", "--vendor", "acme", "--server", "cheat", *load, *more)
        return self.start(directory, command, **options)


def read_outcome(run: Path, done: subprocess.CompletedProcess[str]) -> Outcome:
    text = done.stdout + done.stderr
    try:
        (case,) = json.loads((run / "summary.json").read_text())["cases"]
    except (OSError, ValueError):
        return Outcome(done.returncode, text, None)
    return _outcome(case, done)


def _outcome(case: Mapping[str, Any], done: subprocess.CompletedProcess[str]) -> Outcome:
    findings = [entry for entry in case["findings"] if entry["severity"] in ("error", "open")]
    listed = tuple((entry["severity"], entry["rule"], str(entry["actual"])) for entry in findings)
    return Outcome(done.returncode, done.stdout + done.stderr, case["verdict"], listed)


_TRAIN_WEIGHTS: Final = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from accelmark.cases.resnet_mini._fashion import read_split
from accelmark.cases.resnet_mini.pytorch import ResNetMini
torch.set_num_threads(1); torch.manual_seed(1)
images, labels = map(torch.from_numpy, read_split(Path(sys.argv[1]), "train"))
model = ResNetMini(8, 3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for chosen in torch.randperm(len(images)).split(64)[:150]:
    torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
    optimizer.step(); optimizer.zero_grad()
save_file(model.state_dict(), sys.argv[2])
images, labels = map(torch.from_numpy, read_split(Path(sys.argv[1]), "test"))
with torch.no_grad():
    right = model.eval()(images).argmax(1) == labels
Path(sys.argv[3]).write_text(str(float(right.float().mean())))
"""


def _write_weights(case: Path, data: Path) -> None:
    """Train the network for 150 steps, in a process of its own to leave the threads of this one alone."""
    command = [sys.executable, "-c", _TRAIN_WEIGHTS, str(data), str(case / "weights.safetensors")]
    command.append(str(data.with_name("accuracy")))
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
