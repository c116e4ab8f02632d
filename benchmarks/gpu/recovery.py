"""Items about runs that end early: a signal and its resumption, exhausted memory, loss scaling."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from typing import Any, Final

from benchmarks.gpu.session import ItemError, Session
from benchmarks.gpu.training import TINY_LLAMA, Workload, events_of, llama, train

_STEPS: Final = 600
_SMALL: Final = {
    **TINY_LLAMA,
    "log_every_steps": 2,
    "checkpoint.every_steps": 1000,
    "schedule.warmup_steps": 5,
    "activation_checkpointing": "off",
    "compile": "off",
}
_TOO_MANY_IMAGES: Final = 1 << 40


def losses_of(session: Session, name: str) -> list[float]:
    """Return the losses of all steps of a run, those before and after its resumption."""
    (directory,) = (session.work / name).glob("*/round1")
    attempts = [*sorted(directory.glob("attempt*")), directory]
    return [loss for attempt in attempts for value in events_of(attempt, "STEP_END") for loss in value["losses"]]


def resume(session: Session, name: str, *, parallelism: str) -> dict[str, Any]:
    """End a run by SIGTERM, resume it from its checkpoint, and compare its losses with those of a whole run."""
    # Slow enough to be interrupted: a step is a few milliseconds.
    size = {} if session.tiny else llama(1024, 2816, 8, 512)
    steps = _STEPS if session.tiny else 2000
    settings = {**_SMALL, "parallelism": parallelism}
    train(session, f"{name}_whole", Workload("llama2_7b", settings, fixed={**size, "end.max_steps": steps}))
    whole = losses_of(session, f"{name}_whole")
    directory = session.work / f"{name}_part"
    request = json.loads((session.work / f"{name}_whole.run.json").read_text(encoding="utf-8"))
    run_file = session.work / f"{name}_part.run.json"
    run_file.write_text(json.dumps(request), encoding="utf-8")
    process = session.start(f"{name}_part", "accelmark", "run", str(run_file), "--out", str(directory))
    while process.poll() is None and session.left_s() > 20 and not _has_stepped(session, f"{name}_part"):
        time.sleep(0.02)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    code = session.wait(process, min(60.0, session.left_s()))
    before = len(losses_of(session, f"{name}_part"))
    if code != 130 or before >= steps:
        raise ItemError(f"the run ended with exit code {code} after {before} of {steps} steps; expected 130, sooner")
    session.python(f"{name}_resumed", "accelmark", "resume", str(directory), "--failed", expect=(0, 1))
    after = losses_of(session, f"{name}_part")
    if len(after) != steps:
        raise ItemError(f"the resumed run has losses of {len(after)} steps; expected {steps}")
    apart = max(abs(one - other) / abs(other) for one, other in zip(after, whole, strict=True))
    return {"exit_code": code, "steps_before": before, "steps": steps, "largest_relative_difference": apart}


def _has_stepped(session: Session, name: str) -> bool:
    return any(events_of(directory, "STEP_END") for directory in (session.work / name).glob("*/round1"))


def fp16(session: Session, name: str) -> dict[str, Any]:
    """Train with fp16 and its loss scaler; every loss has to be finite and the last below the first."""
    settings = {**_SMALL, "precision": "fp16", "parallelism": "ddp"}
    entry = train(session, name, Workload("llama2_7b", settings, fixed={"end.max_steps": 30}))
    losses = losses_of(session, name)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise ItemError(f"the loss went from {losses[0]} to {losses[-1]}")
    return {"first_loss": losses[0], "last_loss": losses[-1], "steady": entry["rounds"][0]["steady"]}


def out_of_memory(session: Session, name: str) -> dict[str, Any]:
    """Ask for a batch that no device holds; the run has to fail with a message that says what to change."""
    size = _TOO_MANY_IMAGES if session.tiny else 16384
    settings = {"end.max_epochs": None, "end.max_steps": 3, "compile": "off"}
    try:
        train(session, name, Workload("resnet50", settings, fixed={"batch_size": size}))
    except ItemError as error:
        message = str(error)
    else:
        raise ItemError(f"a batch of {size} images fitted into memory")
    if "out of memory" not in message:
        raise ItemError(f"the message does not name memory: {message}")
    return {"batch_size": size, "message": message}
