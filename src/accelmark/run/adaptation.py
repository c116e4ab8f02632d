"""Carrying out a vendor's folder for a case on a host, before the ranks start: variables, packages, kernels.

Nothing of it touches AccelMark's own environment: packages and built kernels go into a directory that only the ranks of
this job see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Final, final

from accelmark.results.files import write_atomic
from accelmark.spec.errors import RunError
from accelmark.spec.evidence import ADAPTATION_FILE, AdaptationRecord

LOG_FILE: Final = "adaptation.log"
_ENVIRONMENT_FILE: Final = "environment_variables.sh"
_REQUIREMENTS_FILE: Final = "requirements.txt"
_SCRIPT: Final = 'set -a; source "$1" 1>&2 || exit 1; exec env -0'
"""All that the shell is told; the file's path is an argument."""
_SHELL_PATIENCE_S: Final = 120.0
_BUILD_PATIENCE_S: Final = 3600.0
_NOISE: Final = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "ENV"})
_OURS: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSW")
_TAIL: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Sourced:
    """The environment after a script, and how it differs."""

    environment: dict[str, str]
    changed: dict[str, str]
    removed: tuple[str, ...]
    ignored: tuple[str, ...]


def carry_out(folder: Path, node_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Carry out ``folder`` and return the environment of the ranks; ``adaptation.json`` tells what was done.

    Raises:
        RunError: the script fails or hangs, or a package or kernel cannot be installed; the file and its last words
            are named.
    """
    began = time.monotonic()
    seen = Sourced(dict(environment), {}, (), ())
    script = folder / _ENVIRONMENT_FILE
    if script.is_file():
        seen = source(script, node_dir, environment)
    site = node_dir / "site"
    requirements, csrc = folder / _REQUIREMENTS_FILE, folder / "csrc"
    if requirements.is_file() and requirements.read_text(encoding="utf-8").strip():
        _pip(["--requirement", str(requirements)], site, node_dir, seen.environment, str(requirements))
    if any((csrc / name).is_file() for name in ("setup.py", "pyproject.toml")):
        build = node_dir / "csrc"
        shutil.copytree(csrc, build, dirs_exist_ok=True)
        _pip(["--no-deps", "--no-build-isolation", str(build)], site, node_dir, seen.environment, str(csrc))
    ready = dict(seen.environment)
    if site.is_dir():
        ready["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), ready.get("PYTHONPATH", "")]))
    installed = {f"{found.name}=={found.version}" for found in distributions(path=[str(site)])}
    record = AdaptationRecord(
        environment={name: _told(name, value) for name, value in sorted(seen.changed.items())},
        removed=seen.removed,
        ignored=seen.ignored,
        installed=tuple(sorted(installed)),
        duration_s=round(time.monotonic() - began, 3),
    )
    write_atomic(node_dir / ADAPTATION_FILE, record.model_dump_json(indent=2))
    return ready


def source(script: Path, node_dir: Path, environment: Mapping[str, str]) -> Sourced:
    """Source ``script`` in a shell without start-up files, and return what its environment is afterwards."""
    command = ["bash", "--noprofile", "--norc", "-c", _SCRIPT, "accelmark", str(script)]
    try:
        with (node_dir / LOG_FILE).open("ab") as log:
            done = subprocess.run(
                command, env=dict(environment), cwd=node_dir, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log, timeout=_SHELL_PATIENCE_S, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{script}: did not end within {_SHELL_PATIENCE_S:g} s") from error
    except OSError as error:
        raise RunError(f"{script}: cannot be sourced: bash: {error.strerror}") from error
    if done.returncode != 0:
        raise RunError(f"{script}: ended with exit code {done.returncode}: {_last_words(node_dir)}")
    pairs = (entry.partition(b"=") for entry in done.stdout.split(b"\0") if entry)
    after = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    wanted = {name: value for name, value in after.items() if name not in _NOISE and environment.get(name) != value}
    ignored = tuple(sorted(name for name in wanted if name in _OURS or name.startswith("ACCELMARK_")))
    changed = {name: value for name, value in wanted.items() if name not in ignored}
    gone = sorted(set(environment) - set(after) - _NOISE)
    removed = tuple(name for name in gone if name not in _OURS and not name.startswith("ACCELMARK_"))
    kept = {name: value for name, value in environment.items() if name not in removed}
    return Sourced(kept | changed, changed, removed, ignored)


def _pip(what: list[str], site: Path, node_dir: Path, environment: Mapping[str, str], named: str) -> None:
    """Install into ``site``, which only the ranks see."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command += ["--upgrade", "--target", str(site), *what]
    with (node_dir / LOG_FILE).open("ab") as log:
        try:
            done = subprocess.run(
                command, env=dict(environment), cwd=node_dir, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, timeout=_BUILD_PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{named}: was not installed within {_BUILD_PATIENCE_S:g} s") from error
    if done.returncode != 0:
        raise RunError(f"{named}: cannot be installed (exit code {done.returncode}): {_last_words(node_dir)}")


def _last_words(node_dir: Path) -> str:
    text = (node_dir / LOG_FILE).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-_TAIL:]) or f"it said nothing (see {LOG_FILE})"


def _told(name: str, value: str) -> str:
    return "(left out)" if any(word in name.upper() for word in _SECRET) else value
