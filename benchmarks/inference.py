"""What measuring costs: our ``inference_core`` against a bare loop that calls the same compiled engine directly.

Run ``python benchmarks/inference.py`` (``--quick`` for a look). For every engine and batch both loops call one and the
same compiled object. They take turns in short rounds, the order turned around every time, so that whatever else the
machine does falls on both. Rates are those of the lower quartile of the calls, which other work on the machine hardly
moves; the interval is that of a bootstrap over rounds. The bare loop hands over arrays that are made ready before and
keeps the runtime's own outputs: it neither evaluates nor looks at what comes out.
"""

from __future__ import annotations

import argparse
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, from_numpy, nn

from accelmark.cases.efficientnet_lite0._model import EfficientNetLite0
from accelmark.cases.resnet_mini._model import ResNetMini
from accelmark.infer.batches import MadeUpBatches
from accelmark.infer.case import InferBatch, InferCase
from accelmark.infer.engine import Engine, EngineRequest, as_list
from accelmark.infer.export import export_onnx
from accelmark.infer.failures import Situation
from accelmark.infer.measure import measure
from accelmark.infer.registry import engine_class
from accelmark.spec.infer_events import WarmUp
from accelmark.spec.inference import InferSettings

ENGINES = ("eager", "onnxruntime", "openvino", "aotinductor", "inductor")
BATCHES = (1, 8)
RESULTS = Path(__file__).with_name("inference.md")


class _Mini(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = ResNetMini([32, 64, 128], 1, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.network.classifier(self.network.features(image).mean((2, 3)))
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet_mini": (_Mini, (1, 28, 28)),
    "efficientnet_lite0": (EfficientNetLite0, (3, 224, 224)),
}


class _Speed(InferCase):
    """A case that is nothing but made-up images."""

    shape: tuple[int, ...] = ()

    def build_dataloader(self) -> MadeUpBatches:
        return MadeUpBatches(self.synthetic_batch, self.settings.batch_size, 1)

    def create_model(self) -> nn.Module:
        raise AssertionError

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> dict[str, float]:
        raise AssertionError

    def metrics(self, sums: object) -> dict[str, float]:
        raise AssertionError

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch((torch.randn(size, *self.shape),), None)


def bare_call(name: str, engine: Any, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return what a person writes who hands CPU tensors to this engine's runtime and wants CPU tensors back."""
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
    """Return the seconds of each call that ``inference_core`` is computed from."""
    measured = measure(
        partial(case.engine_forward, engine),
        _Same(batch, calls),
        case,
        warmed=WarmUp(phase="inference", first_call_ms=0, calls_ms=()),
        situation=Situation("benchmark", engine.name, batch.num_items, "cpu"),
        evaluated=False,
        emit=lambda event, value: None,
    )
    return [latency / 1000 for window in measured.windows for latency in window.latency_ms]


class _Same:
    """One batch over and over, as the bare loop has it."""

    def __init__(self, batch: InferBatch, times: int) -> None:
        self.batches = (batch,) * times
        self.num_items = batch.num_items * times

    def __iter__(self) -> Any:
        return iter(self.batches)


def quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def compare(name: str, engine: Engine, case: _Speed, rounds: int, round_s: float) -> tuple[float, float, list[float]]:
    """Return items per second of the bare loop and of ours, and the ratio in each of ten resamplings of rounds."""
    batch = case.synthetic_batch(case.settings.batch_size)
    call = bare_call(name, engine, batch.inputs)
    bare_times(call, 3)
    calls = max(4, min(200, round(round_s / quartile(bare_times(call, 8)))))
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
    return batch.num_items / bare, batch.num_items / ours, [bare / ours, *sorted(ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short rounds; writes nothing")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    rounds, round_s = (6, 0.05) if given.quick else (given.rounds, 0.15)
    threads = 1
    torch.set_num_threads(threads)
    lines = ["| model | engine | batch | bare loop, items/s | AccelMark inference_core, items/s | ratio (95 %) |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for model_name in given.models:
        make, shape = MODELS[model_name]
        torch.manual_seed(1)
        model = make().eval()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.onnx"
            export_onnx(model, [torch.randn(2, *shape)], path, ["image"], ["logits"])
            for engine_name in given.engines:
                for batch in BATCHES:
                    settings = InferSettings(batch_size=batch, log_freq=30)
                    case = _Speed(settings, {}, {})
                    case.shape = shape
                    request = EngineRequest(
                        model=model, onnx_path=path, engine_path=None, example=case.synthetic_batch(batch).inputs,
                        precision="fp32", device=torch.device("cpu"), device_type="cpu", threads=threads, options={},
                        work_dir=Path(directory),
                    )  # fmt: skip
                    engine = engine_class(engine_name, None)(request)
                    bare, ours, (ratio, *resampled) = compare(engine_name, engine, case, rounds, round_s)
                    low, high = resampled[10], resampled[-10]
                    lines.append(
                        f"| {model_name} | {engine_name} | {batch} | {bare:,.0f} | {ours:,.0f} "
                        f"| {ratio:.3f} ({low:.3f} to {high:.3f}) |"
                    )
                    print(lines[-1], flush=True)
                    engine.close()
    if not given.quick:
        head = __doc__.split("\n\n", 1)[1].strip()
        machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        machine += f"PyTorch {torch.__version__}, one thread"
        table = "\n".join(lines)
        RESULTS.write_text(
            f"# Inference: what measuring costs\n\n{head}\n\nOn {machine}:\n\n{table}\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
