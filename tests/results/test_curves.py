from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.curves import histogram, telemetry_series, thin


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(10, 500), st.randoms(use_true_random=False))
def test_thinning_keeps_the_ends_and_the_peaks(count: int, most: int, rng: object) -> None:
    values = np.random.default_rng(rng.randrange(2**32)).normal(size=count)  # type: ignore[attr-defined]
    kept = thin(values, most)
    assert len(kept) <= max(most, 2)
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert (np.diff(kept) > 0).all()
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_a_histogram_holds_every_step() -> None:
    steps = np.concatenate([np.linspace(1, 2, 990), np.full(10, 50.0)]).astype(np.float32)
    bins = histogram(steps)
    assert sum(count for _, count in bins) == 1000
    assert bins[0] == (1.0, 0)
    assert bins[-1][0] == 50.0


def test_telemetry_of_a_load_begins_and_ends_with_it() -> None:
    samples = Samples(header={}, t=array("d", range(100, 160)), host={"cpu": array("d", [0.5] * 60)}, devices={})
    hosts = {"n1": (samples, ((110.0, 112.0),))}
    (of_load,) = telemetry_series(hosts, (120.0, 130.0))
    assert [at for at, _ in of_load.points] == list(range(11))
    (of_training,) = telemetry_series(hosts)
    assert of_training.points[0] == (-10, 0.5)
    assert telemetry_series(hosts, (200.0, 210.0)) == ()


def test_telemetry_of_attempts_lies_on_the_axis_of_raw_training_time() -> None:
    samples = Samples(t=array("d", range(100, 160)), host={"cpu": array("d", [0.5] * 60)})
    (series,) = telemetry_series({"n1": (samples, ((110.0, 112.0), (150.0, 152.0)))})
    assert [at for at, _ in series.points] == [*range(-10, 3), *range(2, 12)], "nothing between the attempts"
    for earlier in ((50.0, 70.0), (9000.0, 9020.0)):  # without samples of it; before a restart of the machine
        (series,) = telemetry_series({"n1": (samples, (earlier, (110.0, 112.0)))})
        assert series.points[0][0] == 10, "the earlier attempt took 20 s"
