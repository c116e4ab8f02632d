"""The static page of a ledger: its data for the script, which draws table, charts and comparisons."""

from __future__ import annotations

import json
from typing import Any, Final

from accelmark.ledger.ledger import Entry, Ledger, RecordedCase, parties
from accelmark.report.charts import embed_json
from accelmark.report.templating import page
from accelmark.results.figures import RATES, FigureName, unit_of
from accelmark.results.prices import Prices, costs_of
from accelmark.results.schema import mark_text

_NUMBERS: Final = ("nnodes", "nproc", "parties", "rate", "low", "high", "target", "mfu", "joules", "rounds")
"""Columns of numbers; a row has the place of other values among the shared ones."""


def render_ledger(ledger: Ledger, prices: Prices | None = None) -> str:
    """Return the self-contained page of a ledger; with ``prices``, costs beside energy."""
    counts = parties(ledger.valid)
    rows = [
        _row(ledger, entry, case, counts.get((entry.id, number), 0), prices)
        for entry in reversed(ledger.entries)
        for number, case in enumerate(entry.record.cases)
    ]
    shared: dict[str, int] = {}  # most texts recur in many rows

    def packed(name: str, value: Any) -> float | None:
        if name not in _NUMBERS:
            return shared.setdefault(json.dumps(value), len(shared))
        return float(f"{value:.6g}") if isinstance(value, float) else value

    data = {
        "columns": [*rows[0]] if rows else [],
        "numbers": _NUMBERS,
        "rows": [[packed(name, value) for name, value in row.items()] for row in rows],
        "shared": [json.loads(text) for text in shared],
        "currency": prices and prices.currency,
    }
    return page(
        "ledger/ledger.html",
        charts=True,
        title="Ledger",
        num_records=len(ledger.entries),
        num_cases=len(rows),
        num_made_up=sum(entry.record.evidence.kind == "made up" for entry in ledger.entries),
        num_withdrawn=len(ledger.withdrawn),
        data=embed_json(data),
    )


def _row(ledger: Ledger, entry: Entry, case: RecordedCase, num_parties: int, prices: Prices | None) -> dict[str, Any]:
    record, key, rate = entry.record, case.key, case.headline
    withdrawal = ledger.withdrawn.get(entry.id)

    def value_of(name: FigureName) -> float | None:
        return case.figures[name].value if name in case.figures else None

    costs = costs_of(prices, case.task, case.unit, key.hardware, case.num_devices, value_of, case.units_per_epoch)
    return {
        "id": entry.id, "run": record.run, "date": record.started_at[:16], "case": key.model, "task": case.task,
        "variant": case.variant or "", "vendor": case.vendor, "chip": key.hardware, "device": case.device,
        "precision": case.precision, "nnodes": key.nnodes, "nproc": key.nproc, "rounds": case.num_rounds,
        "verdict": case.verdict, "marks": ", ".join(map(mark_text, case.marks)), "reasons": case.reasons,
        "evidence": record.evidence.kind, "where": record.evidence.where, "by": record.by,
        "signed": record.signed_by or "", "parties": num_parties, "version": record.accelmark_version,
        "note": record.note, "withdrawn": withdrawal.why if withdrawal else "",
        "unit": unit_of(RATES[case.task], case.unit), "rate": rate and rate.value, "low": rate and rate.low,
        "high": rate and rate.high, "target": value_of(FigureName.TIME_TO_TARGET), "mfu": value_of(FigureName.MFU),
        "joules": value_of(FigureName.ENERGY_PER_UNIT), "costs": [[cost.title, cost.value] for cost in costs],
        "work": [*case.work.items()], "changed": case.changed, "environment": [*record.environment.items()],
    }  # fmt: skip
