import json
from pathlib import Path

from accelmark.frameworks.pytorch.elastic import exit_code_of, judge
from accelmark.spec.perflog import encode_line
from accelmark.train.exits import LastWords, rank_exit, read_last_words

COMPLETED = LastWords({"state": "completed", "message": None}, ())
FAILED = LastWords({"state": "failed", "message": "the loss was not finite"}, ())
CANCELLED = LastWords({"state": "cancelled", "message": "ended by SIGTERM after step 4"}, ())
SILENT = LastWords(None, ("last line",))


def states(codes: dict[int, int | None], words: dict[int, LastWords], stopped_by: str | None = None) -> list[str]:
    return [item.state for item in judge(codes, words, first_rank=0, stopped_by=stopped_by, trouble=None)]


def test_a_rank_that_went_silently_is_no_success() -> None:
    assert rank_exit(0, 0, 0, SILENT).state == "failed"
    assert rank_exit(0, 0, None, SILENT).state == "lost"
    assert rank_exit(0, 0, 1, COMPLETED).state == "failed"
    assert rank_exit(3, 1, -11, SILENT).signal == "SIGSEGV"


def test_those_that_a_dead_rank_takes_along_are_not_blamed() -> None:
    assert states({0: 1, 1: -9}, {0: FAILED, 1: SILENT}) == ["cancelled", "signaled"]
    assert states({0: 130, 1: 1}, {0: CANCELLED, 1: FAILED}) == ["cancelled", "failed"]
    assert states({0: -15, 1: 1}, {0: SILENT, 1: FAILED}) == ["cancelled", "failed"]


def test_a_stopped_launcher_cancels_its_ranks() -> None:
    assert states({0: None, 1: None}, {0: CANCELLED, 1: SILENT}, "SIGTERM") == ["cancelled", "cancelled"]


def test_the_launchers_exit_code_follows_its_ranks() -> None:
    good, bad, ended = rank_exit(0, 0, 0, COMPLETED), rank_exit(1, 1, 1, FAILED), rank_exit(2, 2, 130, CANCELLED)
    assert exit_code_of([good]) == 0
    assert exit_code_of([good, bad, ended]) == 1
    assert exit_code_of([good, ended]) == 130


def test_only_the_last_event_counts_as_the_last_word(tmp_path: Path) -> None:
    """A resumed rank writes on in the same file: the FINISHED of the process before says nothing about it."""
    metadata = {"time_ms": 0, "mono_ms": 0, "rank": 0}
    finished = encode_line("FINISHED", {"state": "completed", "message": None}, metadata)
    log = tmp_path / "rank0.out.log"
    log.write_text(f"noise\n{finished}\nnoise\n")
    assert read_last_words(log).finished == {"state": "completed", "message": None}
    log.write_text(f"{finished}\n{encode_line('INIT_START', {}, metadata)}\n")
    assert read_last_words(log).finished is None
    log.write_text("[PerfLog] {broken\n")
    assert read_last_words(log).finished is None
    assert read_last_words(tmp_path / "absent").lines == ()


def test_trouble_with_the_launch_itself_is_the_reason_of_every_rank() -> None:
    exits = judge({0: None, 1: None}, {0: SILENT, 1: SILENT}, first_rank=0, stopped_by=None, trouble="no port")
    assert [(item.state, item.reason) for item in exits] == [("failed", "no port")] * 2
    assert json.loads(exits[0].model_dump_json())["last_lines"] == ["last line"]
