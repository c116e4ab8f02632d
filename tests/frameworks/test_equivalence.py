"""``accelmark check case CASE --frameworks ...``: other frameworks compute what PyTorch computes."""

from __future__ import annotations

import json

import pytest

from tests.frameworks.environments import framework_environment, run_accelmark

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

STEPS = ("--synthetic", "--steps", "3", "--set", "threads=1", "--set", "batch_size=16", "--vendor", "cpu", "--json")


@pytest.mark.parametrize(
    ("case", "framework"),
    [
        *(("resnet_mini", framework) for framework in ("jax", "mindspore", "paddle", "tensorflow")),
        ("llama_mini", "mindspore"),
    ],
)
def test_one_rank_and_two_compute_what_pytorch_computes(case: str, framework: str) -> None:
    """Also batch normalization, of which each rank has the statistics of its own batch, as in PyTorch."""
    cache = framework_environment(framework).parent / "cache"
    given = ("check", "case", case, "--frameworks", framework, "--set", "precision=fp32", *STEPS)
    done = run_accelmark(*given, timeout_s=800, ACCELMARK_CACHE=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)
    assert [(job["framework"], job["num_ranks"]) for job in check["jobs"]] == [(framework, 1), (framework, 2)]


def test_a_precision_that_paddle_does_not_compute_in_is_not_compared() -> None:
    cache = framework_environment("paddle").parent / "cache"
    given = ("check", "case", "resnet_mini", "--frameworks", "paddle", "--set", "precision=bf16", *STEPS)
    done = run_accelmark(*given, timeout_s=800, ACCELMARK_CACHE=cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no job computed in bf16" in done.stdout
