"""Claims from what others publish: MLPerf's result files, and the tables of results in FlagPerf's READMEs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from pydantic_core import from_json

from accelmark.compat.flagperf.parse import equivalent
from accelmark.results.claims import Claim, require_unit
from accelmark.results.export import BENCHMARKS
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import parse, read_text
from accelmark.spec.plugins.catalog import folders, load_case

_MLPERF_CASES: Final = {name: case for case, name in BENCHMARKS.items() if case != "bert_large"} | {
    "llama31_8b": "llama3_1_8b", "flux1": "flux", "gpt_oss_20b": "gpt_oss_20b",
}  # fmt: skip
"""MLPerf Training's name of a benchmark -> case, where they differ or a case has another name."""
_MLPERF_INFERENCE: Final = {"resnet50": "resnet50", "bert-99": "bert_large", "bert-99.9": "bert_large"}
_CHIP: Final = re.compile(r"(?<![A-Za-z0-9])(?:GB|GH|[ABHLV])\d{2,3}S?(?![0-9A-Za-z])|MI\d{3}\w?|Gaudi\d?")
_SCALE: Final = re.compile(r"(?P<nodes>\d+)\s*x\s*(?P<devices>\d+)")
_FLAGPERF: Final[dict[str, tuple[str, str, str]]] = {
    "token/p/s": ("train", "throughput_per_device", "tokens/s"),
    "p_train": ("train", "throughput_train", ""),
    "性能(samples/s)": ("train", "throughput_whole", ""),
    "p_infer_core": ("infer", "inference_core", ""),
}
"""Column of a table -> task, figure, and unit; empty: the case's unit."""
_WHY: Final = "the source states no spread; cards, clocks and days differ"


def read_published(path: Path, url: str) -> list[tuple[str, Claim]]:
    """Read the claims of an MLPerf result or a FlagPerf README, published at ``url``, each with a name for its file."""
    text = read_text(path)
    if ":::MLLOG" in text:
        rows = _mlperf_training(text, path)
    elif "MLPerf Results Summary" in text:
        rows = _mlperf_inference(text, path)
    else:
        rows = _flagperf(text, path)
    claims = []
    for name, values in rows:
        common = {"data": "real", "tolerance": {"ratio": 0.05, "why": _WHY}}
        claim = parse(Claim, common | values | {"source": {"url": url} | values["source"]}, f"{path}: {name}")
        require_unit(claim, f"{path}: {name}")
        claims.append((name, claim))
    if not claims:
        what = "states no figure that AccelMark can compare: read are MLPerf's result files and FlagPerf's tables"
        raise SpecError([Problem(str(path), "", what)])
    return claims


def _mlperf_training(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rate of a training that its log tracks, else the time between ``run_start`` and ``run_stop``."""
    events: dict[str, Any] = {}
    rates: list[float] = []
    system: dict[str, Any] = {}
    for line in text.splitlines():
        mark, _, content = line.partition(" ")
        if mark == ":::SYSJSON":
            system = from_json(content)
        elif mark == ":::MLLOG":
            event = from_json(content)
            key, value = event["key"], event["value"]
            events[key] = event["time_ms"] if key in ("run_start", "run_stop") else value
            if key == "tracked_stats" and isinstance(value, dict) and "throughput" in value:
                rates.append(float(value["throughput"]))
    benchmark = str(events.get("submission_benchmark"))
    case = _MLPERF_CASES.get(benchmark, benchmark)
    chip = _CHIP.search(str(system.get("accelerator_model_name")))
    if case not in folders("cases") or chip is None:
        what = f"no case carries MLPerf's {benchmark!r}" if chip else "names no accelerator"
        raise SpecError([Problem(str(path), "submission_benchmark" if chip else "accelerator_model_name", what)])
    nodes, devices = int(system["number_of_nodes"]), int(system["accelerators_per_node"])
    train = load_case(case).train
    unit = train.unit if train else "sample"
    batch, steps = events.get("global_batch_size"), int(events.get("gradient_accumulation_steps") or 1)
    per_device = {"batch_size": batch // (nodes * devices * steps)} if isinstance(batch, int) else {}
    figure: dict[str, Any]
    if rates and unit != "token":
        figure = {"figure": "throughput_per_device", "steady": True, "unit": f"{unit}s/s"}
        figure["value"] = round(median(rates) / (nodes * devices), 1)
        place = f"tracked_stats: median {median(rates):,.0f} {unit}s/s on {nodes * devices} devices"
    else:
        figure = {"figure": "time_to_target_s", "unit": "s"}
        figure["value"] = (events.get("run_stop", 0) - events.get("run_start", 0)) / 1e3
        place = "run_start to run_stop"
    yield f"mlperf-{benchmark}-{chip[0].lower()}x{nodes * devices}", figure | {
        "title": f"{benchmark} training, MLPerf, {nodes * devices} {chip[0]}, {events.get('submission_org')}",
        "case": case, "task": "train", "hardware": chip[0], "nnodes": nodes, "nproc": devices, "precision": None,
        "settings": per_device | {"gradient_accumulation_steps": steps}, "software": system.get("framework"),
        "source": {"document": f"MLPerf Training, {path.name} of {events.get('submission_org')}", "place": place},
        "not_stated": ["precision", "power limit and clocks"],
    }  # fmt: skip


def _mlperf_inference(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rate of an Offline summary, whose path names system and benchmark: ``SYSTEM/BENCHMARK/Offline/…``."""
    rate = re.search(r"Samples per second: ([0-9.]+)", text)
    parts = path.parts
    place = parts.index("Offline") if "Offline" in parts else 0
    if rate is None or place < 2:
        what = "is read below its directories SYSTEM/BENCHMARK/Offline, which name what was measured"
        raise SpecError([Problem(str(path), "", what)])
    system, benchmark = parts[place - 2 : place]
    chip, count = _CHIP.search(system), re.search(r"x(\d+)", system)
    case = _MLPERF_INFERENCE.get(benchmark)
    if chip is None or case is None:
        raise SpecError([Problem(str(path), "", f"no case carries {benchmark!r} on {system!r}")])
    yield f"mlperf-{benchmark}-inference-{chip[0].lower()}", {
        "title": f"{benchmark} inference, MLPerf, {system}, Offline", "case": case, "task": "infer",
        "hardware": chip[0], "nproc": int(count[1]) if count else 1, "precision": None,
        "figure": "offline_samples_per_second", "value": float(rate[1]), "unit": "samples/s",
        "run": {"scenarios": ["offline"]},
        "source": {"document": f"MLPerf Inference result of {system}", "place": "Samples per second"},
        "not_stated": ["precision", "power limit and clocks"],
    }  # fmt: skip


def _flagperf(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a FlagPerf README that has a number; the path names the model."""
    folder = path.resolve().parent.name
    model, _, framework = folder.partition("-")
    environment = re.search(r"训练框架版本：\s*(\S+)|^\s*-\s*(TensorRT\s+\S+)", text, re.MULTILINE)
    device = _CHIP.search(text)
    for row in _rows(text):
        column = next((name for name in _FLAGPERF if _number(row.get(name)) is not None), None)
        if column is None:
            continue
        task, figure, unit = _FLAGPERF[column]
        covered = equivalent(model, "train" if task == "train" else "infer")
        if covered is None or covered.case is None:
            raise SpecError([Problem(str(path), "", f"no case carries FlagPerf's {folder!r}")])
        spec = load_case(covered.case)
        part = spec.train if task == "train" else spec.infer
        label = row.get("配置") or row.get("配置文件") or row.get("推理工具") or ""
        scale = _SCALE.search(label.replace("×", "x").rpartition("（")[2] or label)
        config = re.search(r"config_(\w+?)x(\d+)x(\d+)", label)
        chip = config[1] if config else re.match(r"[A-Za-z]+-?\w*?\d+", label)
        hardware = chip if isinstance(chip, str) else chip[0] if chip else device[0] if device else "unknown"
        nodes, devices = (int(config[2]), int(config[3])) if config else (1, 1)
        if scale and not config:
            nodes, devices = int(scale["nodes"]), int(scale["devices"])
        precision = row.get("precision")
        batch = row.get("bs") or (re.search(r"bs=(\d+)", row.get("fix_hp", "")) or [None, None])[1]
        number = _number(row[column]) or 0.0
        parts = (model, hardware.lower() if task == "train" else f"{label}-{hardware.lower()}", f"{nodes}x{devices}")
        yield "-".join(("flagperf", *parts, *filter(None, (precision, batch and f"bs{batch}")))), {
            "title": f"{model}, FlagPerf, {label}" + (f", {precision}" if precision else ""),
            "case": covered.case, "task": task, "hardware": hardware, "nnodes": nodes, "nproc": devices,
            "precision": {"bf16+fp8": "fp8"}.get(precision, precision) if precision else None,
            "figure": figure, "value": number, "unit": unit or f"{part.unit if part else 'sample'}s/s",
            "settings": {"batch_size": int(batch)} if batch and str(batch).isdigit() else {},
            "software": f"{framework} {next(filter(None, environment.groups()))}".strip() if environment else None,
            "source": {"document": f"FlagOpen/FlagPerf, {folder}/{path.name}", "place": f"row {label}, {column}"},
            "not_stated": ["power limit and clocks", *([] if precision else ["precision"])],
        }  # fmt: skip


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Yield each row of the Markdown tables of a text by its headings, without emphasis."""
    heads: list[str] = []
    for line in text.splitlines():
        if not line.strip().startswith("|"):
            heads = []
            continue
        cells = [
            re.sub(r"[\\*\s]|（(?=samples)", "", cell) if not heads else cell.strip()
            for cell in line.strip().strip("|").split("|")
        ]
        if not heads:
            heads = [cell.replace("性能samples", "性能(samples") for cell in cells]
        elif not set("".join(cells)) <= set("-: "):
            yield dict(zip(heads, cells, strict=False))


def _number(text: str | None) -> float | None:
    try:
        return float(str(text).replace(",", "")) or None
    except ValueError:
        return None
