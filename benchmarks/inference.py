"""Measure the overhead of inference: ``inference_core`` against a bare loop that calls the same compiled engine.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, from_numpy, nn

from accelmark.cases.efficientnet_lite0._model import EfficientNetLite0
from accelmark.cases.resnet_mini._model import ResNetMini
from accelmark.infer.batches import synthetic_batches
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import Engine, EngineRequest, as_list
from accelmark.infer.engines import engine_class
from accelmark.infer.measure import measure
from accelmark.infer.onnx_export import export_onnx
from accelmark.spec.inference import InferSettings

ENGINES = ("eager", "onnxruntime", "openvino", "aotinductor", "inductor")
BATCHES = (1, 8)
LENGTH = 64
"""Tokens per sequence."""
MOST_S = 6.0
"""Time for one row, without compilation."""
PAGE = Path(__file__).with_name("inference.md")
RESULTS = Path(__file__).parent / "results" / "inference.json"
PEER = Path(__file__).with_name("optimum_peer.py")


class _Mini(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = ResNetMini(16, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.network.classifier(self.network.features(image).mean((2, 3)))
        return logits


class _Bert(nn.Module):
    """transformers' BertModel in MiniLM's size, with plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
        self.net = BertModel(config)

    def forward(self, tokens: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
        states: Tensor = self.net(input_ids=tokens, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        return states


@dataclass(frozen=True)
class Model:
    """A network, and synthetic inputs for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


def _images(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randn(size, *shape),)


def _tokens(size: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(1000, 30000, (size, LENGTH))
    return tokens, torch.ones_like(tokens), torch.zeros_like(tokens)


BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
MODELS = {
    "resnet_mini": Model(_Mini, _images(1, 28, 28), ("image",), ("logits",)),
    "efficientnet_lite0": Model(EfficientNetLite0, _images(3, 224, 224), ("image",), ("logits",)),
    "minilm": Model(_Bert, _tokens, BERT_INPUTS, ("last_hidden_state",)),
}


class _Speed(InferCase):
    """A case with synthetic inputs only."""

    make_inputs: Callable[[int], tuple[Tensor, ...]]

    def build_dataloader(self) -> InferBatches:
        return synthetic_batches(self.synthetic_batch, self.settings.batch_size, 1)

    def create_model(self) -> nn.Module:
        raise AssertionError

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> dict[str, float]:
        raise AssertionError

    def metrics(self, sums: object) -> dict[str, float]:
        raise AssertionError

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch(self.make_inputs(size), None)


def bare_call(name: str, engine: Any, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return a minimal call of this engine's runtime, from CPU tensors to CPU tensors."""
    if name == "onnxruntime":
        session, names = engine.session, engine.inputs
        return lambda: [
            from_numpy(each)
            for each in session.run(None, {name: each.numpy() for name, each in zip(names, inputs, strict=True)})
        ]
    if name == "openvino":
        request = engine.infer_request
        return lambda: [
            from_numpy(each) for each in request.infer([each.numpy() for each in inputs], share_inputs=True).to_tuple()
        ]
    model = getattr(engine, {"eager": "model", "inductor": "compiled", "aotinductor": "run"}[name])
    return lambda: [each.cpu() for each in as_list(model(*inputs))]


def bare_times(call: Callable[[], object], calls: int) -> list[float]:
    """Return the seconds of each call."""
    times = []
    with torch.inference_mode():
        for _ in range(calls):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return times


def our_times(engine: Engine, case: _Speed, batch: InferBatch, calls: int) -> list[float]:
    """Return the seconds of each call, from which ``inference_core`` is computed."""
    with torch.inference_mode():  # as in the inference steps and in the bare loop
        measured = measure(
            partial(case.engine_forward, engine),
            _Same(batch, calls),
            case,
            phase="inference",
            engine=engine.name,
            evaluated=False,
            emit=lambda event, value: None,
        )
    return [latency / 1000 for window in measured.windows for latency in window.latency_ms]


class _Same:
    """Repeats one batch, as the bare loop does."""

    def __init__(self, batch: InferBatch, times: int) -> None:
        self.batches = (batch,) * times
        self.num_items = batch.num_items * times

    def __iter__(self) -> Any:
        return iter(self.batches)


def quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


@dataclass(frozen=True)
class Row:
    """Items per second of both loops, and their ratio with its interval."""

    model: str
    engine: str
    batch: int
    bare: float
    ours: float
    ratio: float
    low: float
    high: float


def compare(engine: Engine, case: _Speed, model: str, rounds: int, round_s: float) -> Row:
    """Run both loops alternately in short rounds; the order changes every round."""
    batch = case.synthetic_batch(case.settings.batch_size)
    call = bare_call(engine.name, engine, batch.inputs)
    bare_times(call, 3)
    one = quartile(bare_times(call, 8))
    calls = max(2, min(200, round(round_s / one)))
    rounds = max(8, min(rounds, round(MOST_S / (2 * calls * one))))
    turns: tuple[Callable[[], list[float]], ...] = (
        lambda: bare_times(call, calls),
        lambda: our_times(engine, case, batch, calls),
    )
    taken: tuple[list[list[float]], list[list[float]]] = ([], [])
    for number in range(rounds):
        for turn in (0, 1) if number % 2 == 0 else (1, 0):
            taken[turn].append(turns[turn]())
    bare, ours = (quartile([each for times in kind for each in times]) for kind in taken)
    chance = random.Random(1)
    ratios = []
    for _ in range(400):
        picked = chance.choices(range(rounds), k=rounds)
        parts = [quartile([each for index in picked for each in kind[index]]) for kind in taken]
        ratios.append(parts[0] / parts[1])
    ratios.sort()
    items = batch.num_items
    return Row(model, engine.name, items, items / bare, items / ours, bare / ours, ratios[10], ratios[-10])


def engine_of(name: str, engine: str, model: nn.Module, batch: int, directory: Path) -> tuple[Engine, _Speed]:
    """Compile a model, whose ONNX file is in ``directory``, for one batch size."""
    case = _Speed(InferSettings(batch_size=batch, log_freq=30), {}, {})
    case.make_inputs = MODELS[name].inputs
    request = EngineRequest(
        model=model, onnx_path=directory / "model.onnx", engine_path=None, example=case.synthetic_batch(batch).inputs,
        precision="fp32", device=torch.device("cpu"), device_type="cpu", threads=1, options={}, work_dir=directory,
    )  # fmt: skip
    return engine_class(engine, None)(request), case


def exported(name: str, directory: Path) -> nn.Module:
    """Build a network, export it to ``directory`` as ONNX, and return it."""
    torch.manual_seed(1)
    chosen = MODELS[name]
    model = chosen.make().eval()
    export_onnx(model, chosen.inputs(2), directory / "model.onnx", chosen.input_names, chosen.output_names)
    return model


def beside_ourselves(models: Sequence[str], engines: Sequence[str], rounds: int, round_s: float) -> Iterator[Row]:
    """Compare with the bare loop, for each model, engine and batch size."""
    for name in models:
        with tempfile.TemporaryDirectory() as directory:
            model = exported(name, Path(directory))
            for engine_name in engines:
                for batch in BATCHES:
                    engine, case = engine_of(name, engine_name, model, batch, Path(directory))
                    yield compare(engine, case, name, rounds, round_s)
                    engine.close()


def beside_optimum(python: str, seconds: float) -> Iterator[tuple[Row, dict[str, str]]]:
    """Compare with optimum-benchmark on MiniLM, alternately, with the same weights and ONNX file."""
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        model = exported("minilm", directory)
        model.net.save_pretrained(directory)  # type: ignore[operator, union-attr] # transformers' own
        for engine_name in ("eager", "onnxruntime"):
            for batch in BATCHES:
                engine, case = engine_of("minilm", engine_name, model, batch, directory)
                data = case.synthetic_batch(batch)
                our_times(engine, case, data, 10)
                one = quartile(our_times(engine, case, data, 8))
                theirs: list[float] = []
                ours: list[float] = []
                for _ in range(2):
                    ours += our_times(engine, case, data, max(8, round(seconds / one)))
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
                engine.close()


def table(rows: Sequence[Mapping[str, Any]], other: str, interval: bool) -> str:
    """Return rows as a table in Markdown."""
    lines = [f"| model | engine | batch | {other}, items/s | AccelMark inference_core, items/s | ratio |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        spread = f" ({row['low']:.3f} to {row['high']:.3f})" if interval else ""
        lines.append(
            f"| {row['model']} | {row['engine']} | {row['batch']} | {row['bare']:,.0f} | {row['ours']:,.0f} "
            f"| {row['ratio']:.3f}{spread} |"
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
    rounds, round_s = (6, 0.05) if given.quick else (given.rounds, 0.15)
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    for row in beside_ourselves(given.models, given.engines, rounds, round_s):
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
