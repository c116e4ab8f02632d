"""The items of the campaign, in order of value."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from benchmarks.gpu import recovery
from benchmarks.gpu.images import make_images
from benchmarks.gpu.session import ItemError, LeftOutError, Session
from benchmarks.gpu.sweep import sweep
from benchmarks.gpu.training import LLAMA, LLAMA_1B, LLAMA_3B, RESNET, TINY_RESNET, Workload, train

Measure = Callable[[Session, str], dict[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class Item:
    """One measurement."""

    name: str
    measure: Measure
    about_s: float
    """Seconds that it takes on an H100, process starts included. It is left out where less is left."""
    memory_gib: float = 0.0
    """Device memory that it needs."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it is ended."""
        return 1.6 * self.about_s + 10


def trained(case: str, settings: Mapping[str, Any], **more: Any) -> Measure:
    """Return the measurement that carries out one training workload."""
    return lambda session, name: train(session, name, Workload(case, settings, **more))


def probe(session: Session, name: str) -> dict[str, Any]:
    """Measure the ceilings: matrix products per precision, memory, copies, collectives."""
    budget = "2" if session.tiny else "30"
    found: dict[str, Any] = json.loads(session.python(name, "accelmark", "probe", "--json", "--budget", budget))
    return found


def mini(case: str, data: str) -> Measure:
    """Return the measurement of a mini case: three audited rounds on real data, made-up data with ``--tiny``."""

    def measure(session: Session, name: str) -> dict[str, Any]:
        if session.tiny:
            return train(
                session, name, Workload(case, {"end.max_epochs": None, "end.max_steps": 6, "log_every_steps": 2})
            )
        if session.data is not None and not (session.data / data).is_dir():
            raise LeftOutError(f"{session.data / data} does not exist; see benchmarks/gpu/README.md")
        named = data if session.data is not None else None
        real = Workload(case, {"loader.synthetic": False}, rounds=3, data=named, is_open=False)
        return train(session, name, real)

    return measure


def with_bare_loop(case: str, settings: Mapping[str, Any]) -> Measure:
    """Return the measurement that runs the driver and a bare PyTorch loop of the same job in turns, twice each."""

    def measure(session: Session, name: str) -> dict[str, Any]:
        driver, bare = [], []
        for turn in (1, 2):
            run = f"{name}_{turn}"
            entry = train(session, run, Workload(case, settings))
            (job,) = (session.work / run).glob("*/round1/job.json")
            steady = entry["rounds"][0]["steady"]
            steps = str(json.loads(job.read_text(encoding="utf-8"))["work"]["settings"]["end"]["max_steps"])
            text = session.python(f"{run}_bare", "benchmarks.bare_loop", str(job), steps)
            driver.append(steady["step_ms"])
            bare.append(float(json.loads(text.splitlines()[-1])["step_ms"]))
        ratio = statistics.mean(driver) / statistics.mean(bare) - 1
        return {**entry, "overhead": {"ratio": ratio, "driver_step_ms": driver, "bare_step_ms": bare}}

    return measure


def from_jpegs(num_workers: int, *, draft: bool = False) -> Measure:
    """Return the measurement of ResNet-50 that reads real JPEG files with so many worker processes.

    ``draft``: decode them at a lower resolution where the crop allows it.
    """

    def measure(session: Session, name: str) -> dict[str, Any]:
        made = make_images(session.root / "imagenet", images_per_class=8 if session.tiny else 320)
        size = {**TINY_RESNET, "loader.num_workers": 1} if session.tiny else {"batch_size": 256}
        changed = {
            "end.max_epochs": None,
            "end.max_steps": 9 if session.tiny else 80,
            "model.num_classes": 8,
            "model.jpeg_draft": draft,
        }
        settings = {**RESNET, "loader.num_workers": num_workers, **size, **changed, "evaluate.every_epochs": None}
        return train(session, name, Workload("resnet50", settings, data="imagenet"), data=made)

    return measure


def inference(compiler: str, batch_size: int) -> Measure:
    """Return the measurement of an engine on ResNet-50 with made-up images."""

    def measure(session: Session, name: str) -> dict[str, Any]:
        if compiler == "tensorrt" and importlib.util.find_spec("tensorrt") is None:
            raise LeftOutError("tensorrt is not installed here")
        case, precision = ("resnet_mini", "fp32") if session.tiny else ("resnet50", "bf16")
        batches = 3 if session.tiny else 64
        changed = {"max_batches": batches, "warmup_batches": 2, "repeat": 1}
        out = session.work / name
        arguments = ["accelmark", "infer", f"{case}:pytorch", "--synthetic", "--compiler", compiler, "--out", str(out)]
        arguments += ["--precision", precision, "--batch-size", str(min(batch_size, 4) if session.tiny else batch_size)]
        for key, value in changed.items():
            arguments += ["--set", f"{key}={value}"]
        session.python(name, *arguments, "--timeout", f"{max(20.0, session.left_s() - 30):.0f}", expect=(0, 1))
        results = sorted(out.glob("*/round*/result.json"))
        if not results:
            raise ItemError(f"accelmark infer wrote no result.json: {session.errors(name)}")
        result = json.loads(results[0].read_text(encoding="utf-8"))
        if result["state"] != "succeeded":
            raise ItemError(str(result["reason"]))
        return {"precision": result["precision"], "figures": result["figures"]}

    return measure


def program(module: str, *arguments: str) -> Measure:
    """Return the measurement that a program of this folder makes and prints as one line of JSON."""

    def measure(session: Session, name: str) -> dict[str, Any]:
        size = ["--tiny"] if session.tiny else []
        text = session.python(name, f"benchmarks.gpu.{module}", *arguments, *size)
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
        return found

    return measure


def jax_mini(session: Session, name: str) -> dict[str, Any]:
    """Carry out resnet_mini in JAX."""
    from accelmark.spec.plugins.catalog import find, load_framework
    from accelmark.spec.plugins.requirements import Need, missing

    needs = [Need(requirement=one, needed_by="framework jax") for one in load_framework("jax").requires]
    if lacking := missing(needs):
        raise LeftOutError("; ".join(map(str, lacking)))
    if not (find("cases", "resnet_mini", "benchmarks").path / "jax.py").is_file():
        raise LeftOutError("the case resnet_mini has no framework jax")
    return train(session, name, Workload("resnet_mini", {"end.max_epochs": None, "end.max_steps": 60}, framework="jax"))


def ablation(name: str, case: str, base: Mapping[str, Any], change: Mapping[str, Any], memory_gib: float) -> Item:
    """Return the item that measures a workload with one change taken back."""
    return Item(f"without_{name}", trained(case, {**base, **change}), 80, memory_gib)


def quickstart(session: Session, name: str) -> dict[str, Any]:
    """Run the quick-start suite on its real data: verdicts, times to target, replay."""
    out = session.work / name
    suite = session.work / "quickstart.run.json"
    cases: list[dict[str, Any]] = [{"key": "resnet_mini"}, {"key": "llama_mini"}]
    for case, data in zip(cases, ("fashion_mnist", "shakespeare"), strict=True):
        if session.tiny:
            case["settings"] = {"end.max_epochs": None, "end.max_steps": 6, "loader.synthetic": True}
        elif session.data is not None:
            case["data"] = str((session.data / data).absolute())
    suite.write_text(json.dumps({"name": "quickstart", "open": session.tiny, "cases": cases}), encoding="utf-8")
    session.python(name, "accelmark", "run", str(suite), "--out", str(out), expect=(0, 1))
    return {"cases": [read_case(case) for case in json.loads((out / "summary.json").read_text("utf-8"))["cases"]]}


def read_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case of a summary with its verdict, reasons and headline figures."""
    return {name: case[name] for name in ("key", "state", "verdict", "reasons", "figures")}


def serving(session: Session, name: str) -> dict[str, Any]:
    """Serve llama_mini alone on the device, and return its figures."""
    out = session.work / name
    arguments = ["accelmark", "serve", "llama_mini", "--synthetic", "--out", str(out)]
    session.python(name, *arguments, expect=(0, 1))
    results = sorted(out.glob("*/round*/result.json"))
    if not results:
        raise ItemError(f"accelmark serve wrote no result.json: {session.errors(name)}")
    result = json.loads(results[0].read_text(encoding="utf-8"))
    if result["state"] != "succeeded":
        raise ItemError(str(result["reason"]))
    return {"figures": result["figures"]}


def gradients(attention: str) -> Measure:
    """Return the measurement that names the first gradient of flux that is not finite, with one attention kernel."""
    return program("gradients", "flux", "--attention", attention)


_SHARDED: Final = {"parallelism": "fsdp2", "compile": "default", "activation_checkpointing": "off"}
_RESNET: Final = {**RESNET, "batch_size": 256, "compile": "default"}
_RESNET_SHORT: Final = {**_RESNET, "end.max_steps": 200}
_1B: Final = {**LLAMA_1B, **_SHARDED, "batch_size": 4}
_1B_SHORT: Final = {**_1B, "end.max_steps": 40}
_3B: Final = {
    **LLAMA_3B, **_SHARDED, "activation_checkpointing": "selective", "batch_size": 4, "end.max_steps": 30,
}  # fmt: skip
_7B: Final = {**LLAMA, "compile": "off", "batch_size": 1, "activation_checkpointing": "full", "end.max_steps": 20}
_7B_COMPILED: Final = {**_7B, "compile": "default", "batch_size": 4}

_FIXED_SEGMENTS: Final = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}

ITEMS: Final = (
    # First call: is all of it correct?
    Item("probe", probe, 45),
    Item("quickstart", quickstart, 60),
    Item("sweep", sweep, 90),
    *(Item(f"flux_gradients_{kernel}", gradients(kernel), 20) for kernel in ("auto", "cudnn", "flash")),
    Item("resume", partial(recovery.resume, parallelism="ddp"), 60),
    Item("resume_fsdp2", partial(recovery.resume, parallelism="fsdp2"), 60),
    Item("out_of_memory", recovery.out_of_memory, 35),
    Item("infer_aotinductor_32", inference("aotinductor", 32), 60, 8),
    Item("serving", serving, 60),
    # Second call: how fast is it?
    Item("llama_1b_compiled", trained("llama2_7b", _1B), 60, 70),
    Item("llama_1b_batch_16", trained("llama2_7b", {**_1B, "batch_size": 16, "end.max_steps": 40}), 70, 70),
    Item("llama_1b_profile", program("kernels"), 50, 70),
    Item("resnet50_eager", with_bare_loop("resnet50", {**_RESNET, "compile": "off", "end.max_steps": 120}), 110, 24),
    Item("resnet50_compiled", trained("resnet50", _RESNET), 90, 24),
    Item("llama_3b_best", trained("llama2_7b", _3B), 80, 78),
    Item("llama_1b_fp8", trained("llama2_7b", {**_1B, "precision": "fp8"}), 80, 70),
    *(Item(f"resnet50_jpeg_{count}", from_jpegs(count), 80, 24) for count in (12, 16)),
    Item("energy", program("energy"), 60),
    *(
        Item(f"infer_{engine}_{size}", inference(engine, size), 40 if engine == "eager" else 60, 8)
        for size in (32, 1, 256)
        for engine in ("eager", "inductor", "tensorrt")
    ),
    # More calls: each change taken back, and what takes longer.
    Item("resnet_mini", mini("resnet_mini", "fashion_mnist"), 80),
    Item("llama_mini", mini("llama_mini", "shakespeare"), 80),
    Item("resnet_mini_jax", jax_mini, 60),
    Item("llama_1b_best", trained("llama2_7b", _1B_SHORT), 60, 70),
    ablation("llama_1b_compile", "llama2_7b", _1B_SHORT, {"compile": "off"}, 70),
    ablation("llama_1b_bf16_weights", "llama2_7b", _1B_SHORT, {"parallelism": "ddp"}, 70),
    ablation("llama_1b_flash_attention", "llama2_7b", _1B_SHORT, {"attention": "cudnn"}, 70),
    ablation("llama_3b_selective", "llama2_7b", _3B, {"activation_checkpointing": "full"}, 78),
    ablation("resnet50_channels_last", "resnet50", _RESNET_SHORT, {"channels_last": False}, 24),
    Item("resnet50_jpeg_16_draft", from_jpegs(16, draft=True), 80, 24),
    Item("changes", program("changes"), 60, 20),
    Item("fp16_scaler", recovery.fp16, 40),
    Item("llama_7b_decode", program("decode"), 120, 40),
    # These need more memory than 80 GB.
    Item("llama_7b", trained("llama2_7b", _7B), 150, 128),
    Item("llama_7b_compiled", trained("llama2_7b", _7B_COMPILED), 180, 135),
    Item("llama_7b_fp8", trained("llama2_7b", {**_7B_COMPILED, "precision": "fp8"}), 180, 135),
    Item("without_expandable_segments", trained("llama2_7b", _7B, environment=_FIXED_SEGMENTS), 150, 128),
)
"""All items in order of value."""
