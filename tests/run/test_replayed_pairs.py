"""Which pairs of checkpoints are replayed after a round."""

from __future__ import annotations

import math
from itertools import pairwise

from accelmark.results.read.reevaluation import SavedCheckpoints
from accelmark.run.controller.evaluate import MOST_DRAWN, _replays
from accelmark.spec.log.events import CheckpointHashes

STEPS = {f"step{step}": step for step in (8, *range(64, 705, 64))}
NAMES = list(STEPS)
PAIRS = ((None, NAMES[0]), *pairwise(NAMES))
SAVED = SavedCheckpoints(
    STEPS,
    CheckpointHashes(
        sha256=dict.fromkeys(STEPS, "00"), pairs=PAIRS, claimed="step320", final="step704", num_bytes=1, duration_s=1
    ),
    {},
)


def replayed(draw: str, most: float) -> list[tuple[str | None, str | None]]:
    return [(pair.start, pair.end) for pair in _replays(SAVED, draw, most)]


def test_a_secret_draws_pairs_in_addition_to_the_first_steps_and_those_that_end_in_evaluated_weights() -> None:
    drawn = [replayed(secret, MOST_DRAWN) for secret in ("one", "one", "two")]
    assert drawn[0] == drawn[1] != drawn[2]
    always = [(None, "step8"), ("step256", "step320"), ("step640", "step704")]
    assert [sorted(map(str, pairs[:3])) for pairs in drawn] == [sorted(map(str, always))] * 3
    assert len(drawn[0]) == 3 + MOST_DRAWN // 64


def test_all_pairs_are_replayed_on_request() -> None:
    assert sorted(map(str, replayed("a secret", math.inf))) == sorted(map(str, PAIRS))
