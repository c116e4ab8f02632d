"""Write the pages of ``results/`` from their records and notes: ``python docs/results.py``.

``results/records/NAME.json`` is an excerpt of a round's ``result.json``, with the SHA-256 of the whole file.
``results/notes.yaml`` adds what a record does not state. Each gives a page ``results/NAME.md``, and
``results/README.md`` is their index.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

from accelmark.spec.number_format import quantity

RESULTS: Final = Path(__file__).parents[1] / "results"
_HEAD: Final = """\
# Results

One file for each result: `[case]_[hardware]_[date]_[who].md`, with the command, versions, figures, verdict, and what
it is not comparable with. To add one, add its record and notes, and run `python docs/results.py`. *Synthetic* data
shows speed only: such a result is never VALID. `accelmark results results/` shows the same figures, and filters,
queries and exports them.

| Result | Hardware | Precision | Data | Verdict | Throughput, steady | Warm-up | Median step | Time to target | MFU |
|---|---|---|---|---|---:|---:|---:|---:|---:|"""


def records() -> dict[str, dict[str, Any]]:
    """Return each record with its notes, by name."""
    notes = yaml.safe_load((RESULTS / "notes.yaml").read_text(encoding="utf-8"))
    found = {}
    for file in sorted((RESULTS / "records").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        computed = {name: {"value": value, "reason": None} for name, value in notes[file.stem]["figures"].items()}
        found[file.stem] = record | notes[file.stem] | {"figures": record["figures"] | computed}
    return found


def median_step_rate(record: dict[str, Any]) -> float:
    """Return units per second and device of the median step: units of a step / ``step_p50_ms``."""
    settings = record["settings"]
    samples = settings["batch_size"] * settings["gradient_accumulation_steps"]
    units = settings.get("model.seq_length", 1) if record["unit"] == "token" else 1
    return float(samples * units / record["figures"]["step_p50_ms"]["value"] * 1e3)


def median_step_mfu(record: dict[str, Any]) -> float:
    """Return the model FLOP/s per device of the median step / the chip's dense peak for the precision."""
    settings, figures = record["settings"], record["figures"]
    flops = figures["flops_per_sample"]["value"] * settings["batch_size"] * settings["gradient_accumulation_steps"]
    return float(flops / figures["step_p50_ms"]["value"] * 1e3 / (record["chip"]["peaks"][record["precision"]] * 1e12))


def index(found: dict[str, dict[str, Any]]) -> str:
    """Return ``results/README.md``."""
    rows = [_HEAD]
    for name, record in found.items():
        figures, synthetic = record["figures"], "synthetic" in record["marks"]
        cells = (
            f"[{record['title']}]({name}.md)",
            f"{record['num_devices']} x {record['environment']['device_name']}",
            record["precision"],
            "synthetic" if synthetic else "real",
            record["verdict"],
            quantity(figures["throughput_steady"]["value"], f"{record['unit']}s/s"),
            quantity(figures["warmup_time_s"]["value"], "s"),
            quantity(figures["step_p50_ms"]["value"], "ms"),
            "-" if synthetic else quantity(figures["time_to_target_s"]["value"], "s"),
            f"{100 * figures['mfu']['value']:.3g} %",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page(record: dict[str, Any]) -> str:
    """Return the page of one result."""
    figures, environment, chip = record["figures"], record["environment"], record["chip"]
    unit, peak = record["unit"], chip["peaks"][record["precision"]]
    settings, device = record["settings"], f"{record['num_devices']} x {environment['device_name']}"
    rows = {
        "Throughput, steady": _shown(figures["throughput_steady"], f"{unit}s/s"),
        "Throughput, warm-up included": _shown(figures["throughput_train"], f"{unit}s/s"),
        "Warm-up": _shown(figures["warmup_time_s"], "s"),
        "Throughput of the median step": quantity(median_step_rate(record), f"{unit}s/s"),
        "Median step": _shown(figures["step_p50_ms"], "ms"),
        f"MFU, steady ({peak:g} TFLOP/s)": f"{100 * figures['mfu']['value']:.3g} %",
        "MFU of the median step": f"{100 * median_step_mfu(record):.3g} %",
        "Time to target": _shown(figures["time_to_target_s"], "s"),
        "Final metric": _shown(figures["final_metric"], ""),
        "Peak device memory": _shown(figures["peak_device_memory_mib"], "MiB"),
        "Mean power of the card": _shown(figures["mean_power_w"], "W"),
        "Energy of the training": _shown(figures["energy_j"], "J"),
    }
    lines = [
        f"# {record['title']}: {environment['device_name']}",
        "",
        f"{record['verdict']} · case `{record['key']['model']}` version {record['case_version']} · "
        f"{record['started_at'][:10]} · measured by {record['who']}",
        "",
        f"    {' '.join(record['command'].split())}",
        "",
        "| Figure | Value |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "| Part | Version |",
        "|---|---|",
        f"| AccelMark | {environment['accelmark']}, commit {record['commit']} |",
        f"| Hardware | {device}, {environment['cores']} cores of {environment['cpu']} |",
        f"| Software | {environment['os']}, Python {environment['python']}, "
        f"{environment['framework']} {environment['framework_version']} |",
        f"| Settings | precision {record['precision']}, batch {settings['batch_size']}, {record['num_steps']} steps, "
        f"compile {settings['compile']}, {settings['parallelism']} |",
        f"| SHA-256 of result.json | `{record['result_sha256']}` |",
        "",
        "Notes:",
        "",
        *(f"- {note}" for note in record["notes"]),
    ]
    if record["not_comparable"]:
        lines += ["", "Published figures that it is not comparable with, since their data or scale differ:", ""]
        lines += [f"- {other}" for other in record["not_comparable"]]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of each file that this script writes."""
    found = records()
    return {RESULTS / f"{name}.md": page(record) for name, record in found.items()} | {
        RESULTS / "README.md": index(found)
    }


def _shown(figure: dict[str, Any], unit: str) -> str:
    return f"not measured: {figure['reason']}" if figure["value"] is None else quantity(figure["value"], unit)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
