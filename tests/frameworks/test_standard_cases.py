"""Standard cases in other frameworks: counted at full size, compared with PyTorch and trained at reduced size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from accelmark.spec.plugins.catalog import load_case
from tests.cases.flops import published_flops
from tests.cases.job_of import losses_of
from tests.cases.test_definitions import PARAMETERS
from tests.frameworks.environments import framework_environment, run_accelmark, run_program
from tests.frameworks.rank_jobs import final_state, rank_job, run_job, values

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

FRAMEWORKS = ("jax", "mindspore", "tensorflow")
BERT_FRAMEWORKS = ("mindspore", "paddle", "tensorflow")
CASES = [
    *((case, framework) for case in ("resnet50", "llama2_7b") for framework in FRAMEWORKS),
    *(("bert", framework) for framework in BERT_FRAMEWORKS),
]
COUNTED_AT_FULL_SIZE = [
    *(("resnet50", framework) for framework in FRAMEWORKS), ("llama2_7b", "jax"),
    *(("bert", framework) for framework in BERT_FRAMEWORKS),
    *((case, "paddle") for case in ("gpt3_6_7b", "llama2_7b")),
]  # fmt: skip
"""MindSpore and TensorFlow make the weights when a model is built: 27 GB for 7 billion."""
SMALL = {
    # Large enough for the biased running variance of JAX, whose error is one over the samples of a channel.
    "resnet50": {"image_size": 128, "num_classes": 5, **{f"stage{stage}_blocks": 1 for stage in (1, 2, 3, 4)}},
    "llama2_7b": {
        "num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
        "vocab_size": 300, "seq_length": 32,
    },
    "bert": {
        "num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "vocab_size": 300,
        "seq_length": 32, "max_positions": 40, "max_predictions": 5,
    },
}  # fmt: skip
COMMON = {
    "precision": "fp32", "parallelism": "ddp", "threads": 1, "batch_size": 8, "eval_batch_size": 3,
    "activation_checkpointing": "off", "log_every_steps": 1, "checkpoint.keep": 3,
    "schedule.name": "constant", "schedule.warmup_ratio": 0.0, "schedule.warmup_steps": 0,
}  # fmt: skip
MINIS = [("llama_mini", "mindspore"), *(("resnet_mini", name) for name in ("jax", "mindspore", "paddle", "tensorflow"))]
MINI = {"precision": "fp32", "threads": 1, "batch_size": 16}
COUNTED = {
    "jax": """
import jax
from flax import nnx
def build():
    with layers.building(0, jax.numpy.bfloat16):
        return case.build_model()
model = nnx.eval_shape(build)
parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.split(model, nnx.Param, ...)[1]))
""",
    "mindspore": """
with layers.building(0):
    parameters = sum(each.size for each in case.build_model().trainable_params())
""",
    "paddle": """
import paddle
with paddle.LazyGuard(), layers.building(channels_last=False):
    parameters = sum(each.size for each in case.build_model().parameters() if not each.stop_gradient)
""",
    "tensorflow": """
import tensorflow
with layers.building(0, tensorflow.bfloat16):
    parameters = sum(int(each.shape.num_elements()) for each in case.build_model().trainable_variables)
""",
}
"""Framework -> a program that counts the parameters of ``case``."""
LAYERS = """
import importlib, sys
import numpy as np
from accelmark.train.case import ArrayCase, case_class, use_layers

layers = importlib.import_module(f"accelmark.frameworks.{sys.argv[1]}.layers")
use_layers(layers)
"""
CASE = """
from accelmark.spec.plugins.catalog import find, load_case
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings

framework, name = sys.argv[1:]
settings = TrainSettings.model_validate({**load_case(name).train.settings, "loader": {"synthetic": True}})
case = case_class(find("cases", name).ref("train"), framework, ArrayCase)(settings, {}, RankPlace())
"""
BUILT = {
    "mindspore": """
import mindspore
tensor, training = mindspore.Tensor, lambda model, on: model.set_train(on)
building = lambda: layers.building(0)
""",
    "paddle": """
import paddle
tensor, training = paddle.to_tensor, lambda model, on: model.train() if on else model.eval()
building = lambda: layers.building(channels_last=False)
""",
    "tensorflow": """
import tensorflow
tensor, training = tensorflow.constant, lambda model, on: layers.set_training(model, training=on)
building = lambda: layers.building(0, tensorflow.float32)
""",
}
"""Framework -> what a program with :data:`LAYERS` needs to build a model."""
PADDED = """
from accelmark.cases.bert.arrays import MaskedLm

sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_layers": 2, "vocab_size": 50}
with building():
    model = MaskedLm({**sizes, "max_positions": 12})
training(model, False)
tokens, positions = np.random.default_rng(0).integers(0, 50, (2, 12)), np.array([[1, 3], [2, 0]])
segments = np.tile(np.arange(12) > 4, (2, 1)).astype(np.int64)
run = lambda *arrays: np.asarray(model(*map(tensor, arrays)))
together = run(tokens, positions, segments, np.array([7, 9]))
alone = [run(tokens[row : row + 1, :size], positions[row : row + 1], segments[row : row + 1, :size])
         for row, size in enumerate((7, 9))]
plain = run(tokens, positions)
print(abs(together - np.concatenate(alone)).max(), abs(together - plain).max())
"""
DROPPED = {
    "mindspore": """
with building():
    first, second = layers.Dropout(0.1), layers.Dropout(0.1)
ones = mindspore.Tensor(np.ones((1000, 1000), np.float32))
def drawn(seed):
    mindspore.ops.assign(first.seed, mindspore.Tensor(np.array(seed, np.int32)))
    return [layer.set_train()(ones).asnumpy() for layer in (first, second)]
""",
    "tensorflow": """
with building():
    first, second = layers.Dropout(0.1), layers.Dropout(0.1)
def drawn(seed):
    with layers.drawing(tensorflow.constant(seed, tensorflow.int32)):
        return [layer(tensorflow.ones((1000, 1000))).numpy() for layer in (first, second)]
""",
}
DROPPED_END = """
masks = [*drawn((5, 9)), *drawn((6, 9)), *drawn((5, 10))]
assert all(np.array_equal(mask, again) for mask, again in zip(masks, drawn((5, 9))))
print(*(float((mask == 0).mean()) for mask in masks), max(float(mask.max()) for mask in masks))
print(np.abs(np.corrcoef([mask.ravel() for mask in masks]) - np.eye(len(masks))).max())
print(max(abs(np.corrcoef(masks[0][:, :-step].ravel(), masks[0][:, step:].ravel())[0, 1]) for step in range(1, 9)))
"""


def layers_program(framework: str, program: str) -> list[str]:
    """Run a program with the layers of a framework, and return what it printed."""
    return run_program(framework, LAYERS + BUILT[framework] + program, framework)


@pytest.mark.parametrize("framework", BERT_FRAMEWORKS)
def test_berts_padding_changes_no_prediction_and_its_segments_do(framework: str) -> None:
    padded, plain = map(float, layers_program(framework, PADDED)[-1].split())
    assert padded < 1e-5 < plain


@pytest.mark.parametrize("framework", DROPPED)
def test_dropout_draws_by_seed_and_layer_and_in_the_right_share(framework: str) -> None:
    printed = layers_program(framework, DROPPED[framework] + DROPPED_END)
    *shares, largest = map(float, printed[-3].split())
    assert shares == pytest.approx([0.1] * 6, abs=0.0015), "five standard deviations of a million values"
    assert largest == pytest.approx(1 / 0.9)
    assert float(printed[-2]) < 0.005, "masks of layers and seeds are independent"
    assert float(printed[-1]) < 0.005, "neighbours are independent"


@pytest.mark.parametrize(("case", "framework"), COUNTED_AT_FULL_SIZE)
def test_a_case_has_the_published_parameters_and_operations_at_full_size(case: str, framework: str) -> None:
    program = LAYERS + CASE + COUNTED[framework] + "\nprint(parameters, case.flops_per_sample())"
    parameters, flops = run_program(framework, program, framework, case, timeout_s=600)[-1].split()
    expected, source = PARAMETERS[case]
    assert int(parameters) == expected, source
    train = load_case(case).train
    assert train is not None
    assert float(flops) == published_flops(case, train.settings["model"])


def check(case: str, framework: str, steps: int, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Compare the first steps on synthetic data, on one rank and on two, with PyTorch's."""
    cache = framework_environment(framework).parent / "cache"
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ("check", "case", case, "--frameworks", framework, "--vendor", "cpu", "--synthetic", "--json")
    return run_accelmark(*command, "--steps", str(steps), *options, timeout_s=800, ACCELMARK_CACHE=cache)


@pytest.mark.parametrize(("case", "framework"), [*CASES, *MINIS])
def test_one_rank_and_two_compute_what_pytorch_computes(case: str, framework: str) -> None:
    """Also batch normalization, of which each rank has the statistics of its own batch, as in PyTorch."""
    if case in SMALL:
        done = check(case, framework, 2, {**{f"model.{name}": value for name, value in SMALL[case].items()}, **COMMON})
    else:
        done = check(case, framework, 3, MINI)
    assert done.returncode == 0, done.stdout + done.stderr
    (compared,) = json.loads(done.stdout)
    assert [(job["framework"], job["num_ranks"]) for job in compared["jobs"]] == [(framework, 1), (framework, 2)]


def test_a_precision_that_paddle_does_not_compute_in_is_not_compared() -> None:
    done = check("resnet_mini", "paddle", 3, {**MINI, "precision": "bf16"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no job computed in bf16" in done.stdout


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resnet50_trains_on_a_folder_of_images_with_a_rate_for_its_batch(framework: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for label in range(5):
            folder = tmp_path / "imagenet" / split / f"n{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (140, 150, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.JPEG")
    over = {
        **COMMON, **{f"model.{name}": value for name, value in SMALL["resnet50"].items()}, "batch_size": 4,
        "end.max_epochs": 1, "evaluate.every_epochs": 1, "checkpoint.every_steps": 5, "loader.num_workers": 2,
    }  # fmt: skip
    job = rank_job(framework, tmp_path / "job", "resnet50", {"imagenet": tmp_path / "imagenet"}, over)
    events = run_job(job)
    (finished,) = values(events, "FINISHED")
    assert (finished["state"], finished["global_steps"]) == ("completed", 5), finished["message"]
    assert finished["final_metrics"].keys() == {"top1", "top5", "eval_loss"}
    assert finished["final_metrics"]["top5"] == 1.0, "of five classes"
    assert np.isfinite(losses_of(events)).all()
    assert values(events, "STEP_END")[0]["learning_rate"] == pytest.approx(0.1 * 4 / 256)
    assert final_state(job, 5)


def test_llama2_trains_on_token_shards_and_recomputes_its_blocks_in_jax(tmp_path: Path) -> None:
    for split, count in (("train", 4000), ("val", 400)):
        (tmp_path / "tokens" / split).mkdir(parents=True)
        tokens = np.random.default_rng(count).integers(0, 100, count, dtype=np.uint16)
        np.save(tmp_path / "tokens" / split / "tokens.npy", tokens)
    data = {"llama_tokens": tmp_path / "tokens"}
    over = {
        **COMMON, **{f"model.{name}": value for name, value in SMALL["llama2_7b"].items()},
        "end.max_steps": 6, "optimizer.lr": 0.003, "loader.num_workers": 2,
    }  # fmt: skip
    found = losses_of(run_job(rank_job("jax", tmp_path / "whole", "llama2_7b", data, over)))
    assert found[-1] < found[0]
    recomputed = {**over, "activation_checkpointing": "full", "end.max_steps": 2}
    others = run_job(rank_job("jax", tmp_path / "recomputed", "llama2_7b", data, recomputed))
    np.testing.assert_allclose(losses_of(others), found[:2], rtol=1e-5)


BERT_STEPS = {
    **COMMON, **{f"model.{name}": value for name, value in SMALL["bert"].items()}, "end.max_samples": 48,
    "checkpoint.every_steps": 3, "evaluate.every_steps": 3, "optimizer.lr": 0.01, "loader.num_workers": 2,
}  # fmt: skip


@pytest.mark.parametrize("framework", BERT_FRAMEWORKS)
def test_bert_starts_from_the_checkpoint_and_its_dropout_is_resumed_and_replayed(
    framework: str, tmp_path: Path
) -> None:
    """From random weights of a small BERT of transformers, on random tokens."""
    from transformers import BertConfig, BertForMaskedLM

    sizes, place = SMALL["bert"], tmp_path / "tokens"
    config = BertConfig(
        vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"], num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"], intermediate_size=sizes["intermediate_size"],
        max_position_embeddings=sizes["max_positions"],
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(place / "initial")
    for split, count in (("train", 2000), ("val", 400)):
        (place / split).mkdir()
        tokens = np.random.default_rng(count).integers(104, 120, count, dtype=np.uint16)
        np.save(place / split / "tokens.npy", tokens)
    data = {"bert_tokens": place}
    whole = rank_job(framework, tmp_path / "whole", "bert", data, BERT_STEPS)
    events = run_job(whole)
    (finished,) = values(events, "FINISHED")
    assert (finished["state"], finished["global_steps"]) == ("completed", 6), finished["message"]
    assert "JitCompileWithTry" not in (whole.parent / "rank0.out.log").read_text(), "MindSpore captures the step"
    expected = losses_of(events)
    assert expected[-1] < expected[0]
    stored = load_file(place / "initial" / "model.safetensors")
    start = rank_job(framework, tmp_path / "start", "bert", data, {**BERT_STEPS, "optimizer.lr": 0.0})
    run_job(start)
    words = stored["bert.embeddings.word_embeddings.weight"]
    assert any(np.array_equal(array, words) for array in final_state(start, 6).values())
    run_job(rank_job(framework, tmp_path / "part", "bert", data, {**BERT_STEPS, "end.max_samples": 24}))
    again = rank_job(framework, tmp_path / "part", "bert", data, BERT_STEPS, resume=True)
    assert losses_of(run_job(again)) == expected[3:], "each step draws the same numbers"
    ours, theirs = final_state(again, 6), final_state(whole, 6)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    other_seed = rank_job(framework, tmp_path / "seed", "bert", data, {**BERT_STEPS, "seed": 7})
    assert losses_of(run_job(other_seed)) != expected
