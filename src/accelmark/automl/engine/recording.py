"""Telemetry beside a run on this machine: the recorder in a process of its own, and what it saw while trials ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from accelmark.automl.engine.state import RunState
from accelmark.automl.records import Record
from accelmark.results.figures.consumption import consumption_figures
from accelmark.results.figures.definitions import FigureName
from accelmark.results.read.telemetry import read_samples
from accelmark.spec.catalog import find
from accelmark.spec.errors import AccelmarkError
from accelmark.telemetry.detect import default_vendor

FOLDER: Final = "telemetry"
_RECORD: Final = "telemetry.jsonl"
_END_S: Final = 15.0
_START_S: Final = 15.0
_POLL_S: Final = 0.05
_HEADER_AND_SAMPLE: Final = 2


class Consumption(Record):
    """What the machine drew and how busy it was while trials ran; None comes with a reason in ``reasons``."""

    mean_power_w: float | None
    energy_j: float | None
    device_utilisation: float | None
    cpu_utilisation: float | None
    reasons: dict[str, str]


@contextmanager
def recorded(run: Path, session: int) -> Iterator[None]:
    """Record telemetry of this machine for one session of a run; a recorder that fails does not fail the run."""
    folder = run / FOLDER / f"session{session}"
    folder.mkdir(parents=True, exist_ok=True)
    vendor = default_vendor()
    request = {"vendor": vendor, "vendor_folder": str(find("vendors", vendor).path), "pids": [os.getpid()]}
    (folder / "telemetry.json").write_text(json.dumps(request), encoding="utf-8")
    with (folder / "telemetry.log").open("ab") as output:
        recorder = subprocess.Popen(
            [sys.executable, "-m", "accelmark.telemetry.record", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for_samples(recorder, folder / _RECORD)
        yield
    finally:
        recorder.terminate()
        try:
            recorder.wait(_END_S)
        except subprocess.TimeoutExpired:
            recorder.kill()
            recorder.wait()


def _wait_for_samples(recorder: subprocess.Popen[bytes], record: Path) -> None:
    """Wait for the first sample, so that telemetry covers the first trial too; give up on a recorder that ends."""
    deadline = time.monotonic() + _START_S
    while recorder.poll() is None and time.monotonic() < deadline:
        if record.is_file() and record.read_bytes().count(b"\n") >= _HEADER_AND_SAMPLE:
            return
        time.sleep(_POLL_S)


def consumption_of(run: Path, state: RunState) -> Consumption:
    """Return what telemetry says of the run's last session, from its first trial's start to its last epoch's end."""
    session = state.sessions[-1] if state.sessions else None
    path = run / FOLDER / f"session{len(state.sessions)}" / _RECORD
    if session is None or not path.is_file():
        return _nothing("no telemetry was recorded beside this run; hosts of a cluster have their own monitors")
    board = state.scoreboard()
    begun = session.monotonic_s + max(session.clock_s, board.started_s) - session.clock_s
    ended = session.monotonic_s + board.ended_s - session.clock_s
    if ended <= begun:
        return _nothing("no trial ran in the last session")
    try:
        samples = read_samples(path)
    except AccelmarkError as error:
        return _nothing(str(error))
    images = sum(epoch.trained_images for epoch in state.useful_epochs())
    device_type = "accelerator" if samples.devices else "cpu"
    figures, warnings = consumption_figures({session.host: (samples, [(begun, ended)])}, images, device_type, "")
    names = {
        "mean_power_w": FigureName.MEAN_POWER,
        "energy_j": FigureName.ENERGY,
        "device_utilisation": FigureName.DEVICE_UTILISATION,
        "cpu_utilisation": FigureName.CPU_UTILISATION,
    }
    reasons = {name: figures[figure].reason or "" for name, figure in names.items() if figures[figure].reason}
    if warnings:
        reasons["warnings"] = "; ".join(warnings)
    if len(state.sessions) > 1:
        reasons["sessions"] = "the run was resumed; these are of its last session"
    values = {name: figures[figure].value for name, figure in names.items()}
    return Consumption.model_validate({**values, "reasons": reasons})


def _nothing(reason: str) -> Consumption:
    names = ("mean_power_w", "energy_j", "device_utilisation", "cpu_utilisation")
    return Consumption.model_validate({**dict.fromkeys(names), "reasons": dict.fromkeys(names, reason)})
