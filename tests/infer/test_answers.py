"""The comparison of answers with the framework's, and of repeated calls with new ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from accelmark.cases.minilm.infer_pytorch import Case as MiniLM
from accelmark.cases.resnet_mini.infer_pytorch import Case as ResNetMini
from accelmark.infer.case import InferBatch, swap_neighbours
from accelmark.infer.measure import REPEAT_CALLS, Answers, repeat_check
from accelmark.results.rounds.inference import answer_reasons
from accelmark.spec.log.inference import RepeatCheck
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


def _checked(call_ms: Callable[[int], float], number: int = 12) -> RepeatCheck:
    """Check an engine that takes ``call_ms(batch)`` for each call."""
    return repeat_check([[call_ms(batch) for _ in range(REPEAT_CALLS)] for batch in range(number)])


class _Caching:
    """An engine that remembers the batches that it computed ``needed`` times."""

    def __init__(self, needed: int = 1, *, first_call: int = 0, slow_ms: float = 10, fast_ms: float = 0.1) -> None:
        self.seen: Counter[int] = Counter()
        self.needed, self.first_call, self.slow_ms, self.fast_ms = needed, first_call, slow_ms, fast_ms

    def __call__(self, batch: int) -> float:
        cached = self.seen[batch] >= self.needed and self.seen.total() >= self.first_call
        self.seen[batch] += 1
        return self.fast_ms if cached else self.slow_ms


def test_an_honest_engine_passes_whatever_its_items_take() -> None:
    check = _checked(lambda batch: 1 + 10.0 * batch)
    assert not check.suspicious
    assert check.speedup == pytest.approx(1)
    assert check.num_batches == 12


@pytest.mark.parametrize("number", [4, 6, 7, 12, 24])
def test_an_honest_engine_on_a_busy_machine_passes(number: int) -> None:
    suspected = 0
    for seed in range(1000):
        chance = random.Random(seed)

        def call_ms(batch: int, chance: random.Random = chance) -> float:
            return 1 + (chance.random() < 0.4) * chance.random() * 10

        suspected += _checked(call_ms, number).suspicious
    assert suspected <= 2


@pytest.mark.parametrize("number", [4, 12])
@pytest.mark.parametrize("needed", [1, 2])
def test_a_cache_that_keeps_what_came_once_or_twice_is_found(number: int, needed: int) -> None:
    check = _checked(_Caching(needed), number)
    assert check.suspicious
    assert check.speedup == pytest.approx(100)
    assert check.chance is not None
    assert check.chance <= 0.002


@pytest.mark.parametrize(
    ("caching", "number"), [(_Caching(first_call=10), 12), (_Caching(slow_ms=0.1, fast_ms=0.04), 4)]
)
def test_a_cache_that_starts_late_or_answers_within_the_crossing_is_found(caching: _Caching, number: int) -> None:
    assert _checked(caching, number).suspicious


@pytest.mark.parametrize("slow", [2, 10])
def test_a_cache_is_found_on_a_busy_machine(slow: int) -> None:
    found = 0
    for seed in range(200):
        chance, caching = random.Random(seed), _Caching(slow_ms=4)
        found += _checked(
            lambda batch, chance=chance, caching=caching: (  # type: ignore[misc]
                (chance.random() < 0.1) * chance.random() * 4 * slow + caching(batch)
            )
        ).suspicious
    assert found >= 0.99 * 200


def test_a_cache_that_misses_a_few_is_found() -> None:
    caching = _Caching()

    def forgetting(batch: int) -> float:
        if batch % 6 == 0:
            caching.seen.clear()
        return caching(batch)

    assert _checked(forgetting, 24).suspicious


def test_one_disturbed_call_is_not_a_cache_and_hides_none() -> None:
    for call_ms, expected in ((lambda batch: 2.0, False), (_Caching(), True)):
        calls = [0]

        def disturbed(batch: int, call_ms: Callable[[int], float] = call_ms, calls: list[int] = calls) -> float:
            calls[0] += 1
            return call_ms(batch) + (50 if calls[0] in {1, 7, 18} else 0)

        assert _checked(disturbed).suspicious is expected


def test_too_few_batches_give_a_reason_and_no_verdict() -> None:
    check = _checked(_Caching(), 3)
    assert check.speedup is None
    assert not check.suspicious
    assert "at least 4 batches" in str(check.reason)
