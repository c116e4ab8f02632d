"""Train a case for three steps on synthetic data, and report what its run and its audit found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

from accelmark.run.preflight.facts import HostsNotReadyError
from accelmark.run.record.registry import STATE_VARIABLE
from accelmark.spec.errors import AccelmarkError, nearest
from accelmark.spec.plugins.catalog import load_case

_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 60.0
_EXPECTED: Final = frozenset(
    {"declared-open", "real-data", "whole-evaluation", "target-reached", "rounds-complete", "enough-rounds",
     "enough-duration", "source-tree", "telemetry-present"}
)  # fmt: skip
"""Audit rules that three open steps on synthetic data always break, or that the checks of the folder cover."""


@final
@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    state: Literal["good", "missing", "advice"]
    what: str
    do: str = ""
    """How to correct it."""


def trial(
    name: str,
    vendor: str,
    framework: str | None = None,
    *,
    untried: Literal["missing", "advice"] = "missing",
    evaluate: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> Iterator[Check]:
    """Train three steps on synthetic data and report problems of the run and its audit.

    ``framework``: train in this one instead of the default one, and name it. ``untried`` is the state of the check
    where this machine lacks what the training needs. ``evaluate``: also run the case's evaluation. ``timeout_s``
    limits the training, and the evaluation, in seconds.
    """
    key, title = (name, name) if framework is None else (f"{name}:{framework}", f"{name}-{framework}")
    with tempfile.TemporaryDirectory(prefix="accelmark-check-") as directory:
        run = Path(directory) / "run"
        arguments = ["train", key, "--vendor", vendor, "--synthetic", "--open", "--set", "end.max_steps=3"]
        command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments]
        code, output = _execute([*command, "--out", str(run), "--json"], timeout_s)
        if code is None:
            do = f"it was stopped; to see where it hangs: accelmark {' '.join(arguments)}"
            yield Check("missing", f"{title} did not train three steps on {vendor} within {timeout_s:g} s", do)
            return
        error, problems = _error(output)
        if error == HostsNotReadyError.__name__:
            yield Check(untried, f"{title}: not tried: this machine lacks what it needs", problems)
            return
        problem = _problem(run, problems)
        if problem is not None:
            yield Check("missing", f"{title} cannot be trained on synthetic data", problem)
            return
        yield Check("good", f"{title} trains three steps on synthetic data")
        yield from _findings(title, run)
        if evaluate:
            yield from _evaluation(name, run, timeout_s)


def _execute(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Return exit code and output of a command; the code is None after a timeout."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory(prefix="accelmark-check-state-") as state,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT,
            env=os.environ | {STATE_VARIABLE: state},  # a check is no run of the user's registry
        ) as process,
    ):  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # SIGTERM first: a coordinator that is killed cannot stop its ranks.
            process.terminate()
            try:
                process.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None, ""
    return process.returncode, output.decode(errors="replace")


def _error(output: str) -> tuple[str, str]:
    """Return the error that a command with ``--json`` ended with and its problems, else the last lines of output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    with contextlib.suppress(IndexError, KeyError, TypeError, ValueError):
        told = json.loads(lines[-1])
        return str(told["error"]), "; ".join(told["problems"])
    return "", "; ".join(lines[-3:])


def _problem(run: Path, last: str) -> str | None:
    """Return why the training failed: the reasons of its rounds, else ``last``, which its command printed."""
    from accelmark.results.store.loaded_run import load_run

    try:
        loaded = load_run(run, curves=False)
    except AccelmarkError:
        return last or "it ended without output"
    failed = [result for result in loaded.rounds.values() if result.state != "succeeded"]
    if not failed and loaded.rounds:
        return None
    return "; ".join(dict.fromkeys(f"{result.state}: {result.reason}" for result in failed)) or last


def _findings(name: str, run: Path) -> Iterator[Check]:
    """Yield the audit findings that a full run would have too."""
    from accelmark.results.store.loaded_run import load_summary

    found = [entry for case in load_summary(run / "summary.json").cases for entry in case.findings]
    found = [entry for entry in found if entry.severity in ("error", "open") and entry.rule not in _EXPECTED]
    for entry in dict.fromkeys(found):
        what = f"{name}: {entry.actual} [{entry.rule}]"
        verdict = "INVALID" if entry.severity == "error" else "OPEN"
        yield Check("missing", what, f"results would be {verdict}; expected: {entry.expected}")
    if not found:
        not_tried = "data, target, speed and replay were not tried"
        yield Check("good", f"{name}: no audit rule was broken in three steps on synthetic data; {not_tried}")


def _evaluation(name: str, run: Path, timeout_s: float) -> Iterator[Check]:
    job = next(run.glob("*/round1/job.json"))
    code, output = _execute([sys.executable, "-m", "accelmark.probe.evaluation", str(job)], timeout_s)
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it ended without output"]
    if code != 0:
        why = f"not finished within {timeout_s:g} s" if code is None else "; ".join(_error_lines(lines))
        yield Check("missing", f"{name}: eval_sums() and metrics() fail on a synthetic batch", why)
        return
    names: list[str] = json.loads(lines[-1])
    train = load_case(name).train
    target = train.target if train is not None else None
    if target is not None and target.metric not in names:
        do = f"use one of its metrics ({nearest(target.metric, names)})"
        given = ", ".join(names) or "none"
        yield Check("missing", f"target.metric is {target.metric!r}, which metrics() does not return: {given}", do)
    else:
        yield Check("good", f"{name}: evaluation returns {', '.join(names)}")


def _error_lines(lines: list[str]) -> list[str]:
    """Return the last source location of a traceback, and the error."""
    return [*[line for line in lines if line.startswith("File ")][-1:], lines[-1]]
