import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelmark.spec.errors import RunError
from accelmark.spec.events import PERFLOG_PREFIX, Event
from accelmark.train.loop.perflog import PerfLog, perflog_line

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True, allow_infinity=True) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(st.dictionaries(st.text(), VALUES))
def test_every_line_is_valid_json_whatever_the_values(value: dict[str, Any]) -> None:
    line = perflog_line(Event.STEP_END, value, {"rank": 3})
    assert line.startswith(PERFLOG_PREFIX)
    assert "\n" not in line
    record = json.loads(line.removeprefix(PERFLOG_PREFIX), parse_constant=refuse)
    assert record["event"] == "STEP_END"
    assert record["metadata"]["rank"] == 3
    assert set(record["value"]) - {"nonfinite"} == set(value) - {"nonfinite"}


def test_values_that_json_lacks_are_null_and_named() -> None:
    value = {"loss": float("nan"), "losses": [1.0, float("inf")], "metrics": {"a": float("-inf")}, "epoch": 2}
    record = json.loads(perflog_line(Event.STEP_END, value, {}).removeprefix(PERFLOG_PREFIX))
    assert record["value"] == {
        "loss": None, "losses": [1.0, None], "metrics": {"a": None}, "epoch": 2,
        "nonfinite": ["loss", "losses", "metrics"],
    }  # fmt: skip


def test_a_line_tells_where_when_and_who(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    PerfLog(7, descriptor).event(Event.WARNING, {"message": "x"})
    os.close(descriptor)
    metadata = json.loads((tmp_path / "log").read_text().removeprefix(PERFLOG_PREFIX))["metadata"]
    assert metadata["file"] == "test_perflog.py"
    assert metadata["rank"] == 7
    assert set(metadata) == {"file", "lineno", "time_ms", "mono_ms", "rank"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_and_not_passed_over() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(RunError, match="rank 0 cannot write its log: No space left on device"):
            PerfLog(0, descriptor).event(Event.STEP_END)
    finally:
        os.close(descriptor)
