from __future__ import annotations

import math

import pytest

from accelmark.results.rounds.inference import invalid_reasons, mfu, percentile, phase_figures
from accelmark.results.schema import Figure
from accelmark.spec.job import InferJob
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, RepeatCheck
from accelmark.spec.settings.inference import InferSettings, Reference


def _window(
    items: tuple[int, ...], latency_ms: tuple[float, ...], wall_ms: float, other_ms: float = 0
) -> ForwardWindow:
    return ForwardWindow(
        phase="inference", pass_number=1, items=items, latency_ms=latency_ms,
        not_inference_ms=(other_ms,) + (0.0,) * (len(items) - 1), wall_ms=wall_ms, nonfinite_batches=0,
    )  # fmt: skip


def test_core_is_computation_and_whole_is_everything_but_compilation() -> None:
    windows = [_window((8, 8), (10, 30), 100), _window((8, 4), (20, 20), 700, other_ms=400)]
    figures = phase_figures(windows, 8, "")
    assert figures.latency_ms["p50"].value == 20, "of full batches"
    assert figures.core.value == pytest.approx(28 / 0.080)
    assert figures.whole.value == pytest.approx(28 / 0.400)


def test_time_declared_as_not_inference_is_reported_as_a_share() -> None:
    figures = phase_figures([_window((8, 8), (10, 30), 100, other_ms=10), _window((8,), (0,), 50)], 8, "")
    assert figures.declared.value == pytest.approx(10 / 50)


def test_an_engine_that_declares_all_of_its_time_has_no_rate() -> None:
    figures = phase_figures([_window((8,), (0,), 20, other_ms=10)], 8, "")
    assert figures.core.value is None
    assert figures.declared.value == 1


def test_a_percentile_that_too_few_batches_were_measured_for_is_null() -> None:
    assert percentile([1.0] * 999, 0.999).value is None
    assert percentile([float(index) for index in range(1, 1001)], 0.999).value == 999
    assert percentile([float(index) for index in range(1, 101)], 0.99).value == 99


def test_mfu_needs_flops_and_a_peak() -> None:
    speed = Figure(value=1000.0)
    assert mfu(speed, 4.12e9, 312).value == pytest.approx(1000 * 4.12e9 / 312e12)
    assert mfu(speed, None, 312).value is None
    assert "peak" in str(mfu(speed, 1.0, None).reason)


def _reasons(**changed: object) -> tuple[str, ...]:
    infer = InferJob(
        unit="image", metric="top1", tolerance=0.005, reference=Reference(value=0.9, within=0.01, source="a paper"),
        settings=InferSettings(batch_size=8), parameters={},
    )  # fmt: skip
    given: dict[str, object] = {
        "validation": 0.9, "inference": 0.899, "is_partial": False, "nonfinite_batches": 0, "repeat_check": None,
    }  # fmt: skip
    return invalid_reasons(infer, **(given | changed))  # type: ignore[arg-type]


def test_the_metrics_of_the_same_inputs_are_compared() -> None:
    same = {"num_items": 0, "median_error": None, "worst_error": None, "top1_agreement": None}
    answers = AnswerCheck(**same, framework_metrics={"top1": 0.899}, engine_metrics={"top1": 0.880})
    (reason,) = _reasons(answers=answers)
    assert reason.startswith("top1 is 0.8800 in the engine on the same inputs and 0.8990 in the framework")
    assert _reasons() == _reasons(validation=None) == ()
    right = answers.model_copy(update={"engine_metrics": {"top1": 0.899}})
    assert _reasons(answers=right) == ()
    (reason,) = _reasons(answers=right, inference=0.88)
    assert reason.startswith("top1 is 0.8800 in the engine on all inputs")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"inference": 0.89}, "a difference of more than 0.005"),
        ({"inference": math.nan}, "is not finite"),
        ({"nonfinite_batches": 2}, "2 batches have NaN"),
        ({"validation": 0.8, "inference": 0.8}, "(a paper)"),
        (
            {"repeat_check": RepeatCheck(fresh_ms=2, same_ms=1, speedup=2, limit=1.1, suspicious=True, num_batches=8)},
            "cached",
        ),
    ],
)
def test_each_reason_makes_a_run_invalid(changed: dict[str, object], words: str) -> None:
    assert any(words in reason for reason in _reasons(**changed))
