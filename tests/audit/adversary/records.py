"""Edits of a finished run, and how a reader would notice them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from accelmark.results.store.bundle import write_manifest
from accelmark.run.record.directory import measure_run
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from tests.audit.adversary.bench import Bench
from tests.made_run import Made, make_run

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


def edit_events(log: Path, event: str, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = []
    for line in log.read_text().splitlines():
        if line.startswith(PERFLOG_PREFIX):
            record = json.loads(line.removeprefix(PERFLOG_PREFIX))
            if record["event"] == event:
                change(record["value"])
                line = f"{PERFLOG_PREFIX}{json.dumps(record)}"
        lines.append(line)
    log.write_text("\n".join(lines) + "\n")


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
    lines = []
    for line in log.read_text().splitlines():
        if line.startswith(PERFLOG_PREFIX):
            record = json.loads(line.removeprefix(PERFLOG_PREFIX))
            for clock in ("time_ms", "mono_ms"):
                begin = first.setdefault(clock, record["metadata"][clock])
                record["metadata"][clock] = begin + (record["metadata"][clock] - begin) * factor
            scale(record["value"], factor, *_TIMES)
            line = f"{PERFLOG_PREFIX}{json.dumps(record)}"
        lines.append(line)
    log.write_text("\n".join(lines) + "\n")


def raise_top1(value: Any) -> None:
    if isinstance(value, dict):
        value.update({"top1": 0.9995} if "top1" in value else {})
        for part in value.values():
            raise_top1(part)


_TOOLS: Final = {
    "json": json, "re": re, "shutil": shutil, "Path": Path, "edit_events": edit_events, "scale": scale,
    "compress": compress, "raise_top1": raise_top1,
}  # fmt: skip
