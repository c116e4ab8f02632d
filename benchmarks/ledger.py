"""A ledger of made-up records: how long it takes to check, and how long its page takes to open.

``python -m benchmarks.ledger OUT [COUNT]`` writes COUNT records (10,000) to OUT/ledger, checks them, and writes
OUT/index.html.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Literal

from accelmark.ledger.ledger import Evidence, Measured, Record, RecordedCase, check_ledger, read_ledger, write_record
from accelmark.report.ledger_page import render_ledger
from accelmark.results.figures import FigureName
from accelmark.spec.key import CaseKey

_CASES = {"resnet50": ("image", 4000.0), "llama2_7b": ("token", 9000.0), "bert": ("sequence", 800.0)}
_CHIPS = {"X1": ("acme", 1.0), "X2": ("acme", 1.7), "Y7": ("bolt", 1.2), "Z3": ("cog", 0.6)}


def made_up(number: int, chance: random.Random) -> Record:
    """Return a record in which nothing was measured."""
    model, chip = chance.choice(list(_CASES)), chance.choice(list(_CHIPS))
    (unit, speed), (vendor, factor) = _CASES[model], _CHIPS[chip]
    nproc = chance.choice((1, 2, 4, 8))
    precision = chance.choice(("bf16", "fp16", "fp8"))
    rate = (
        speed * factor * nproc**0.95 * (2 if precision == "fp8" else 1) * (1 + number / 40_000) * chance.gauss(1, 0.02)
    )
    verdict: Literal["VALID", "OPEN"] = chance.choice(("VALID", "VALID", "OPEN"))
    synthetic = chance.random() < 0.1
    figures = {
        FigureName.THROUGHPUT_TRAIN: Measured(value=rate, low=rate * 0.99, high=rate * 1.01),
        FigureName.ENERGY_PER_UNIT: Measured(value=0.3 * nproc * chance.gauss(1, 0.05) / speed / factor),
        FigureName.TIME_TO_TARGET: Measured(value=1e8 / rate),
        FigureName.MEAN_POWER: Measured(value=500.0 * nproc),
    }
    month, day = number // 840 % 12 + 1, number % 28 + 1
    case = RecordedCase(
        key=CaseKey(model=model, framework="pytorch", hardware=chip, nproc=nproc), task="train", unit=unit,
        case_version=1, precision=precision, vendor=vendor, device=f"{vendor} {chip}", num_devices=nproc,
        verdict="INVALID" if synthetic else verdict, reasons=("synthetic data",) if synthetic else (),
        marks=("synthetic",) if synthetic else (), num_rounds=3,
        work={"version of the case": "1", "scale": f"1 × {nproc}", "data": "synthetic" if synthetic else "real",
              "settings": "closed", "length": "whole", "evaluation": "all data"},
        figures=figures,
    )  # fmt: skip
    return Record(
        added_at="2026-11-28T00:00:00Z", by="benchmarks/ledger.py", note="MADE UP: nothing was measured",
        run=f"made-up-{number}", run_id=f"made-up-{number}",
        started_at=f"2026-{month:02}-{day:02}T00:00:{number % 60:02}Z",
        accelmark_version=f"0.{1 + number // 3000}.0",
        evidence=Evidence(kind="made up", sha256="", where=""), signed_by=f"lab {number % 7}", registered="made up",
        environment={"os": "none", "framework": "pytorch"}, cases=(case,),
    )  # fmt: skip


def main(out: Path, count: int = 10_000) -> None:
    chance = random.Random(1)
    for number in range(count):
        write_record(out / "ledger", made_up(number, chance))
    begin = time.perf_counter()
    checked = check_ledger(out / "ledger")
    assert not checked.problems
    print(f"check: {checked.num_records} records, {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    page = out / "index.html"
    page.write_text(render_ledger(read_ledger(out / "ledger")), encoding="utf-8")
    print(f"page: {page.stat().st_size / 2**20:.1f} MiB, written in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
