"""What every standard case promises, and the published numbers of those that have some."""

from __future__ import annotations

import ast
import ctypes
import gc
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from accelmark.datasets.spec import dataset_specs
from accelmark.frameworks.pytorch.backend import metrics_of
from accelmark.frameworks.pytorch.batches import on_meta
from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.frameworks.pytorch.model.identity import count_flops, meta_copy, num_parameters, with_attention
from accelmark.spec.errors import RequestError
from accelmark.spec.layers import Layer, flatten, resolve
from accelmark.spec.plugins.catalog import find, folders, frameworks_of, load_case
from accelmark.spec.settings.training import TrainSettings
from accelmark.tasks.text.pytorch import SequenceToSequence
from accelmark.train.case import attention_flops, case_class
from tests.cases.flops import FORMULAS, MULTIPLY_ADDS, OUTSIDE, TRAINED_SHARE, published_flops

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


def case_of(name: str, over: Mapping[str, Any]) -> TrainCase:
    train = TRAINED[name]
    if NEEDS.get(name) in ("diffusers", "torch_geometric"):  # which its model is from
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


def test_a_case_without_metrics_is_refused_before_anything_runs(tmp_path: Path) -> None:
    base = "from accelmark.frameworks.pytorch.case import TrainCase\nclass Case(TrainCase):"
    ref = find("cases", "resnet_mini").ref("train").model_copy(update={"path": tmp_path, "package": None})
    (tmp_path / "pytorch.py").write_text(f"{base}\n    block_class = ''\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"pytorch\.py: Case has neither metrics\(\) nor ratios"):
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
    target = TRAINED[name].target
    assert target is None or target.metric in metrics_of(case, sums)


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
    for case in TRAINED[name].classes.values():
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


PARAMETERS = {
    "bert": (335_174_458, "bert-large-uncased with its masked-LM head"),
    "gpt3_6_7b": (6_658_596_864, "12 x layers x width^2 + ... of arXiv:2005.14165, table 2.1, with 50,304 tokens"),
    "cpm": (334_080_000, "cpm_model_states_medium.pt (FlagPerf: 0.33 B)"),
    "glm": (334_688_256, "blocklm-large-blank (arXiv:2103.10360: GLM-Large, 335 M)"),
    "aquila_7b": (7_295_537_152, "Aquila-7B: Llama's layers of 7B and 2 x 100,008 x 4,096"),
    "aquila2_7b": (7_295_537_152, "Aquila2-7B: Llama 2 7B's layers and 2 x 100,008 x 4,096"),
    "deepseek_v3": (671_026_404_352, "DeepSeek-V3 without its MTP module and 14,848 balancing biases"),
    "gpt_oss_20b": (20_914_757_184, "gpt-oss-20b (arXiv:2508.10925, table 1: 20.91 B)"),
    "llama2_70b_lora": (
        69_021_212_672,
        "Llama-2-70b-hf and 44,564,480 of rank 16 on fused qkv_proj and o_proj (MLPerf)",
    ),
    "llama2_7b_finetune": (6_742_609_920, "Llama-2-7b-hf and 4,194,304 of rank 8 on q_proj and v_proj (llama-recipes)"),
    "llama3_1_8b": (8_030_261_248, "Llama-3.1-8B"),
    "llama3_70b": (70_553_706_496, "Meta-Llama-3-70B"),
    "mixtral_8x7b": (46_702_792_704, "Mixtral-8x7B-v0.1"),
    "qwen1_5_moe": (14_315_784_192, "Qwen1.5-MoE-A2.7B"),
    "llama2_7b": (6_738_415_616, "Llama-2-7b-hf"),
    "grpo_mini": (83_904, "the case's README"),
    "lora_mini": (1_967_808, "the case's README"),
    "moe_mini": (3_344_800, "the case's README"),
    "llama_mini": (1_869_504, "the case's README"),
    "minilm_finetune": (22_566_146, "all-MiniLM-L6-v2 without its pooler, and a head of three classes"),
    "resnet50": (25_557_032, "torchvision's ResNet50_Weights.IMAGENET1K_V1"),
    "resnet_mini": (77_866, "the case's README"),
    "mobilenetv2": (3_504_872, "torchvision's MobileNet_V2_Weights.IMAGENET1K_V1"),
    "efficientnet": (5_288_548, "torchvision's EfficientNet_B0_Weights.IMAGENET1K_V1"),
    "vit": (86_567_656, "torchvision's ViT_B_16_Weights.IMAGENET1K_V1"),
    "swin": (28_288_354, "torchvision's Swin_T_Weights.IMAGENET1K_V1"),
    "distilbert": (66_955_010, "distilbert-base-uncased-finetuned-sst-2-english"),
    "gpt2": (354_823_168, "gpt2-medium"),
    "t5_small": (60_506_624, "t5-small"),
    "transformer": (214_509_568, "arXiv:1706.03762, table 3 (213 M), and 2 x 129 positions that are not learned"),
    "translation_mini": (442_240, "the case's README"),
    "wav2vec2": (94_396_320, "wav2vec2-base-960h"),
    "whisper_small": (241_734_912, "whisper-small"),
    "detr": (41_524_768, "DETR's n_parameters of 41,302,368, and 222,400 of the first stage, which is not trained"),
    "rt_detr": (42_891_372, "rtdetr_r50vd (arXiv:2304.08069, table 2: 42 M)"),
    "stable_diffusion": (865_910_724 + 340_387_840, "the UNet and the text encoder of stable-diffusion-2-base"),
    "dlrm_dcnv2": (
        204_184_588 * 128 + 16_044_545,
        "MLPerf's --num_embeddings_per_feature, and the layers of its DLRM_DCN by their sizes",
    ),
    "flux": (11_891_178_560, "FLUX.1-schnell (MLPerf's reference: 11.9 B)"),
    "rgat": (
        13_115_303 - 7 * 263_680,
        "MLPerf's RGNN with these sizes, without the 7 attentions of relations that its logits do not depend on",
    ),
    "llava1_5_7b": (
        6_738_415_616 + 303_507_456 + 20_979_712,
        "vicuna-7b-v1.5, the vision model of clip-vit-large-patch14-336, and a projector from 1,024 to 4,096 to 4,096",
    ),
    "multimodal_mini": (626_090, "the case's README"),
    "flow_mini": (316_736, "the case's README"),
    "graph_mini": (109_962, "the case's README"),
    "recommendation_mini": (75_985, "the case's README"),
    "speech_mini": (779_680, "the case's README"),
    "detection_mini": (102_398, "the case's README"),
    "segmentation_mini": (102_203, "the case's README"),
    "segformer": (3_752_694, "segformer-b0-finetuned-ade-512-512 (arXiv:2105.15203, table 1a: 3.8 M)"),
    "mask2former": (47_441_169, "mask2former-swin-tiny-ade-semantic (arXiv:2112.01527, table 4: 47 M)"),
}
"""Case -> number of parameters and where that number is published. A new case adds a row."""


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


SLOW = {
    "aquila2_7b", "aquila_7b", "deepseek_v3", "detr", "flux", "gpt2", "gpt3_6_7b", "gpt_oss_20b", "llama2_70b_lora",
    "llama2_7b_finetune", "llama3_1_8b", "llama3_70b", "llava1_5_7b", "mask2former", "qwen1_5_moe", "rt_detr",
    "stable_diffusion", "swin", "t5_small", "transformer", "vit", "wav2vec2", "whisper_small",
}  # fmt: skip
"""Cases whose operations take 2 to 15 s to count; with reduced depth, test_definitions.py counts them always."""


def test_every_case_has_a_row() -> None:
    assert sorted(PARAMETERS) == sorted(CASES)


@pytest.mark.parametrize("name", sorted(SLOW - {"deepseek_v3", "flux", "llama2_70b_lora"}))  # which take longest
def test_a_large_case_has_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = case_of(name, {}).build_model()
    expected, source = PARAMETERS[name]
    assert num_parameters(model) == expected, source


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] if name in SLOW else []) for name in CASES]
)
def test_a_case_is_counted_at_full_size_without_memory(name: str) -> None:
    case = case_of(name, {})
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before = resident_mib("VmRSS")
    with torch.device("meta"):
        model = case.build_model()
    expected, source = PARAMETERS[name]
    assert num_parameters(model) == expected, source
    assert [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_meta] == []
    flops, reason = count_flops(case, model)
    assert reason is None
    if name in FORMULAS:
        assert flops == published_flops(name, case.settings.model)
    if name in MULTIPLY_ADDS:
        multiply_adds, origin = MULTIPLY_ADDS[name]
        batch = on_meta(case.synthetic_batch(1))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.eval()(*(batch[name] for name in ("image", "mask") if name in batch))
        forward = counter.get_total_flops()
        assert forward / 2 + OUTSIDE.get(name, 0) == pytest.approx(multiply_adds, rel=0.02), origin
        assert flops is not None
        assert TRAINED_SHARE.get(name, 2.95) * forward < flops <= 3 * forward, "only the image needs no gradient"
    assert resident_mib("VmHWM") - before < 400, "MiB"
    del model
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Bytes(nn.Sequential):
    """Layers over images of bytes."""

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = super().forward(image.float())  # type: ignore[no-untyped-call]
        return logits


def test_the_gradients_of_a_grouped_convolution_take_twice_its_operations() -> None:
    """PyTorch's own formula takes 33 times as many for 32 groups of one channel."""
    case = case_of("mobilenetv2", {})
    layers = (
        nn.Conv2d(3, 32, 1),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1000),
    )
    first, grouped, last = 224**2 * 3 * 32, 222**2 * 9 * 32, 32 * 1000
    expected = 2 * (2 * first + 3 * grouped + 3 * last)
    assert count_flops(case, Bytes(*layers)) == (expected, None)


class Attention(TorchFunctionMode):
    """Records the arguments of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.calls.append({"attn_mask": args[3] if len(args) > 3 else None, **(kwargs or {})})
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of attention that the dispatcher chose, and reads of tensors by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) or "local_scalar" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama2_7b", "llama_mini"])
def test_a_decoder_calls_causal_attention_without_a_mask_and_never_reads_a_tensor(name: str) -> None:
    case = case_of(name, SMALL[name])
    model, batch = case.build_model(), case.synthetic_batch(2)
    with Attention() as attention, Operators() as operators:
        case.loss(model, batch)
    assert len(attention.calls) == SMALL[name]["model.num_layers"]
    assert all(call["is_causal"] is True and call["attn_mask"] is None for call in attention.calls)
    assert operators.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"] * len(attention.calls)


def test_the_attention_setting_puts_a_kernel_first() -> None:
    case = case_of("llama2_7b", SMALL["llama2_7b"])
    model, batch = case.build_model(), case.synthetic_batch(2)
    found = {}
    for first in ("auto", "cudnn", "flash", "math"):
        with Operators() as operators, with_attention(nullcontext, first)():
            case.loss(model, batch)
        found[first] = {name.removeprefix("aten.") for name in operators.names}
    flash = {"_scaled_dot_product_flash_attention_for_cpu.default"}
    assert found == {"auto": flash, "cudnn": flash, "flash": flash, "math": set()}, "a CPU has no cuDNN kernel"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiled_decoder_calls_causal_attention_without_a_mask() -> None:
    case = case_of("llama2_7b", SMALL["llama2_7b"])
    model, batch = case.build_model(), case.synthetic_batch(2)
    arguments: list[dict[str, Any]] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        arguments.extend(
            {"attn_mask": node.args[3] if len(node.args) > 3 else None, **node.kwargs}
            for node in graph.graph.nodes
            if "scaled_dot_product_attention" in str(node.target)
        )
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=capture, fullgraph=True)
    case.loss(model, batch)
    assert len(arguments) == 3
    assert all(call["is_causal"] is True and call["attn_mask"] is None for call in arguments)


class Reading(nn.Sequential):
    """A model that reads a value of its output, which the meta device has not."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)  # type: ignore[no-untyped-call]
        return logits if bool((logits == logits).all()) else logits * 0


def test_a_small_model_that_reads_values_is_counted_on_real_tensors() -> None:
    case = case_of("llama_mini", SMALL["llama_mini"])
    model, batch = Reading(case.build_model()), case.synthetic_batch(2)
    with pytest.raises(RuntimeError, match="meta"):
        case.loss(meta_copy(model), on_meta(batch))
    assert count_flops(case, model) == (published_flops("llama_mini", case.settings.model), None)
