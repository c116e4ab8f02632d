"""Measure the overhead of inference: windows of an engine in its process against a bare loop in the same process.

Run ``python -m benchmarks.inference``. ``--quick`` is a short run that writes nothing; ``--models`` and ``--engines``
select a part, whose results are merged into ``results/inference.json`` and the tables of ``inference.md``. With
``--optimum-python PYTHON``, a Python that has optimum-benchmark, it is compared with optimum-benchmark too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from accelmark.infer.engine import ComputeDevice, EngineRequest, Slots, rows_of
from accelmark.infer.engine_process import EngineProcess
from accelmark.infer.onnx_files import export_onnx
from accelmark.spec.settings.inference import OptimizeFor
from benchmarks.bare_engine import LENGTH, MODELS

ENGINES = ("eager", "onnxruntime", "openvino", "aotinductor", "inductor")
BATCHES = (1, 8, 100)
SLOW = {"efficientnet_lite0", "minilm"}
"""Networks that are measured with batches 1 and 8 only."""
MOST_S = 16.0
"""Time for one row, without compilation."""
MAX_CALLS = 10_000
PAGE = Path(__file__).with_name("inference.md")
RESULTS = Path(__file__).parent / "results" / "inference.json"
PEER = Path(__file__).with_name("optimum_peer.py")


@dataclass
class Loaded:
    """An engine in its process, with windows of ``calls`` calls laid out."""

    process: EngineProcess
    name: str
    batch: int
    calls: int = 1

    def lay_out(self, calls: int) -> None:
        """Stage ``calls`` different batches."""
        inputs = MODELS[self.name].inputs
        first = inputs(self.batch)
        self.process.allocate_inputs(Slots(rows_of(first), self.batch, calls), (0, self.batch), first)
        rows, _ = self.process.warm_up([(0, self.batch)] * 3)
        self.process.allocate_outputs(rows, self.batch * calls)
        for slot in range(1, calls):
            self.process.stage(slot, inputs(self.batch))
        self.calls = calls
        self.ours()  # which copies the batches to the memory that the bare loop reads, too

    def ours(self) -> float:
        """Return the processor seconds of a call in a window."""
        self.process.run([(slot, self.batch) for slot in range(self.calls)])
        return float(self.process.call("processor")) / self.calls

    def window_s(self) -> float:
        """Return the seconds of a call by the clock of ``inference_core``."""
        return self.process.run([(slot, self.batch) for slot in range(self.calls)]).took_s / self.calls

    def bare(self) -> float:
        """Return the processor seconds of a call of the bare loop on the same inputs."""
        self.process.call("prepare", calls=[(slot, self.batch) for slot in range(self.calls)])
        return float(self.process.call("bare")) / self.calls


@contextmanager
def loaded(
    name: str, engine: str, model: nn.Module, batch: int, directory: Path,
    optimize_for: OptimizeFor = "latency", threads: int = 1,
) -> Iterator[Loaded]:  # fmt: skip
    """Compile a model, whose ONNX file is in ``directory``, for one batch size."""
    process = EngineProcess(engine, directory, 600, worker="benchmarks.bare_engine")
    try:
        device = ComputeDevice(device_type="cpu", module=None, threads=threads, required=True, collectives="gloo")
        facts = process.call("open", engine, None, device)
        request = EngineRequest(
            model=model if facts["reads"] == "model" else None, onnx_path=directory / "model.onnx", engine_path=None,
            example=tuple(MODELS[name].inputs(batch)), precision="fp32", device=device.device, device_type="cpu",
            threads=threads, optimize_for=optimize_for, options={}, work_dir=directory,
        )  # fmt: skip
        process.compile(request, [])
        yield Loaded(process, name, batch)
    finally:
        process.close()


def quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


@dataclass(frozen=True)
class Row:
    """Items per processor second of both loops, and the median ratio of the turns of a round, with its interval."""

    model: str
    engine: str
    batch: int
    bare: float
    ours: float
    ratio: float
    low: float
    high: float
    added_us: float | None = None
    """What a window adds to a call, with its share of the message and the reply."""
    message_us: float | None = None
    """A message to the engine's process and its reply."""
    calls: int | None = None
    """Calls of a window."""


def compare(engine: Loaded, engine_name: str, rounds: int, window_s: float) -> Row:
    """Run both loops alternately; the order changes every round."""
    engine.lay_out(4)
    call_s = min(engine.bare() for _ in range(4))
    engine.lay_out(max(4, min(MAX_CALLS, round(window_s / call_s), 256 * 2**20 // (engine.process.slots.size // 4))))
    rounds = max(8, min(rounds, round(MOST_S / (2 * engine.calls * call_s))))
    bare: list[float] = []
    ours: list[float] = []
    message_s = min(engine.process.round_trip_s() for _ in range(5)) / engine.calls
    for number in range(rounds):
        for turn in (0, 1) if number % 2 == 0 else (1, 0):
            if turn:
                ours.append(engine.ours() + message_s)
            else:
                bare.append(engine.bare())
    pairs = [theirs / own for theirs, own in zip(bare, ours, strict=True)]
    chance = random.Random(1)
    medians = sorted(median(chance.choices(pairs, k=rounds)) for _ in range(2000))
    items, both = engine.batch, (median(bare), median(ours))
    return Row(
        engine.name, engine_name, items, items / both[0], items / both[1], median(pairs), medians[50], medians[-50],
        median(own - theirs for theirs, own in zip(bare, ours, strict=True)) * 1e6,
        message_s * engine.calls * 1e6, engine.calls,
    )  # fmt: skip


def exported(name: str, directory: Path) -> nn.Module:
    """Build a network, export it to ``directory`` as ONNX, and return it."""
    torch.manual_seed(1)
    chosen = MODELS[name]
    model = chosen.make().eval()
    export_onnx(model, chosen.inputs(2), directory / "model.onnx", chosen.input_names, chosen.output_names)
    return model


def beside_ourselves(models: Sequence[str], engines: Sequence[str], rounds: int, window_s: float) -> Iterator[Row]:
    """Compare with the bare loop, for each model, engine and batch size."""
    for name in models:
        with tempfile.TemporaryDirectory() as directory:
            model = exported(name, Path(directory))
            for engine_name in engines:
                for batch in BATCHES[:2] if name in SLOW else BATCHES:
                    with loaded(name, engine_name, model, batch, Path(directory)) as engine:
                        yield compare(engine, engine_name, rounds, window_s)


def beside_optimum(python: str, seconds: float) -> Iterator[tuple[Row, dict[str, str]]]:
    """Compare with optimum-benchmark on MiniLM, alternately, with the same weights and ONNX file."""
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        model = exported("minilm", directory)
        model.net.save_pretrained(directory)  # type: ignore[operator, union-attr] # transformers' own
        for engine_name in ("eager", "onnxruntime"):
            for batch in BATCHES[:2]:
                with loaded("minilm", engine_name, model, batch, directory) as engine:
                    engine.lay_out(8)
                    theirs: list[float] = []
                    ours: list[float] = []
                    for _ in range(2):
                        ours += [engine.window_s() for _ in range(max(1, round(seconds / (8 * engine.window_s()))))]
                        told = subprocess.run(
                            [python, str(PEER), str(directory), engine_name, str(batch), str(LENGTH), str(seconds)],
                            env={name: os.environ[name] for name in os.environ if name != "PYTHONPATH"},
                            check=True, capture_output=True, text=True,
                        )  # fmt: skip
                        figures = json.loads(told.stdout.splitlines()[-1])
                        theirs += figures["times"]
                pair = batch / quartile(theirs), batch / quartile(ours)
                ratio = pair[1] / pair[0]
                yield Row("minilm", engine_name, batch, *pair, ratio, ratio, ratio), figures["versions"]


def table(rows: Sequence[Mapping[str, Any]], other: str, interval: bool) -> str:
    """Return rows as a table in Markdown."""
    more = " added, µs a call | message and reply, µs (calls of a window) |" if interval else ""
    lines = [f"| model | engine | batch | {other}, items/s | AccelMark, items/s | ratio |{more}",
             "|---|---|---|---|---|---|" + "---|---|" * interval]  # fmt: skip
    for row in rows:
        spread = f" ({row['low']:.3f} to {row['high']:.3f})" if interval else ""
        crossing = f" {row['added_us']:.1f} | {row['message_us']:.0f} ({row['calls']}) |" if interval else ""
        lines.append(
            f"| {row['model']} | {row['engine']} | {row['batch']} | {row['bare']:,.0f} | {row['ours']:,.0f} "
            f"| {row['ratio']:.3f}{spread} |{crossing}"
        )
    return "\n".join(lines)


def keep(section: str, rows: Sequence[Row], versions: Mapping[str, str]) -> None:
    """Write rows to the JSON file, replacing older ones of the same kind, and the tables to the page."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    fresh = {f"{row.model} {row.engine} {row.batch}": asdict(row) for row in rows}
    held[section] = held.get(section, {}) | fresh
    held["versions"] = held.get("versions", {}) | versions
    RESULTS.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for name, other in (("bare", "bare loop"), ("optimum", "optimum-benchmark")):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = page.split(begin)
        shown = table(list(held.get(name, {}).values()), other, interval=name == "bare")
        page = before + begin + shown + "\n" + end + rest.split(end, 1)[1]
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short rounds; writes nothing")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--optimum-python", metavar="PYTHON", help="compare with optimum-benchmark, which it has")
    given = parser.parse_args()
    rounds, window_s = (6, 0.1) if given.quick else (given.rounds, 0.2)
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    for row in beside_ourselves(given.models, given.engines, rounds, window_s):
        print(row, flush=True)
        if not given.quick:
            keep("bare", [row], machine)
    if given.optimum_python:
        for row, versions in beside_optimum(given.optimum_python, 1.0 if given.quick else 3.0):
            print(row, flush=True)
            if not given.quick:
                keep("optimum", [row], {f"optimum: {name}": found for name, found in versions.items()})


if __name__ == "__main__":
    main()
