"""Inference whose answers take dependent steps: transcripts token by token, images by denoising."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import yaml
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel

import accelmark
from accelmark.infer.case import IterativeModel
from accelmark.infer.measure import Answers
from accelmark.results.rounds.inference import answer_reasons
from accelmark.spec.log.events import Event
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.settings.inference import InferPrecision, InferStep
from accelmark.tasks.metrics import IGNORED
from tests.cases import tiny_data
from tests.cases.infer_of import accuracies, built, infer

WHISPER = {"num_layers": 1, "hidden_size": 24, "num_heads": 2, "target_length": 12}
DIFFUSION = {
    "num_captions": 4, "num_steps": 4, "latent_size": 8, "width": 64, "text_width": 32, "text_layers": 1,
    "text_heads": 2, "text_length": 12, "vocab_size": 400, "autoencoder_width": 32,
}  # fmt: skip
REDUCED = {"whisper_small": WHISPER, "stable_diffusion": DIFFUSION}
FAST = {"precision": "fp32", "batch_size": 2, "repeat": 3}

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return recordings, and a reduced Whisper that was trained to transcribe them."""
    root = tmp_path_factory.mktemp("speech")
    data = tiny_data.librispeech(root)
    torch.manual_seed(0)
    case: Any = built("whisper_small", root, data, WHISPER, batch_size=3)
    model: Any = case.create_model()
    (batch,) = case.build_dataloader()
    tokenizer = Tokenizer.from_file(str(root / "whisper_weights/hf/tokenizer.json"))
    target = torch.full((3, 4 + WHISPER["target_length"]), IGNORED)
    for row, index in zip(target, batch.labels.tolist(), strict=True):
        tokens = [*model.prompt, *tokenizer.encode(case._recordings.row(index)[0].lower()).ids, 50257]
        row[: len(tokens)] = torch.tensor(tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(2000):
        loss = F.cross_entropy(
            model.pair(batch.inputs[0], target).flatten(0, 1), target.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if loss < 0.02:  # the least probable token has 0.87 or more
            break
    else:
        pytest.fail(f"Whisper did not learn three recordings: its loss is {loss.item():.3g}")
    model.pair.net.save_pretrained(root / "whisper_weights/hf")
    return {**data, "weights": root / "whisper_weights/hf/model.safetensors"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return captions, and reduced networks with random weights."""
    root = tmp_path_factory.mktemp("pictures")
    data = tiny_data.captions(root)
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = CLIPConfig(
        text_config={**config, "vocab_size": 400, "max_position_embeddings": 12},
        vision_config={**config, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    CLIPModel(clip).save_pretrained(root / "clip_vit_b32/hf")
    case: Any = built("stable_diffusion", root, {}, DIFFUSION)
    networks = case.networks()
    for name, network in zip(("unet", "text_encoder", "vae"), networks, strict=True):
        network.save_pretrained(root / "stable_diffusion" / name)
    return {**data, "weights": root / "stable_diffusion/unet/diffusion_pytorch_model.safetensors"}


@pytest.fixture
def data(name: str, speech: Mapping[str, Path], pictures: Mapping[str, Path]) -> Mapping[str, Path]:
    """Return the data of the case ``name``."""
    return speech if name == "whisper_small" else pictures


def test_whisper_transcribes_and_its_words_are_counted(speech: Mapping[str, Path], tmp_path: Path) -> None:
    ran = infer("whisper_small", tmp_path, speech, parameters=WHISPER, **FAST)
    assert (ran.details(InferStep.CREATE)["items"], ran.details(InferStep.CREATE)["trained"]) == (3, True)
    framework, engine = accuracies(ran)
    assert framework == pytest.approx(engine)
    assert framework < 0.1, "word error rate of the recordings that it was trained on"


def test_stable_diffusion_makes_images_and_clip_scores_them(pictures: Mapping[str, Path], tmp_path: Path) -> None:
    ran = infer("stable_diffusion", tmp_path, pictures, parameters=DIFFUSION, **FAST)
    assert (ran.details(InferStep.CREATE)["items"], ran.details(InferStep.CREATE)["trained"]) == (4, True)
    framework, engine = accuracies(ran)
    assert -100 < framework < 100
    assert framework != 0
    assert engine == pytest.approx(framework, abs=0.5), "on noise with 1 % of other noise"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_inductor_compiles_the_parts_of_a_step(name: str, data: Mapping[str, Path], tmp_path: Path) -> None:
    finished = infer(name, tmp_path, data, parameters=REDUCED[name], **{**FAST, "compiler": "inductor"}).finished
    assert finished.state == "completed", finished.message
    # The mean score of four images from random weights differs between passes by the noise on their inputs.
    reasons = [each for each in finished.invalid_reasons if not (name == "stable_diffusion" and "all inputs" in each)]
    assert not reasons


@pytest.mark.parametrize("name", sorted(REDUCED))
def test_loadgens_answers_are_compared_step_by_step(name: str, tmp_path: Path) -> None:
    short = {"scenarios": ("offline",), "scenario_duration_s": 0.2, "scenario_queries": 4, "repeat_check": False}
    over = {**FAST, "compiler": "eager", "synthetic": True, "max_batches": 2, **short}
    ran = infer(name, tmp_path, {}, parameters=REDUCED[name], **over)
    assert ran.finished.state == "completed", ran.finished.message
    (result,) = ran.of(Event.SCENARIO)
    for found in (result.accuracy_answers, result.performance_answers):
        assert found is not None
        assert found.num_items
        assert answer_reasons(found, "fp32") == []


def _compared(
    reference: nn.Module, inputs: Sequence[Tensor], found: Sequence[Tensor], precision: InferPrecision = "fp32"
) -> str:
    """Return why the framework does not accept an engine's outputs."""
    answers = Answers(iterative=True)
    with torch.inference_mode():
        answers.add(found, reference(*inputs, *found))
    return "; ".join(answer_reasons(answers.result(), precision))


@pytest.fixture(scope="module")
def transcriber(speech: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tensor]:
    """Return the trained Whisper with the spectra of the recordings."""
    case = built("whisper_small", tmp_path_factory.mktemp("transcriber"), speech, WHISPER, batch_size=3)
    (batch,) = case.build_dataloader()
    return case.create_model().eval(), batch.inputs[0]


def test_a_transcript_ends_and_is_followed_by_nothing(transcriber: tuple[Any, Tensor]) -> None:
    model, spectra = transcriber
    with torch.inference_mode():
        tokens, logits = model(spectra)
    assert tokens.shape == logits.shape == (3, WHISPER["target_length"])
    for row, values in zip(tokens.tolist(), logits, strict=True):
        end = row.index(50257)
        assert set(row[end + 1 :]) <= {IGNORED}
        assert not values[end + 1 :].any()
        assert values[: end + 1].all()
    assert _compared(model, [spectra], [tokens, logits]) == ""


@pytest.mark.adversary
def test_tokens_that_the_model_would_not_choose_are_found_although_their_logits_are_right(
    transcriber: tuple[Any, Tensor],
) -> None:
    model, spectra = transcriber
    with torch.inference_mode():
        tokens, _ = model(spectra)
        others = tokens.roll(1, 0)  # known beforehand, so that all of them are computed at the same time
        assert (tokens != others).any()
        found = [others, model(spectra, others, others)[1]]
    assert "have the framework's largest value" in _compared(model, [spectra], found, "int8")
    nothing = [torch.full_like(tokens, IGNORED), torch.zeros(tokens.shape)]
    assert "have the framework's largest value" in _compared(model, [spectra], nothing, "int8")


@pytest.mark.adversary
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_a_narrower_precision_than_declared_is_found(name: str, data: Mapping[str, Path], tmp_path: Path) -> None:
    case = built(name, tmp_path, data, REDUCED[name], batch_size=3)
    inputs = next(iter(case.build_dataloader())).inputs
    model, narrow = case.create_model().eval(), case.create_model().eval().bfloat16()
    with torch.inference_mode():
        found = narrow(*(each.bfloat16() if each.is_floating_point() else each for each in inputs))
    assert "median error" in _compared(model, inputs, found)
    assert _compared(model, inputs, found, "bf16") == ""


@pytest.mark.adversary
def test_a_step_that_was_not_computed_is_found(pictures: Mapping[str, Path], tmp_path: Path) -> None:
    case = built("stable_diffusion", tmp_path, pictures, DIFFUSION)
    inputs, model = next(iter(case.build_dataloader())).inputs, case.create_model().eval()
    with torch.inference_mode():
        predictions, images = model(*inputs)
        skipped = predictions.clone()
        skipped[:, 2] = skipped[:, 1]
        found = [skipped, model(*inputs, skipped, images)[1]]
    assert _compared(model, inputs, [predictions, images]) == ""
    assert "error of the engine's answers" in _compared(model, inputs, found)


def test_the_score_of_an_image_is_clips_cosine_with_its_caption(pictures: Mapping[str, Path], tmp_path: Path) -> None:
    case: Any = built("stable_diffusion", tmp_path, pictures, DIFFUSION)
    (batch,) = case.build_dataloader()
    assert case._captions.texts == ["ONE OF FIRST", "TWO OF FIRST", "SIX OF FIRST", "TEN OF FIRST"]
    images = torch.rand(4, 3, 64, 64) * 2 - 1
    with torch.inference_mode():
        whole = case.metrics(case.evaluator([images, images], batch.labels))["clip_score"]
        single = [case.evaluator([images[:1], images[:1]], torch.tensor([index])) for index in (0, 1)]
    assert -100 < whole < 100
    assert single[0]["cosine"] != single[1]["cosine"], "the score depends on the caption"


PARAMETERS = {
    "whisper_small": (241_734_912, "whisper-small"),
    "stable_diffusion": (
        865_910_724 + 340_387_840 + 49_490_199,
        "stable-diffusion-2-base: the UNet, the text encoder, and the decoder of the autoencoder of 83,653,863",
    ),
}


@pytest.mark.parametrize("name", sorted(REDUCED))
def test_the_operations_of_a_whole_answer_are_those_that_the_case_states(name: str, tmp_path: Path) -> None:
    side = load_case(name).infer
    assert side is not None
    assert side.iterative
    few = _counted(name, tmp_path, 1)
    assert few[0] == PARAMETERS[name][0], PARAMETERS[name][1]
    steps = {"whisper_small": 32, "stable_diffusion": side.parameters.get("num_steps")}[name]
    assert isinstance(steps, int)
    flops = few[1] + (steps - 1) * (_counted(name, tmp_path, 2)[1] - few[1])
    stated = built(name, tmp_path, {}).settings.flops
    assert stated == pytest.approx(flops, rel=0.002)


def _counted(name: str, directory: Path, steps: int) -> tuple[int, float]:
    """Return the parameters and the FLOPs of an item with so many steps, at full size."""
    case = built(name, directory, {}, {"num_steps": steps} if name == "stable_diffusion" else {})
    with torch.device("meta"):
        model = case.create_model().eval()
        given = [each.to("meta") for each in case.synthetic_batch(1).inputs]
        if name == "whisper_small":
            given += [torch.zeros(1, steps, dtype=torch.long), torch.zeros(1, steps)]
        with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(*given)
    assert isinstance(model, IterativeModel)
    return sum(each.numel() for each in model.parameters()), float(counter.get_total_flops())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_a_run_of_the_reduced_model_is_valid(name: str, data: Mapping[str, Path], tmp_path: Path) -> None:
    root = data["librispeech" if name == "whisper_small" else "coco_captions"].parent
    folder = tmp_path / "cases" / "reduced"
    folder.mkdir(parents=True)
    described = yaml.safe_load((Path(accelmark.__file__).parent / "cases" / name / "case.yaml").read_text("utf-8"))
    described |= {"name": "reduced", "size": "mini", "train": None}
    described["infer"]["parameters"] |= REDUCED[name]
    if name == "stable_diffusion":
        described["infer"]["tolerance"] = 1.0  # of four images from random weights; see above
    (folder / "case.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    (folder / "infer_pytorch.py").write_text(f"from accelmark.cases.{name}.infer_pytorch import Case as Case\n")
    variables = {"ACCELMARK_PLUGINS": str(tmp_path), "ACCELMARK_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    over = [f"--set={key}={value}" for key, value in {**FAST, "num_workers": 1}.items()]
    command = [sys.executable, "-m", "accelmark", "infer", "reduced", "--vendor", "cpu", "--data", str(root), *over]
    command += ["--set=inference_duration_s=2.5", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["cases"]
    assert case["verdict"] == "VALID", case["reasons"]
