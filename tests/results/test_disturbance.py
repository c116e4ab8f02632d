"""Work of others that comes while a round runs shows in the time that tasks waited for a core."""

from __future__ import annotations

import json
from pathlib import Path

from accelmark.results.disturbance import is_disturbed, pressure_finding, waited_percent
from accelmark.results.samples import Samples, read_samples

SPANS = ((0.0, 20.0), (30.0, 50.0))
"""Training, with an evaluation in between."""


def sampled(path: Path, *percent: float | None) -> Samples:
    """One sample of pressure every five seconds."""
    lines = [{"t": 5.0 * number, "host": {"psi_cpu": value}} for number, value in enumerate(percent)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"header": {"interval_s": 5.0}}, *lines]))
    return read_samples(path)


def test_a_round_in_which_tasks_waited_for_cores_is_marked_and_says_how_long(tmp_path: Path) -> None:
    samples = sampled(tmp_path / "t", *[30.0] * 11)
    assert waited_percent(samples, SPANS) == 30
    assert is_disturbed((), {"n1": (samples, SPANS)})
    (found,) = pressure_finding("n1", samples, SPANS)
    assert (found.severity, found.rule) == ("warning", "cpu-pressure")
    assert found.actual.startswith("n1: 30 %: other work ran there")


def test_a_quiet_round_is_not_and_what_happens_between_its_spans_does_not_count(tmp_path: Path) -> None:
    samples = sampled(tmp_path / "t", 2.0, 2.0, 2.0, 2.0, 2.0, 90.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert not is_disturbed((), {"n1": (samples, SPANS)})
    assert list(pressure_finding("n1", samples, ((0.0, 20.0), (31.0, 50.0)))) == []


def test_where_the_kernel_tells_no_pressure_nothing_is_claimed(tmp_path: Path) -> None:
    samples = sampled(tmp_path / "t", *[None] * 11)
    assert waited_percent(samples, SPANS) is None
    assert not is_disturbed((), {"n1": (samples, SPANS)})
