"""Every training case at its reduced size, six steps, eight processes at a time."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any, Final

from accelmark.spec.layers import flatten
from accelmark.spec.plugins.catalog import folders, load_case
from benchmarks.gpu.session import Session

_AT_A_TIME: Final = 8
_STEPS: Final = 6


def sweep(session: Session, name: str) -> dict[str, Any]:
    """Train each case; return its state, last loss and seconds, ``not reached`` where the time limit came first."""
    cases = [case for case in sorted(folders("cases")) if load_case(case).train is not None]
    if session.tiny:
        cases = cases[:1]
    found: dict[str, Any] = {case: {"state": "not reached"} for case in cases}
    waiting, running = list(cases), dict[str, tuple[subprocess.Popen[bytes], float]]()
    while (waiting or running) and session.left_s() > 5:
        while waiting and len(running) < (1 if session.tiny else _AT_A_TIME):
            case = waiting.pop(0)
            running[case] = session.start(f"{name}_{case}", *_command(session, name, case)), time.monotonic()
        for case, (process, began) in list(running.items()):
            if process.poll() is not None:
                del running[case]
                found[case] = {**_outcome(session, name, case), "took_s": round(time.monotonic() - began, 1)}
        time.sleep(0.2)
    for process, _ in running.values():
        session.wait(process, 0)
    return {"cases": found, "succeeded": sum(each["state"] == "succeeded" for each in found.values())}


def _command(session: Session, name: str, case: str) -> list[str]:
    train = load_case(case).train
    assert train is not None
    settings = {
        **flatten(train.reduced),
        "batch_size": 4,
        "compile": "off",
        "gradient_accumulation_steps": 1,
        "end.max_epochs": "null",
        "end.max_steps": _STEPS,
        "log_every_steps": 2,
    }
    command = ["accelmark", "train", f"{case}:pytorch", "--synthetic", "--open", "--out", str(session.work / case)]
    return [*command, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def _outcome(session: Session, name: str, case: str) -> dict[str, Any]:
    results = sorted((session.work / case).glob("*/round1/result.json"))
    if not results:
        return {"state": "failed", "reason": session.errors(f"{name}_{case}")[-300:]}
    result = json.loads(results[0].read_text(encoding="utf-8"))
    loss = result["figures"].get("final_loss", {}).get("value")
    return {"state": result["state"], "reason": result["reason"], "final_loss": loss}
