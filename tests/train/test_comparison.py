"""Jobs that take the first steps from given weights and batches: equal ones agree, and each defect is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.run.equivalence import compare_steps
from accelmark.spec.equivalence import INITIAL_FILE, TOLERANCES, Difference, Errors, batches_file
from accelmark.spec.job import JobSpec
from accelmark.spec.tensor_file import read_tensors, write_tensors
from tests.train.conftest import RunHere
from tests.train.jobs import comparing, make_job, run

STEPS = 4
SETTINGS: dict[str, Any] = {
    "batch_size": 8, "end.max_steps": STEPS, "gradient_accumulation_steps": 2, "model.dropout": 0.2,
    "optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.1,
    "optimizer.decay_norm_and_bias": False, "schedule.name": "cosine",
}  # fmt: skip


def compare_job(directory: Path, inputs: Path, changed: Mapping[str, Any] = {}, nproc: int = 1) -> JobSpec:
    reference = directory.with_name("reference")
    settings = {**SETTINGS, "gradient_accumulation_steps": 2 // nproc, **changed}
    job = make_job(directory, settings, nproc=nproc)
    return comparing(job, directory, reference, inputs=inputs, num_steps=STEPS, num_batches=2)


@pytest.fixture
def reference(tmp_path: Path, run_here: RunHere) -> Path:
    """The directory of a reference job, which wrote ``inputs`` in it."""
    done = run_here(compare_job(tmp_path / "reference", tmp_path / "reference/inputs"))
    assert (done.exit_code, done.finished().end_reason) == (0, "max_steps"), done.log()
    return tmp_path / "reference"


def compared(reference: Path, other: Path) -> tuple[Errors, Difference | None]:
    return compare_steps(reference / "results", other / "results", reference / "inputs", STEPS, TOLERANCES["fp32"])


def found_difference(reference: Path, other: Path) -> Difference:
    _, first = compared(reference, other)
    assert first is not None
    return first


def test_the_same_steps_are_equal_with_dropout_off(reference: Path, tmp_path: Path, run_here: RunHere) -> None:
    run_here(compare_job(tmp_path / "other", reference / "inputs", changed={"seed": 7}))
    errors, first = compared(reference, tmp_path / "other")
    assert first is None
    assert errors == Errors(outputs=0.0, loss=0.0, weights=0.0), "another seed changes nothing"


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_two_ranks_are_equivalent_to_one(reference: Path, tmp_path: Path, parallelism: str) -> None:
    job = compare_job(tmp_path / "two", reference / "inputs", changed={"parallelism": parallelism}, nproc=2)
    done = run(job, tmp_path / "two")
    assert done.exit_code == 0, done.log()
    errors, first = compared(reference, tmp_path / "two")
    assert first is None, errors
    assert errors.weights < 1e-3


@pytest.mark.parametrize(
    ("setting", "wrong", "steps"),
    [
        ("optimizer.decay_norm_and_bias", True, {1}),
        ("optimizer.weight_decay", 1.0, {1}),
        ("schedule.warmup_steps", 1, {1, 2}),
    ],
)
def test_a_wrong_setting_is_found_at_its_first_step(
    reference: Path, tmp_path: Path, run_here: RunHere, setting: str, wrong: object, steps: set[int]
) -> None:
    run_here(compare_job(tmp_path / "other", reference / "inputs", changed={setting: wrong}))
    first = found_difference(reference, tmp_path / "other")
    assert first.step in steps, first
    if steps == {1}:
        assert first.what.endswith("norm.weight") == (setting == "optimizer.decay_norm_and_bias"), first


def transpose_weight(inputs: Path) -> None:
    weights = read_tensors(inputs / INITIAL_FILE)
    weights["blocks.0.linear.weight"] = np.ascontiguousarray(weights["blocks.0.linear.weight"].T)
    write_tensors(inputs / INITIAL_FILE, weights)


def swap_batches(inputs: Path) -> None:
    third, fourth = inputs / batches_file(3), inputs / batches_file(4)
    third.rename(inputs / "kept")
    fourth.rename(third)
    (inputs / "kept").rename(fourth)


@pytest.mark.parametrize(("change", "step"), [(transpose_weight, 1), (swap_batches, 3)])
def test_other_inputs_are_found_in_the_outputs_of_their_step(
    reference: Path, tmp_path: Path, run_here: RunHere, change: Callable[[Path], None], step: int
) -> None:
    inputs = shutil.copytree(reference / "inputs", tmp_path / "inputs")
    change(inputs)
    run_here(compare_job(tmp_path / "other", inputs))
    first = found_difference(reference, tmp_path / "other")
    assert (first.step, first.what.startswith("outputs of batch")) == (step, True), first


def test_weights_of_another_model_are_named(reference: Path, tmp_path: Path, run_here: RunHere) -> None:
    inputs = shutil.copytree(reference / "inputs", tmp_path / "inputs")
    weights = read_tensors(inputs / INITIAL_FILE)
    weights["blocks.0.scale"] = weights.pop("blocks.0.norm.weight")
    write_tensors(inputs / INITIAL_FILE, weights)
    message = run_here(compare_job(tmp_path / "other", inputs)).finished().message or ""
    assert "does not match 2 weights: blocks.0.norm.weight has shape None in the reference, (16,) here" in message


def test_values_that_are_not_finite_are_beyond_every_tolerance(
    reference: Path, tmp_path: Path, run_here: RunHere
) -> None:
    run_here(compare_job(tmp_path / "other", reference / "inputs"))
    path = next((tmp_path / "other/results").glob("step-0002-*"))
    values = {name: array.copy() for name, array in read_tensors(path).items()}
    values["weights/head.bias"][0] = np.nan
    write_tensors(path, values)
    first = found_difference(reference, tmp_path / "other")
    assert (first.step, first.what) == (2, "head.bias")


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a/b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.array(1.5), "d": np.zeros((2, 0), np.int64)}
    write_tensors(tmp_path / "ours", arrays)
    library.save_file(arrays, tmp_path / "theirs")
    for loaded in (library.load_file(tmp_path / "ours"), read_tensors(tmp_path / "theirs")):
        assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
