"""The search for the best settings: what it tries, in which order, and what a vendor gets from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelmark.plan import tuning
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected
from accelmark.plan.tuning import Budget, settings_of, tuned_plan, with_trial, with_tuned_rounds
from accelmark.spec.plugins.catalog import EngineSpec
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.tuning import Choice, identity, next_trial
from tests.plan.plans import plan_of, with_inference

SHIPPED = InferSettings(batch_size=8, compiler="slow")
CHOICES = (
    Choice(
        values=tuple({"compiler": name, "precision": p} for name in ("slow", "quick") for p in ("fp32", "int8")),
        once=True,
    ),
    Choice(values=({"engine_options.streams": None}, {"engine_options.streams": 2}), engine="quick"),
    Choice(values=tuple({"batch_size": size} for size in (2, 4, 8, 16, 32)), ordered=True),
)


def searched(speed: Any, choices: tuple[Choice, ...] = CHOICES) -> tuple[list[InferSettings], InferSettings]:
    """Search to the end; returns the trials in their order, and the best settings."""
    tried: list[InferSettings] = [SHIPPED]
    scores = {identity(SHIPPED): speed(SHIPPED)}
    while (found := next_trial(SHIPPED, choices, scores)) is not None:
        assert identity(found) not in scores, "no settings are tried twice"
        tried.append(found)
        scores[identity(found)] = speed(found)
    return tried[1:], max(tried, key=lambda settings: scores[identity(settings)])


def test_the_search_finds_the_best_of_each_setting_and_keeps_options_with_their_engine() -> None:
    def speed(settings: InferSettings) -> float:
        value = {"slow": 0.0, "quick": 1.0}[settings.compiler or ""] + (0.5 if settings.precision == "int8" else 0)
        value += 0.3 * bool(settings.engine_options)
        return value + math.log(settings.batch_size) * (1 if settings.batch_size <= 16 else -1)

    tried, best = searched(speed)
    assert (best.compiler, best.precision, best.batch_size) == ("quick", "int8", 16)
    assert best.engine_options == {"streams": 2}
    assert len(tried) == 3 + 1 + 2 + 1, "three others of engine and precision, streams, batch 16 and 32, no streams"
    assert all(not settings.engine_options for settings in tried if settings.compiler == "slow")


def test_a_failed_trial_does_not_end_the_search_and_a_gain_within_noise_is_none() -> None:
    def speed(settings: InferSettings) -> float:
        if settings.precision == "int8":
            return -math.inf
        return math.log(1.005) if settings.compiler == "quick" else 0.0

    tried, best = searched(speed, CHOICES[:1])
    assert [(each.compiler, each.precision) for each in tried] == [
        ("slow", "int8"),
        ("quick", "fp32"),
        ("quick", "int8"),
    ]
    assert best.compiler == "quick", "the best trial, though the search did not go on from it"


@given(st.lists(st.floats(-3, 3), min_size=64, max_size=64), st.integers(0, 30))
def test_an_interrupted_search_continues_as_it_would_have(values: list[float], ended: int) -> None:
    numbers = itertools.count()
    known: dict[str, float] = {}

    def speed(settings: InferSettings) -> float:
        name = identity(settings)
        known[name] = known.get(name, values[next(numbers) % len(values)])
        return known[name]

    tried, _ = searched(speed)
    scores = {identity(settings): speed(settings) for settings in (SHIPPED, *tried[:ended])}
    found = next_trial(SHIPPED, CHOICES, scores)
    assert found == (tried[ended] if ended < len(tried) else None)


ENGINES = {
    "eager": EngineSpec(title="E", module="json", precisions=("fp32", "bf16", "int8"), generates=True),
    "other": EngineSpec(title="O", module="json", precisions=("fp32",), tunes={"engine_options.streams": (None, 2)}),
    "absent": EngineSpec(title="A", module="none", requires=("no-such-package>=1",), precisions=("fp32",)),
}


def planned(plugins: Any, *capabilities: str, **command_line: Any) -> Plan:
    with_inference(plugins)
    run = {"vendor": "acme", "cases": [{"task": "infer", "key": "toy"}]}
    plan = plan_of(run, Detected("acme", "X2", None, 1), command_line=command_line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "engine_specs", lambda _: ENGINES)
        patch.setattr("os.sched_getaffinity", lambda _: range(4))
        return tuned_plan(plan, dict.fromkeys(capabilities, "/proc/cpuinfo"), Budget(600, None))


def tried_values(plan: Plan) -> list[list[tuple[Any, ...]]]:
    assert plan.tuning is not None
    return [[tuple(each.values()) for each in choice.values] for choice in plan.tuning.choices]


def test_installed_engines_precisions_of_the_device_and_settings_that_were_not_given_are_tried(plugins: Any) -> None:
    assert tried_values(planned(plugins)) == [
        [("eager", "fp32"), ("eager", "int8"), ("other", "fp32")],
        [(None,), (2,)],
        [(1,), (2,), (4,), (8,), (16,)],
        [(None,), (2,)],
    ]
    assert ("eager", "bf16") in tried_values(planned(plugins, "amx_bf16"))[0]
    given = planned(plugins, compiler="eager", batch_size=4, threads=4)
    assert tried_values(given) == [[("eager", "fp32"), ("eager", "int8")]]
    latency = planned(plugins, optimize_for="latency")
    assert latency.tuning is not None
    assert (latency.tuning.figure, latency.tuning.better) == ("latency_p50_ms", "lower")
    assert len(latency.tuning.choices) == 2, "engine and precision, threads: a smaller batch answers sooner by itself"


def test_rounds_as_shipped_begin_the_search_and_take_turns_with_tuned_ones_at_its_end(plugins: Any) -> None:
    plan = planned(plugins)
    assert [(job.job.role, job.job.round, job.job.key.repeat) for job in plan.jobs] == [
        ("as shipped", number, 3) for number in (1, 2, 3)
    ]
    assert plan.timeout_s == 600
    better = settings_of(plan.jobs[0]).model_copy(update={"batch_size": 8, "engine_options": {"streams": 2}})
    plan = with_trial(with_trial(plan, settings_of(plan.jobs[0]).model_copy(update={"batch_size": 2})), better)
    assert [job.job.role for job in plan.jobs] == ["as shipped", "trial", "trial", "as shipped", "as shipped"]
    assert [settings_of(job).batch_size for job in plan.jobs[1:3]] == [2, 8]
    plan = with_tuned_rounds(plan, better)
    assert [(job.job.role, job.job.round) for job in plan.jobs[3:]] == [
        ("tuned", 1), ("as shipped", 2), ("tuned", 2), ("as shipped", 3), ("tuned", 3)
    ]  # fmt: skip
    assert len({job.directory for job in plan.jobs}) == len(plan.jobs)
    tuned = plan.jobs[3].job
    assert tuned.provenance["batch_size"].layer == "tuning"
    assert tuned.provenance["batch_size"].replaced == (("cases/toy/case.yaml", 4),)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert tuning.vendor_values(plan.jobs[0].job, tuned) == {"batch_size": 8, "engine_options.streams": 2}
