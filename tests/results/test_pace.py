"""Steps outside of replayed pairs of checkpoints that are faster than those within them are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accelmark.results.read.reevaluation import SavedCheckpoints
from accelmark.results.rounds.timeline import Timeline, read_timeline
from accelmark.results.rounds.training import pace_findings
from accelmark.results.schema import Finding
from accelmark.spec.log.events import CheckpointHashes
from tests.made_run import Made, make_run


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    """100 steps in windows of 10, of 10 ms each."""
    made = Made()
    log = make_run(tmp_path / "run", made) / made.key.slug / "round1" / "node00_noderank0" / "rank0.out.log"
    found = read_timeline([(0, log)])
    assert found is not None
    return found


def checkpoints(*pairs: tuple[int | None, int]) -> SavedCheckpoints:
    steps = {f"step{step}": step for pair in pairs for step in pair if step is not None}
    named = tuple((None if start is None else f"step{start}", f"step{end}") for start, end in pairs)
    hashes = CheckpointHashes(
        sha256=dict.fromkeys(steps, "00"), pairs=named, claimed=None, final=None, num_bytes=0, duration_s=0, reason=None
    )
    return SavedCheckpoints(steps, hashes, {})


def paced(timeline: Timeline, step_ms: Callable[[int], float]) -> Timeline:
    """Set the time of a step by the number of steps done at the end of its window."""
    windows = timeline.windows
    wall_s = np.array(
        [length * step_ms(int(step)) / 1e3 for step, length in zip(windows["steps"], windows["lengths"], strict=True)]
    )
    return replace(timeline, windows={**windows, "wall_s": wall_s})


PAIRS = checkpoints((None, 10), (10, 40), (60, 80))


def faster(timeline: Timeline, *, is_cpu: bool = True) -> list[Finding]:
    return [found for found in pace_findings(timeline, PAIRS, is_cpu=is_cpu) if found.rule == "replayed-pace"]


def test_steps_outside_of_pairs_are_counted_and_a_steady_pace_is_no_finding(timeline: Timeline) -> None:
    (found,) = pace_findings(timeline, PAIRS, is_cpu=True)
    assert (found.severity, found.rule) == ("warning", "replay")
    assert "40\u202f% of the steps" in str(found.actual)


@pytest.mark.parametrize("num_attempts", [1, 2])
def test_faster_steps_between_pairs_are_named(timeline: Timeline, num_attempts: int) -> None:
    timeline = replace(timeline, num_attempts=num_attempts)
    (found,) = faster(paced(timeline, lambda step: 10 if step <= 40 or 60 < step <= 80 else 7))
    assert (found.severity, found.rule) == ("open", "replayed-pace")
    assert "took 30\u202f% less time" in str(found.actual)


def test_work_left_out_on_a_busy_machine_shows_in_the_cpu_time(timeline: Timeline) -> None:
    busy = paced(timeline, lambda step: 10 if step <= 50 or 60 < step <= 80 else 40)
    cpu_s = paced(timeline, lambda step: 10 if step <= 40 or 60 < step <= 80 else 5).windows["wall_s"]
    left_out = replace(busy, windows={**busy.windows, "cpu_s": cpu_s})
    assert not faster(busy)
    assert "took 50\u202f% less time" in str(faster(left_out)[0].actual)
    assert not faster(left_out, is_cpu=False), "the CPU time of a rank says little where a device computes"


def test_an_interruption_within_pairs_or_a_slow_pair_is_no_finding(timeline: Timeline) -> None:
    assert not faster(paced(timeline, lambda step: 90 if step in (30, 70) else 10))
    assert not faster(paced(timeline, lambda step: 30 if step <= 40 else 10))


def test_where_all_steps_are_in_pairs_there_is_nothing_to_compare(timeline: Timeline) -> None:
    uneven = paced(timeline, lambda step: float(step))
    assert not list(pace_findings(uneven, checkpoints((None, 10), (10, 60), (60, 100)), is_cpu=True))
    assert not list(pace_findings(uneven, SavedCheckpoints({}, None, {}), is_cpu=True))
