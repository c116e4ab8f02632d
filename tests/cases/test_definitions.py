"""What every standard case promises, and the published numbers of those that have some."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accelmark.datasets.spec import dataset_specs
from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.frameworks.pytorch.model.identity import count_flops
from accelmark.frameworks.pytorch.training.evaluation import metrics_of
from accelmark.spec.errors import RequestError
from accelmark.spec.layers import Layer, flatten, resolve
from accelmark.spec.plugins.catalog import find, folders, frameworks_of, load_case
from accelmark.spec.settings.training import TrainSettings
from accelmark.tasks.text.pytorch import SequenceToSequence
from accelmark.train.case import attention_flops, case_class
from tests.cases.flops import FORMULAS, published_flops

SHIPPED = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
TRAINED = {name: train for name in SHIPPED if (train := load_case(name).train) is not None}
CASES = list(TRAINED)
SMALL: Mapping[str, Mapping[str, Any]] = {name: flatten(train.reduced) for name, train in TRAINED.items()}
"""Case -> the settings of its reduced size, by dotted key."""
NEEDS: Mapping[str, str] = {
    "t5_small": "rouge_score",
    "transformer": "sacrebleu",
    "detr": "pycocotools",
    "rt_detr": "pycocotools",
    "detection_mini": "pycocotools",
    "stable_diffusion": "diffusers",
    "flux": "diffusers",
    "flow_mini": "diffusers",
    "rgat": "torch_geometric",
    "graph_mini": "torch_geometric",
}
"""Case -> the library that computes its score or that its model is from, where that is an extra of its own."""

MODEL_LIBRARIES = {"diffusers", "torch_geometric"}


def case_of(name: str, over: Mapping[str, Any]) -> TrainCase:
    train = load_case(name).train
    assert train is not None
    if NEEDS.get(name) in MODEL_LIBRARIES:
        pytest.importorskip(NEEDS[name])
    layers = [Layer("test", {"loader.synthetic": True, **over})]
    base = Layer.of("case.yaml", train.settings)
    settings = resolve(TrainSettings, base, layers, mutable=train.mutable, is_open=True).settings
    place = Place(0, 1, 1, torch.device("cpu"), 1)
    make_case = case_class(find("cases", name).ref("train"), "pytorch", TrainCase)  # type: ignore[type-abstract]
    return make_case(settings, {}, place)


def test_a_folder_of_a_case_that_was_removed_is_named(tmp_path: Path) -> None:
    ref = find("cases", "resnet_mini").ref("train").model_copy(update={"path": tmp_path / "gone"})
    with pytest.raises(RequestError, match="gone: the folder of the case does not exist any more"):
        case_class(ref, "pytorch", TrainCase)  # type: ignore[type-abstract]


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_the_counter_counts_what_the_published_formula_gives(name: str) -> None:
    case = case_of(name, SMALL[name])
    model, batch = case.build_model(), case.synthetic_batch(2)
    if "num_experts" in case.settings.model:  # grouped products are counted on the meta device only
        assert count_flops(case, model) == (published_flops(name, case.settings.model), None)
        return
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(case.loss(model, batch))
    assert counter.get_total_flops() / 2 == published_flops(name, case.settings.model)


@pytest.mark.parametrize("name", CASES)
def test_the_targets_metric_is_one_that_the_evaluation_gives(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    case = case_of(name, SMALL[name])
    with torch.no_grad():
        sums = case.eval_sums(case.build_model().eval(), case.synthetic_batch(3))
    assert all(value.ndim in (0, 2) for value in sums.values())
    metrics = metrics_of(case, sums)
    train = load_case(name).train
    assert train is not None
    assert train.target is None or train.target.metric in metrics


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_generate_different_batches_of_one_distribution(name: str) -> None:
    case = case_of(name, SMALL[name])
    first, again = case.synthetic_batch(2), case.synthetic_batch(2)
    case.place = Place(1, 2, 1, torch.device("cpu"), 2)
    other = case.synthetic_batch(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {key: (part.shape, part.dtype) for key, part in first.items()} == {
        key: (part.shape, part.dtype) for key, part in other.items()
    }
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", [name for name in CASES if "model.num_layers" in SMALL[name]])
def test_the_blocks_are_the_layers(name: str) -> None:
    case = case_of(name, SMALL[name])
    stacks = 2 if isinstance(case, SequenceToSequence) else 1
    assert len(case.checkpointed_blocks(case.build_model())) == stacks * SMALL[name]["model.num_layers"]


PUBLISHED = {
    # without the first layer's gradient of the image; torchvision states 4.09 G multiply-adds
    "resnet50": (-2 * 112**2 * 49 * 3 * 64, 6, 4.09e9, 1e-3),
    # without attention, six operations a weight and token
    "llama2_7b": (12 * 32 * 4096 * 4096**2, 4096, 6 * (6_738_415_616 - 32_000 * 4096), 1e-4),
    # table D.1 of arXiv:2005.14165, without attention: 1.20e22 for 300 billion tokens
    "gpt3_6_7b": (attention_flops(32, 4096, 2048), 2048 / 300e9, 1.20e22, 0.02),
    # table 2 of arXiv:2505.09343 halves attention for the causal mask: 250 GFLOP a token at 4,096 tokens
    "deepseek_v3": (attention_flops(61, 128 * (128 + 64 + 128), 4096) / 4, 4096, 250e9, 0.02),
}
"""Case -> operations of a sample that the published number has not, its divisor, the number and the tolerance."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_gives_the_published_operations(name: str) -> None:
    left_out, divisor, published, tolerance = PUBLISHED[name]
    flops = published_flops(name, case_of(name, {}).settings.model)
    assert (flops - left_out) / divisor == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_case_folder_is_loaded_completely(name: str) -> None:
    folder = folders("cases")[name].path
    text = (folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Model", "## Data", "## Target, and why", "## Run", "## Results", "## Licence"):
        assert heading in text
    assert "<!-- results -->" in text
    train = load_case(name).train
    if train is not None and train.target is None and train.reference_loss is None:
        assert 'marked "speed only"' in text
    frameworks = {file.stem for file in folder.glob("*.py") if not file.stem.startswith(("_", "infer", "serve"))}
    frameworks -= {"arrays"}
    assert frameworks <= set(folders("frameworks"))
    assert ("pytorch" in frameworks_of(load_case(name))) == (name in CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_data_that_the_code_asks_for_is_declared(name: str) -> None:
    folder = folders("cases")[name].path
    declared = {spec.name for spec in dataset_specs(load_case(name).data, name)}
    train = load_case(name).train
    for case in train.classes.values() if train is not None else ():
        assert declared == {case.attributes[key] for key in ("shards", "weights", "samples") if key in case.attributes}
    for framework in folders("frameworks"):
        if (code := folder / f"{framework}.py").is_file():
            text = code.read_text(encoding="utf-8")
            parts = re.findall(
                r"from accelmark\.cases\.(\w+)\.(_\w+|(?:pytorch|arrays)(?= import Ca(?:se|nvases))) import", text
            )
            for base, module in parts:
                text += (folders("cases")[base].path / f"{module}.py").read_text(encoding="utf-8")
            asked = set(re.findall(r'(?:data_dirs\[|shards = |weights = |samples = )"(\w+)"', text))
            assert declared == asked, code


@pytest.mark.parametrize("name", CASES)
def test_the_schedule_is_that_of_the_settings(name: str) -> None:
    case = case_of(name, SMALL.get(name, {}))
    assert type(case).build_schedule is TrainCase.build_schedule
    assert (case.settings.schedule.name == "tri_stage") == (name == "wav2vec2")


ALLOWED = {"cases", "datasets", "frameworks", "infer", "spec", "tasks", "train"}
"""Packages that a case imports. Its folder is no package, so that import-linter does not see it."""


def test_cases_import_the_job_side_only_and_nothing_imports_a_case() -> None:
    source = folders("cases")["resnet_mini"].path.parents[1]
    for path in source.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported = {name.split(".")[1] for name in names if name.startswith("accelmark.")}
        if path.is_relative_to(source / "cases"):
            assert imported <= ALLOWED, path
        else:
            assert "cases" not in imported, path


def test_cases_without_requirements_import_only_what_the_framework_installs() -> None:
    blocked = ["PIL", "safetensors", "tokenizers", "transformers"]
    modules = ["accelmark.frameworks.pytorch.backend"]
    for name in SHIPPED:
        case = load_case(name)
        if not case.requires:
            classes = case.train.classes.values() if case.train else ()
            modules += [f"accelmark.tasks.{each.base.rpartition('.')[0]}" for each in classes]
            parts = sorted(path.stem for path in folders("cases")[name].path.glob("*pytorch.py"))
            modules += [f"accelmark.cases.{name}.{part}" for part in parts]
    assert len(modules) > 2
    program = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it raises ModuleNotFoundError\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400)
