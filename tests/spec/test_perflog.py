from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.spec.errors import RunError
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import (
    PERFLOG_PREFIX,
    PerfLogReader,
    PerfLogRecord,
    PerfLogWriter,
    encode_line,
    event_names,
)
from tests.made_run import perflog as line_of

NOISE = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"[PerfLog]", b"[PerfLog] ", b"[PerfLog] {", b'[PerfLog] {"event": 1}', b"\xff\xfe[PerfLog] []"]),
    st.text(max_size=40).map(str.encode),
).map(lambda noise: noise.replace(b"\n", b" "))


def read(path: Path) -> tuple[list[PerfLogRecord], PerfLogReader]:
    log = PerfLogReader(path)
    return list(log), log


@settings(max_examples=150, deadline=None)
@given(noise=st.lists(NOISE, max_size=12), values=st.lists(st.integers(0, 9), max_size=12), torn=st.integers(1, 40))
def test_every_record_is_found_between_other_output(
    tmp_path_factory: pytest.TempPathFactory, noise: list[bytes], values: list[int], torn: int
) -> None:
    lines = [line_of("STEP_END", {"n": n}, 1000.0 + i, 0).encode() for i, n in enumerate(values)]
    mixed: list[bytes] = []
    for i in range(max(len(lines), len(noise))):
        mixed += [noise[i] + b"\n"] if i < len(noise) else []
        mixed += [lines[i]] if i < len(lines) else []
    last = line_of("FINISHED", {}, 9e6, 0).encode()
    path = tmp_path_factory.mktemp("log") / "rank0.out.log"
    path.write_bytes(b"".join(mixed) + last[: max(len(last) - 1 - torn, 0)])
    assert [(record.event, record.value["n"]) for record in read(path)[0]] == [("STEP_END", n) for n in values]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "rank0.out.log"
    path.write_bytes(content)
    assert read(path)[1].malformed <= content.count(b"\n") + 1


def test_malformed_lines_are_counted_and_numbered_but_for_an_incomplete_last_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    metadata = '"metadata": {"time_ms": 1, "mono_ms": 1, "rank": 0}'
    bad = f'[PerfLog] {{"event": "STEP_END", "value": {{"loss": NaN}}, {metadata}}}\n'
    whole = line_of("TRAIN_START", {}, 1.0, 0)
    path.write_text("hello\n" + bad + whole + "[PerfLog] {}\n" + whole[:50])
    records, report = read(path)
    assert (len(records), report.malformed, report.malformed_lines, report.truncated) == (1, 2, (2, 4), True)


def test_two_records_in_one_line_are_both_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    one, two = line_of("TRAIN_START", {}, 1.0, 0), line_of("TRAIN_END", {}, 2.0, 1)
    path.write_text("progress 5% " + one.rstrip("\n") + two)
    assert [record.event for record in read(path)[0]] == ["TRAIN_START", "TRAIN_END"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True, allow_infinity=True) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(st.dictionaries(st.text(), VALUES))
def test_every_line_is_valid_json_whatever_the_values(value: dict[str, Any]) -> None:
    line = encode_line(Event.STEP_END, value, {"rank": 3})
    assert line.startswith(PERFLOG_PREFIX)
    assert "\n" not in line
    record = json.loads(line.removeprefix(PERFLOG_PREFIX), parse_constant=refuse)
    assert record["event"] == "STEP_END"
    assert record["metadata"]["rank"] == 3
    assert set(record["value"]) - {"nonfinite"} == set(value) - {"nonfinite"}


def test_values_that_json_lacks_are_null_and_named() -> None:
    value = {"loss": float("nan"), "losses": [1.0, float("inf")], "epoch": 2}
    record = json.loads(encode_line(Event.STEP_END, value, {}).removeprefix(PERFLOG_PREFIX))
    assert record["value"] == {"loss": None, "losses": [1.0, None], "epoch": 2, "nonfinite": ["loss", "losses"]}


def test_names_of_events_are_read_without_their_values() -> None:
    lines = [encode_line(event, {"event": "OTHER"}, {}) for event in (Event.TRAIN_START, Event.STEP_END)]
    assert event_names("\n".join(["noise", *lines, '{"event": "INIT_END"}']).encode()) == {"TRAIN_START", "STEP_END"}


def test_a_line_has_source_time_and_rank(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    PerfLogWriter(7, descriptor).event(Event.WARNING, {"message": "x"})
    os.close(descriptor)
    metadata = json.loads((tmp_path / "log").read_text().removeprefix(PERFLOG_PREFIX))["metadata"]
    assert metadata["file"] == "test_perflog.py"
    assert metadata["rank"] == 7
    assert set(metadata) == {"file", "lineno", "time_ms", "mono_ms", "rank"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(RunError, match="rank 0 cannot write its log: No space left on device"):
            PerfLogWriter(0, descriptor).event(Event.STEP_END)
    finally:
        os.close(descriptor)
