"""Trying a case, and a vendor's adaptation of it, for three steps on made-up data, as a person would."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from accelmark.cli.check_line import Check
from accelmark.spec.catalog import load_case
from accelmark.spec.errors import AccelmarkError, nearest

PATIENCE_S: Final = 600.0
_END_PATIENCE_S: Final = 60.0
_OF_A_TRIAL: Final = frozenset(
    {"declared-open", "real-data", "whole-evaluation", "target-reached", "rounds-complete", "enough-rounds",
     "enough-duration", "source-tree", "telemetry-present"}
)  # fmt: skip
"""Rules that three open steps on made-up data break whatever they train; that AccelMark itself was changed; and that
devices were not read, which the checks of the folder tell with what to do."""
_TO_LOOK_AT: Final = "modules-replaced"
"""Allowed, though a result is OPEN with it until a person has looked."""


def trial(name: str, vendor: str, *, evaluate: bool = False, patience_s: float = PATIENCE_S) -> Iterator[Check]:
    """Train three steps and tell what the run and its audit say.

    Args:
        name: the case.
        vendor: whose devices, and whose adaptation of the case.
        evaluate: try the case's evaluation too.
        patience_s: longest that the training, and then the evaluation, may take.
    """
    with tempfile.TemporaryDirectory(prefix="accelmark-check-") as directory:
        run = Path(directory) / "run"
        arguments = ["train", name, "--vendor", vendor, "--synthetic", "--open", "--set", "end.max_steps=3"]
        command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments, "--out", str(run)]
        code, said = _carry_out(command, patience_s)
        if code is None:
            do = f"it was ended; see where it waits: accelmark {' '.join(arguments)}"
            yield Check("missing", f"{name} did not train three steps on {vendor} within {patience_s:g} s", do)
            return
        problem = _problem(run, said)
        if problem is not None:
            yield Check("missing", f"{name} does not train on made-up data", problem)
            return
        yield Check("good", f"{name} trains three steps on made-up data")
        yield from _findings(name, run)
        if evaluate:
            yield from _evaluation(name, run, patience_s)


def _carry_out(command: Sequence[str], patience_s: float) -> tuple[int | None, str]:
    """Return exit code and output of a command; None for the code of one that had to be ended."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT) as process:
        try:
            said, _ = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            # Asked first: a coordinator that is killed leaves its ranks behind.
            process.terminate()
            try:
                process.communicate(timeout=_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None, ""
    return process.returncode, said.decode(errors="replace")


def _problem(run: Path, said: str) -> str | None:
    """Return why the training did not succeed; its output's end where no round tells."""
    from accelmark.results.store.loaded_run import load_run

    last = "; ".join([line.strip() for line in said.splitlines() if line.strip()][-3:])
    try:
        loaded = load_run(run, curves=False)
    except AccelmarkError:
        return last or "it ended without a word"
    failed = [result for result in loaded.rounds.values() if result.state != "succeeded"]
    if not failed and loaded.rounds:
        return None
    return "; ".join(dict.fromkeys(f"{result.state}: {result.reason}" for result in failed)) or last


def _findings(name: str, run: Path) -> Iterator[Check]:
    """Tell of what the audit would hold against a real run."""
    from accelmark.results.store.loaded_run import load_summary

    found = [entry for case in load_summary(run / "summary.json").cases for entry in case.findings]
    found = [entry for entry in found if entry.severity in ("error", "open") and entry.rule not in _OF_A_TRIAL]
    for entry in dict.fromkeys(found):
        what = f"{name}: {entry.actual} [{entry.rule}]"
        if entry.rule == _TO_LOOK_AT:
            yield Check("advice", what, "a result with it is OPEN until a person has looked at it")
        else:
            yield Check("missing", what, f"a result with it is INVALID; expected: {entry.expected}")
    if not found:
        yield Check("good", f"{name}: the audit finds nothing against it")


def _evaluation(name: str, run: Path, patience_s: float) -> Iterator[Check]:
    job = next(run.glob("*/round1/job.json"))
    code, said = _carry_out([sys.executable, "-m", "accelmark.probe.evaluation", str(job)], patience_s)
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it ended without a word"]
    if code != 0:
        why = f"it took longer than {patience_s:g} s" if code is None else "; ".join(_raised(lines))
        yield Check("missing", f"{name}: eval_sums() and metrics() fail on a made-up batch", why)
        return
    names: list[str] = json.loads(lines[-1])
    train = load_case(name).train
    target = train.target if train is not None else None
    if target is not None and target.metric not in names:
        do = f"name one that there is ({nearest(target.metric, names)})"
        given = ", ".join(names) or "none"
        yield Check("missing", f"target.metric is {target.metric!r}, which metrics() does not give: {given}", do)
    else:
        yield Check("good", f"{name}: evaluation gives {', '.join(names)}")


def _raised(lines: list[str]) -> list[str]:
    """Return the place in somebody's code that raised, and the error itself."""
    return [*[line for line in lines if line.startswith("File ")][-1:], lines[-1]]
