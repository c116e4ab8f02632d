"""Apply a vendor's folder for a case on a host before the ranks start: variables, packages, kernels.

Packages and kernels are installed into a directory that only the ranks of this job use, also in a container.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence, Set
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import accelmark
from accelmark.results.store.files import write_atomic
from accelmark.run.agent.rank_exit import error_lines
from accelmark.spec.errors import RunError
from accelmark.spec.log.records import ADAPTATION_FILE, AdaptationRecord
from accelmark.spec.plugins.framework import RANK_VARIABLES, FrameworkSpec
from accelmark.spec.secret import displayed_value

_LOG_FILE: Final = "adaptation.log"
SITE_DIRECTORY: Final = "site"
"""Directory of installed packages and kernels while the ranks run."""
_ENVIRONMENT_FILE: Final = "environment_variables.sh"
_BUILD_FILES: Final = ("setup.py", "pyproject.toml")
_SCRIPT: Final = 'set -a; source "$1" 1>&2 || exit 1; exec env -0'
"""The shell's program; the file's path is its argument."""
_PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
_NOISE: Final = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "ENV"})
_LIBRARY: Final = sysconfig.get_path("stdlib")
_STANDARD: Final = getattr(sys, "stdlib_module_names", None) or {  # since Python 3.10
    *sys.builtin_module_names,
    *(module.name for module in pkgutil.iter_modules([_LIBRARY, f"{_LIBRARY}/lib-dynload"])),
}
_RESERVED: Final = frozenset({"accelmark", "sitecustomize", "usercustomize", *_STANDARD})
"""Module names that no package for the ranks may install: it would be imported in place of the real module."""
_INDEX_OPTION: Final = re.compile(
    r"\s*(-i|-f|--(index-url|extra-index-url|no-index|find-links|trusted-host|pre|prefer-binary)\b)"
)
"""Options of a requirements file that select package sources."""


def apply_adaptation(
    folder: Path | None,
    requirements: Path | None,
    node_dir: Path,
    environment: Mapping[str, str],
    framework: FrameworkSpec,
    python: str,
) -> tuple[dict[str, str], AdaptationRecord]:
    """Apply a vendor's folder; return the environment of the ranks, and the content of ``adaptation.json``.

    Args:
        folder: the vendor's folder for the case, if it has one.
        requirements: requirements file: the vendor's where it has one, else the case's.
        node_dir: directory for packages, builds and the log.
        environment: the ranks' environment before.
        framework: the framework of the job; requirements may install another build of it, kernels may not.
        python: the ranks' Python, for which packages and kernels are installed.

    Raises RunError: the script fails or hangs, or a package or kernel cannot be installed; the message has the file and
    the first errors.
    """
    began = time.monotonic()
    site, record, ready = node_dir / SITE_DIRECTORY, AdaptationRecord(), dict(environment)
    scripts = [place / _ENVIRONMENT_FILE for place in (folder / "config", folder)] if folder is not None else []
    if script := next(filter(Path.is_file, scripts), None):
        ready, record = _source(script, node_dir, environment, framework.reserved_variables)
    if requirements is not None:
        if not requirements.is_file():
            raise RunError(f"{requirements}: not found on this host")
        if requirements.read_text(encoding="utf-8").strip():
            _install(requirements, site, node_dir, ready, python)
            _refuse_shadows(requirements, site, _RESERVED, _entries(site))
    if folder is not None and (folder / "csrc").is_dir():
        csrc, build, before = folder / "csrc", node_dir / "csrc", _entries(site)
        if not any((csrc / name).is_file() for name in _BUILD_FILES):
            raise RunError(f"{csrc}: cannot be built: it has neither {' nor '.join(_BUILD_FILES)}")
        shutil.copytree(csrc, build, dirs_exist_ok=True)
        how = ["--no-deps", "--no-build-isolation", "--upgrade", "--target", str(site), str(build)]
        _run([python, *_PIP, *how], f"{csrc}: cannot be installed", node_dir, ready, cwd=node_dir)
        shutil.rmtree(build, ignore_errors=True)
        added = _entries(site) - before
        # .pth files of packages have no effect in this directory (setuptools has one); those from csrc are refused.
        reserved = {framework.module, *framework.companion_modules, *(name for name in added if name.endswith(".pth"))}
        _refuse_shadows(csrc, site, _RESERVED | reserved, added)
    keep_ours_first(ready, environment)
    if site.is_dir():
        ready["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), ready.get("PYTHONPATH", "")]))
    installed = sorted({f"{package.name}=={package.version}" for package in distributions(path=[str(site)])})
    duration_s = round(time.monotonic() - began, 3)
    record = record.model_copy(update={"installed": tuple(installed), "duration_s": duration_s})
    write_atomic(node_dir / ADAPTATION_FILE, record.model_dump_json(indent=2))
    return ready, record


def keep_ours_first(environment: dict[str, str], before: Mapping[str, str]) -> None:
    """Put this AccelMark first in a ``PYTHONPATH`` that was set or removed, if it was listed ``before``.

    AccelMark delivered to a host is found by ``PYTHONPATH`` only. An AccelMark in site-packages is not put first, since
    all installed packages would then take precedence over the variable's.
    """

    def entries(variables: Mapping[str, str]) -> list[Path]:
        return [Path(entry) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]

    ours = Path(accelmark.__file__).parents[1]
    is_changed = environment.get("PYTHONPATH") != before.get("PYTHONPATH")
    if is_changed and ours in entries(before) and ours != Path(sysconfig.get_path("purelib")):
        others = [entry for entry in entries(environment) if entry != ours]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [ours, *others]))


def _entries(site: Path) -> set[str]:
    return {path.name for path in site.iterdir()} if site.is_dir() else set()


def _refuse_shadows(named: Path, site: Path, reserved: Set[str], installed: Set[str]) -> None:
    """Raise RunError where an installed module has a reserved name, or a file is named in ``reserved`` itself."""
    suffixes = (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
    modules = [name for name in installed if (site / name).is_dir() or name.endswith(suffixes)]
    taken = {name for name in modules if name.partition(".")[0] in reserved and not name.endswith(".dist-info")}
    if taken := taken | (installed & reserved):
        shutil.rmtree(site, ignore_errors=True)
        raise RunError(
            f"{named}: installs {', '.join(sorted(taken))}, which would replace the module of that name or run code in "
            "every process: rename it, and import it in extern/__init__.py"
        )


def _source(
    script: Path, node_dir: Path, environment: Mapping[str, str], reserved: Sequence[str]
) -> tuple[dict[str, str], AdaptationRecord]:
    """Source ``script`` in a shell without start-up files; returns the resulting environment and the differences."""
    command = ["bash", "--noprofile", "--norc", "-c", _SCRIPT, "accelmark", str(script)]
    problem = f"{script}: cannot be sourced"
    output = _run(command, problem, node_dir, environment, cwd=node_dir, timeout_s=120.0, capture=True)
    ours = {*RANK_VARIABLES, *reserved}
    pairs = (entry.partition(b"=") for entry in output.split(b"\0") if entry)
    after = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    additions = {name: value for name, value in after.items() if name not in _NOISE and environment.get(name) != value}
    ignored = tuple(sorted(name for name in additions if name in ours or name.startswith("ACCELMARK_")))
    changed = {name: value for name, value in additions.items() if name not in ignored}
    unset = sorted(set(environment) - set(after) - _NOISE)
    removed = tuple(name for name in unset if name not in ours and not name.startswith("ACCELMARK_"))
    remaining = {name: value for name, value in environment.items() if name not in removed}
    displayed = {name: displayed_value(name, value) for name, value in sorted(changed.items())}
    record = AdaptationRecord(environment=displayed, removed=removed, ignored=ignored)
    return remaining | changed, record


def _install(requirements: Path, site: Path, node_dir: Path, environment: Mapping[str, str], python: str) -> None:
    """Install missing requirements; those that are already met (for example by a chip vendor's build) are kept."""
    report, exact = node_dir / "requirements.report", node_dir / "requirements.exact"
    what, cwd = f"{requirements}: cannot be installed", requirements.parent
    dry_run = ["--dry-run", "--report", str(report), "--requirement", str(requirements)]
    _run([python, *_PIP, *dry_run], what, node_dir, environment, cwd=cwd)
    missing = []
    for entry in json.loads(report.read_bytes())["install"]:
        name, version = entry["metadata"]["name"], entry["metadata"]["version"]
        missing.append(f"{name} @ {entry['download_info']['url']}" if entry["is_direct"] else f"{name}=={version}")
    report.unlink()
    if not missing:
        return
    lines = [line for line in requirements.read_text(encoding="utf-8").splitlines() if _INDEX_OPTION.match(line)]
    write_atomic(exact, "".join(f"{line}\n" for line in (*lines, *missing)))
    into = ["--no-deps", "--upgrade", "--target", str(site), "--requirement", str(exact)]
    _run([python, *_PIP, *into], what, node_dir, environment, cwd=cwd)
    exact.unlink()


def _run(
    command: Sequence[str],
    what: str,
    node_dir: Path,
    environment: Mapping[str, str],
    *,
    cwd: Path,
    timeout_s: float = 3600.0,
    capture: bool = False,
) -> bytes:
    """Run a command with its output in the log; with ``capture`` return standard output instead.

    Raises RunError: it cannot be started, fails or hangs: ``what``, and the first errors in its output.
    """
    with (node_dir / _LOG_FILE).open("ab") as log:
        begin = log.tell()
        try:
            done = subprocess.run(
                command, env=dict(environment), cwd=cwd, stdin=subprocess.DEVNULL, stderr=log,
                stdout=subprocess.PIPE if capture else log, timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{what}: it did not end within {timeout_s:g} s") from error
        except OSError as error:
            raise RunError(f"{what}: {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        output = (node_dir / _LOG_FILE).read_bytes()[begin:].decode(errors="replace")
        errors = error_lines(output) or f"no output (see {_LOG_FILE})"
        raise RunError(f"{what} (exit code {done.returncode}): {errors}")
    return done.stdout or b""
