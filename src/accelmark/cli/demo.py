"""The verb ``demo audit``: an honest run beside a cheat that the audit finds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from accelmark.cli import options
from accelmark.cli.options import Output, Verb, group, option
from accelmark.cli.runs import execute, plan_request
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK
from accelmark.spec.number_format import digits

app = group("demo", "Show a cheat that the audit finds.")

_TEMPLATES: Final = Path(__file__).with_name("templates") / "demo"
_CASE: Final = "audit_demo"
_CHEAT: Final = "demo_cheat"
_NUM_IMAGES: Final = {"train": 6_400, "t10k": 1_000}


@app.command(cls=Verb)
def audit(
    out: Annotated[Path | None, option("DIR", "Directory; default: a new one in runs/.")] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Train a case honestly, then with a vendor's hook that skips steps. Shows both speeds and the findings."""
    from accelmark.report.comparison import render_comparison
    from accelmark.results.comparison import compare
    from accelmark.results.figures import FigureName
    from accelmark.results.store.loaded_run import load_run
    from accelmark.run.record.directory import default_path, require_empty
    from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
    from accelmark.spec.runfile import CaseRequest, RunSpec

    directory = (out or default_path("demo-audit", datetime.now(UTC))).absolute()
    require_empty(directory)
    make_directory(directory)
    _write_files(directory)
    os.environ[PLUGINS_VARIABLE] = str(directory / "plugins")
    os.environ["ACCELMARK_STATE"] = str(directory / "state")  # not the user's registry of runs
    runs = {"honest": directory / "honest", "cheat": directory / "cheat"}
    for (name, path), vendor in zip(runs.items(), ("cpu", _CHEAT), strict=True):
        if not as_json:
            typer.secho(f"{name}: {_CASE} on {vendor}", bold=True)
        case = CaseRequest(key=_CASE, data=directory / "data")
        plan = plan_request(RunSpec(name=name, vendor=vendor, cases=(case,)), [], synthetic=False)
        execute(plan, path, offline=True, as_json=as_json, is_judged=True)  # the cheat is INVALID
    loaded = [load_run(path) for path in runs.values()]
    page = directory / "audit.html"
    write_atomic(page, render_comparison(compare(loaded, force=True)))
    cases = {name: run.summary.cases[0] for name, run in zip(runs, loaded, strict=True)}
    caught = cases["honest"].verdict == "VALID" and cases["cheat"].verdict == "INVALID"
    rates = {name: case.mean_of(FigureName.THROUGHPUT_TRAIN) for name, case in cases.items()}
    content = {
        name: {
            "verdict": case.verdict,
            "images_per_second": rates[name],
            "reasons": case.reasons,
            "run": str(runs[name]),
        }
        for name, case in cases.items()
    }

    def show() -> None:
        honest, cheat = (rates[name] or 0.0 for name in ("honest", "cheat"))
        errors = [finding for finding in cases["cheat"].findings if finding.severity == "error"]
        rules = ", ".join(dict.fromkeys(finding.rule for finding in errors))
        first = next((finding for finding in errors if finding.rule == "replayed-update"), None)
        faster = f"{cheat / honest:.1f} x" if honest else "no honest rate"
        for line in (
            f"honest: {digits(honest)} images/s, {cases['honest'].verdict}",
            f"cheat:  {digits(cheat)} images/s ({faster}), {cases['cheat'].verdict}: it skips three of four steps",
            f"found by the rules {rules}" if rules else "not found",
            f"  {first or 'nothing'}",
        ):
            options.echo_wrapped(line)
        typer.echo(str(page))

    return Output(content | {"page": str(page)}, show, EXIT_OK if caught else EXIT_FAILED)


def _write_files(directory: Path) -> None:
    """Write generated images, the case around their hashes, and the vendor that cheats."""
    import numpy as np

    data, case, vendor = (directory / part for part in ("data", f"plugins/cases/{_CASE}", f"plugins/vendors/{_CHEAT}"))
    extern = vendor / f"cases/{_CASE}-pytorch/extern"
    for path in (data, case, extern):
        path.mkdir(parents=True)
    patterns = np.random.default_rng(0).normal(size=(10, 7, 7)).repeat(4, 1).repeat(4, 2)
    files = []
    for seed, (split, count) in enumerate(_NUM_IMAGES.items(), start=1):
        chance = np.random.default_rng(seed)
        labels = chance.integers(0, 10, count)
        images = (patterns[labels] * 0.9 + chance.normal(size=(count, 28, 28)) * 3) * 30 + 128
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            raw = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}i", *values.shape)
            raw += values.clip(0, 255).astype(np.uint8).tobytes()
            file = data / f"{split}-{kind}-ubyte"
            file.write_bytes(raw)
            files.append({"path": file.name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)})
    text = (_TEMPLATES / "case.yaml").read_text(encoding="utf-8").replace("{{files}}", json.dumps(files))
    (case / "case.yaml").write_text(text, encoding="utf-8")
    shutil.copyfile(_TEMPLATES / "pytorch.py.in", case / "pytorch.py")
    shutil.copyfile(_TEMPLATES / "vendor.yaml", vendor / "vendor.yaml")
    shutil.copyfile(_TEMPLATES / "extern.py.in", extern / "__init__.py")
