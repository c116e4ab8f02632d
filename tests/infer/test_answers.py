from __future__ import annotations

import pytest
import torch

from accelmark.cases.minilm.infer_pytorch import Case as MiniLM
from accelmark.cases.resnet_mini.infer_pytorch import Case as ResNetMini
from accelmark.infer.case import InferBatch, swap_neighbours
from accelmark.infer.measure import Answers
from accelmark.results.rounds.inference import answer_reasons
from accelmark.spec.settings.inference import InferSettings
from accelmark.tasks.metrics import IGNORED

pytestmark = pytest.mark.adversary


def _logits(items: int = 400) -> torch.Tensor:
    return torch.randn(items, 10, generator=torch.Generator().manual_seed(1)) * 4


def _reasons(found: torch.Tensor, precision: str, expected: torch.Tensor | None = None) -> str:
    answers = Answers()
    answers.add([found], [_logits() if expected is None else expected])
    return "; ".join(answer_reasons(answers.result(), precision))  # type: ignore[arg-type]


def test_rounding_of_a_precision_passes_in_it_and_in_none_that_is_wider() -> None:
    rounded = {
        "fp32": _logits() * (1 + 1e-6),
        "fp16": (_logits().half() * (1 + 1e-3)).float(),
        "bf16": (_logits().bfloat16() * (1 + 1e-2)).float(),
        "int8": (_logits() / 0.5).round() * 0.5,
    }
    order = list(rounded)
    for place, (name, found) in enumerate(rounded.items()):
        assert _reasons(found, name) == ""
        for wider in order[:place]:
            assert "median error" in _reasons(found, wider), (name, wider)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_one_answer_of_zeros_or_nan_is_found(precision: str) -> None:
    for wrong in (0.0, float("nan")):
        found = _logits()
        found[17] = wrong
        assert "largest error" in _reasons(found, precision)


def test_labels_instead_of_logits_are_found() -> None:
    assert "median error" in _reasons(torch.nn.functional.one_hot(_logits().argmax(1), 10).float() * 9, "int8")


def test_answers_that_do_not_follow_a_change_are_looked_up() -> None:
    before = _logits()
    after = before + 0.01 * torch.randn(before.shape, generator=torch.Generator().manual_seed(2))
    table, honest = Answers(), Answers()
    table.add([before.bfloat16().float()], [after], [before])
    honest.add([after.bfloat16().float()], [after], [before])
    assert "may be looked up" in "; ".join(answer_reasons(table.result(), "bf16"))
    assert answer_reasons(honest.result(), "bf16") == []


def test_integer_outputs_have_to_be_equal() -> None:
    found = torch.arange(12).reshape(4, 3)
    assert _reasons(found, "fp32", found.clone()) == ""
    changed = found.clone()
    changed[2, 1] += 1
    assert "largest error" in _reasons(changed, "fp32", found)


def test_of_dependent_steps_the_share_of_the_same_choices_counts() -> None:
    wanted = torch.arange(400).reshape(4, 100)
    wanted[:, 60:] = IGNORED
    found = wanted.clone()
    found[2, 7] += 1
    answers = Answers(iterative=True)
    answers.add([found, _logits(4)], [wanted, _logits(4)])
    result = answers.result()
    assert result.top1_agreement == 1 - 1 / 240, "steps after an answer's end are not counted"
    assert answer_reasons(result, "bf16") == []
    assert "have the framework's largest value in 99.5" in "; ".join(answer_reasons(result, "fp32"))


def test_swapped_neighbours_keep_the_tokens_and_what_may_not_move() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.arange(60).reshape(4, 15)
    movable = torch.ones(4, 15, dtype=torch.bool)
    movable[:, 0] = movable[:, 10:] = False
    movable[3] = False
    swapped = swap_neighbours(tokens, movable, generator)
    assert torch.equal(swapped.sort(1).values, tokens)
    changed = swapped != tokens
    assert changed.sum(1).tolist() == [2, 2, 2, 0]
    assert not (changed & ~movable).any()


def test_a_token_case_changes_its_inputs() -> None:
    case = MiniLM(InferSettings(batch_size=8), {"seq_length": 16}, {})
    batch = InferBatch(case.synthetic_batch(8).inputs, None)
    before = batch.inputs[0].clone()
    tokens, mask = case.perturbed(batch, torch.Generator().manual_seed(4))
    assert (tokens != before).any(1).all()
    assert torch.equal(batch.inputs[0], before)
    assert torch.equal(mask, batch.inputs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_noise_is_new_and_has_a_hundredth_of_the_inputs_deviation(dtype: torch.dtype, offset: float) -> None:
    case = ResNetMini(InferSettings(batch_size=64), {}, {})
    images = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 20 + offset
    batch, generator = InferBatch((images.to(dtype),), None), torch.Generator().manual_seed(4)
    once, again = (case.perturbed(batch, generator)[0] for _ in range(2))
    for noise in (once.float() - batch.inputs[0].float(), again.float() - once.float()):
        assert once.dtype == dtype
        assert abs(noise.mean()) < 0.01
        assert (noise != 0).float().mean() > 0.8
    assert (once.float() - batch.inputs[0].float()).std() == pytest.approx(0.2, rel=0.03)
