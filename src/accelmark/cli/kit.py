"""``accelmark check vendor NAME --kit``: train on the stand-in accelerator of a vendor's folder with planted faults."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from accelmark.cli.checks import broken_rules, run_accelmark
from accelmark.results.figures import FigureName
from accelmark.results.schema import RoundResult
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import load_run
from accelmark.run.agent.host import package_directories
from accelmark.run.agent.rank_exit import error_lines
from accelmark.run.record.registry import registry_file
from accelmark.spec.cluster import environment_python
from accelmark.spec.errors import AccelmarkError, RequestError, raising
from accelmark.spec.number_format import digits
from accelmark.spec.plugins.catalog import find, load_vendor

FOLDER: Final = "kit"
"""The stand-in in a vendor's folder: a Python package that setup.py builds."""
_MODULE: Final = "standin_device"
_DRIVER: Final = "STANDIN_DRIVER"
_POWER_W: Final = (40.0, 120.0)
"""What the stand-in draws, idle and busy."""
_NOT_OF_THE_FOLDER: Final = ("chip-mismatch", "untimed-work")
"""Rules of the audit that depend on the stand-in's name and on the load of this host."""
_AFTER: Final = 4000
"""Operations before a device hangs or is lost: some steps of training."""
_SETTINGS: Final = {
    "loader.synthetic": True, "end.max_steps": 24, "batch_size": 16, "model.width": 8, "threads": 1,
    "log_every_steps": 1, "optimizer.fused": False,  # PyTorch 2.4 cannot fall back to the CPU's fused optimizers
    # Ranks wait for a slow optimizer in the next forward pass, which counts as their own time.
    "gradient_accumulation_steps": 4,
}  # fmt: skip
_STALL_S: Final = 30.0
_ROUND_S: Final = 180.0
"""Longest round; the longest command is its double, with the evaluation of its weights."""
_ABOUT: Final = """
import json, os, setuptools, sys, sysconfig, torch
path = [entry for entry in sys.path if os.path.isabs(entry) and os.path.isdir(entry)]
include = sysconfig.get_path("include")
print(json.dumps({"path": path, "include": include, "versions": [sys.version, torch.__version__]}))
"""
"""Program for the Python of the ranks; prints what the stand-in is built for."""
Judge = Callable[[RoundResult, Path], tuple[bool, str]]
"""Whether a round in its run directory is what the fault must lead to, and what AccelMark reports of it."""


class Fault(NamedTuple):
    """A fault of the stand-in, and how a run with it must end."""

    name: str
    expected: str
    judge: Judge
    driver: Mapping[str, Any] = {}
    """Contents of the driver's ``driver.json``."""
    num_devices: int = 1


@dataclass(frozen=True)
class Outcome:
    """What AccelMark reported of a run with a fault."""

    fault: str
    expected: str
    survived: bool
    reported: str


def _ends(state: str, pattern: str) -> Judge:
    def judge(result: RoundResult, _run: Path) -> tuple[bool, str]:
        reason = result.reason or "the training succeeded"
        return result.state == state and re.search(pattern, reason) is not None, f"{result.state}: {reason}"

    return judge


def _has_right_power(result: RoundResult, _run: Path) -> tuple[bool, str]:
    if result.state != "succeeded":
        return False, f"{result.state}: {result.reason}"
    power = result.figures[FigureName.MEAN_POWER]
    if power.value is None:
        notes = [entry.actual for entry in result.findings if entry.rule == "telemetry-note"]
        return False, "; ".join((f"no power: {power.reason}", *notes))
    low, high = _POWER_W
    drawn = f"mean power {digits(power.value)} W; the stand-in draws {low:g} to {high:g} W"
    return 0.95 * low <= power.value <= 1.05 * high, drawn


def _is_sound(result: RoundResult, run: Path) -> tuple[bool, str]:
    survived, reported = _has_right_power(result, run)
    broken = [str(entry) for entry in broken_rules(run) if entry.rule not in _NOT_OF_THE_FOLDER] if survived else []
    return survived and not broken, "; ".join(broken) or reported


def _names_slow_rank(result: RoundResult, _run: Path) -> tuple[bool, str]:
    if result.state != "succeeded":
        return False, f"{result.state}: {result.reason}"
    slow = result.rank_times.straggler if result.rank_times is not None else None
    if slow is None:
        return False, "no rank is slower than the others"
    return slow.rank == 1, f"rank {slow.rank} on {slow.host} costs the others {slow.share:.0%} of each step"


FAULTS: Final = (
    Fault("no fault", "the training succeeds; power is right; no audit rule is broken", _is_sound),
    Fault("hung device", "the round times out; rank 0 is named",
          _ends("timed_out", r"rank 0 wrote no event"), {"fault": "hang", "after": _AFTER}),
    Fault("lost device", "the round fails; rank 0 and the device's error are named",
          _ends("failed", r"rank 0\b.*device was lost"), {"fault": "lost", "after": _AFTER}),
    Fault("too little memory", "the round fails; rank 0 and the memory are named",
          _ends("failed", r"rank 0\b.*out of memory"), {"memory_mib": 0.5}),
    Fault("power in milliwatts", "the training succeeds; power is right", _has_right_power, {"fault": "milliwatts"}),
    Fault("slow rank", "the training succeeds; rank 1 is named", _names_slow_rank,
          {"fault": "slow", "device": 1, "factor": 10.0}, num_devices=2),
)  # fmt: skip


def check_kit(name: str, environment: Path | None = None) -> Iterator[Outcome]:
    """Train on the stand-in of a vendor's folder with each fault; ``environment`` has PyTorch, None: this Python."""
    folder = find("vendors", name).path
    kit = folder / FOLDER
    if not (kit / "setup.py").is_file():
        raise RequestError(f"{folder} has no {FOLDER}/: 'accelmark new vendor NAME --kit' creates a folder with one")
    vendor = load_vendor(name)
    device = vendor.frameworks.get("pytorch")
    if device is None or device.module != _MODULE or not vendor.chips:
        raise RequestError(
            f"{folder / 'vendor.yaml'} does not describe the stand-in: --kit needs frameworks.pytorch.module "
            f"{_MODULE!r} and a chip"
        )
    built = kit_environment(kit, environment)
    for fault in FAULTS:
        key = f"resnet_mini:pytorch:{vendor.chips[0].name}:1:{fault.num_devices}"
        survived, reported = _run(fault, name, key, built)
        yield Outcome(fault.name, fault.expected, survived, reported)


def _run(fault: Fault, vendor: str, key: str, environment: Path) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory(prefix="accelmark-kit-") as directory:
        place = Path(directory)
        driver, run = place / "driver", place / "run"
        driver.mkdir()
        write_atomic(driver / "driver.json", json.dumps(fault.driver))
        request = {
            "name": FOLDER, "vendor": vendor, "open": True, "timeout_s": _ROUND_S, "stall_timeout_s": _STALL_S,
            "telemetry_interval_s": 0.25, "cluster": {"environments": {"pytorch": str(environment)}},
            "cases": [{"key": key, "settings": _SETTINGS}],
        }  # fmt: skip
        write_atomic(place / "run.yaml", yaml.safe_dump(request))
        arguments = ["run", str(place / "run.yaml"), "--offline", "--out", str(run)]
        code, _, problem = run_accelmark(arguments, 2 * _ROUND_S, {_DRIVER: str(driver)})
        if code is None:
            return False, f"the command did not end within {2 * _ROUND_S:g} s"
        try:
            rounds = list(load_run(run, curves=False).rounds.values())
        except AccelmarkError:
            rounds = []
        return fault.judge(rounds[0], run) if rounds else (False, problem)


def kit_environment(kit: Path, environment: Path | None = None) -> Path:
    """Return a virtual environment with the stand-in and the packages of another one or of this Python; built once."""
    python = sys.executable if environment is None else environment_python(environment.absolute())
    with raising(RequestError, python, OSError):
        asked = subprocess.run([python, "-c", _ABOUT], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise RequestError(f"the stand-in needs torch and setuptools in {python}: {error_lines(asked.stderr)}")
    about = json.loads(asked.stdout)
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise RequestError(f"the stand-in needs a C++ compiler, and {compiler!r} is not installed: install g++")
    if not Path(about["include"], "Python.h").is_file():
        raise RequestError(f"the stand-in needs the headers of {python}: install python3-dev")
    sources = b"".join(path.read_bytes() for path in sorted(kit.rglob("*")) if path.suffix in (".py", ".cpp"))
    place = registry_file().parent / "kits" / hashlib.sha256(sources + asked.stdout.encode()).hexdigest()[:16]
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=place.parent) as directory:
        built, copy = Path(directory, "environment"), Path(directory, FOLDER)
        subprocess.run([python, "-m", "venv", "--without-pip", built], check=True)
        (packages,) = package_directories(Path(environment_python(built)))
        (packages / "host.pth").write_text("".join(f"{entry}\n" for entry in about["path"]), encoding="utf-8")
        shutil.copytree(kit, copy)
        done = subprocess.run(
            [python, "setup.py", "--quiet", "build", "--build-lib", str(packages)],
            cwd=copy, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RequestError(f"the stand-in cannot be built: {error_lines(done.stdout.decode(errors='replace'))}")
        built.rename(place)
    return place
