"""Read the records of served requests and the comparison of their answers (``requests.jsonl``, ``answers.jsonl``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from accelmark.spec.errors import RunError, first_error, raising
from accelmark.spec.log.inference import ANSWERS_FILE, SCORES_FILE, Answer, BenchmarkScore, RequestRecord
from accelmark.spec.model import Spec

S = TypeVar("S", bound=Spec)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]
Booleans = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]

_RECORDS_AT_ONCE: Final = 1024
_FLOATS: Final = (
    "due_s", "sent_s", "first_s", "end_s", "input_tokens", "output_tokens", "requested_tokens", "usage_input",
    "usage_output", "queue_s",
)  # fmt: skip


@final
@dataclass
class LinesReport:
    """Lines of a file of records that could not be read."""

    malformed: int = 0
    first_problem: str = ""
    """Line number and cause."""


@final
@dataclass(frozen=True)
class Requests:
    """Requests as columns, as in ``requests.jsonl``; NaN: null. Times are seconds since the request's stage began."""

    stage: Integers
    number: Integers
    prompt: Integers
    due_s: Floats
    sent_s: Floats
    first_s: Floats
    end_s: Floats
    status: Texts
    """Status, with the HTTP status where that is the error (``http_error 503``)."""
    is_ok: Booleans
    finish_reason: Texts
    input_tokens: Floats
    output_tokens: Floats
    requested_tokens: Floats
    usage_input: Floats
    usage_output: Floats
    queue_s: Floats
    gaps_us: Integers
    """Gaps between outputs of all requests, one request after another."""
    num_gaps: Integers
    """Gaps of each request."""

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def tokens(self) -> Floats:
        """Tokens of each answer: counted with the model's own tokenizer, else the server's ``usage``; NaN: neither."""
        return np.where(np.isnan(self.output_tokens), self.usage_output, self.output_tokens)

    @property
    def tokens_in(self) -> Floats:
        """Tokens of each prompt, counted in the same way."""
        return np.where(np.isnan(self.input_tokens), self.usage_input, self.input_tokens)

    def where(self, chosen: Booleans) -> Requests:
        """Return the chosen requests."""
        kept = {column.name: getattr(self, column.name)[chosen] for column in fields(self) if column.name != "gaps_us"}
        return Requests(**kept, gaps_us=self.gaps_us[np.repeat(chosen, self.num_gaps)])


def read_requests(path: Path) -> tuple[Requests, LinesReport]:
    """Read ``requests.jsonl``; a missing file has no requests. Raises RunError when it cannot be read."""
    report = LinesReport()
    return RequestTable(_lines(path, RequestRecord, report)).requests(), report


@final
class RequestTable:
    """Collects records as columns, which take a small part of the memory of records."""

    def __init__(self, records: Iterable[RequestRecord] = ()) -> None:
        self._recent: list[RequestRecord] = []
        self._parts: list[Requests] = []
        for record in records:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        self._recent.append(record)
        if len(self._recent) == _RECORDS_AT_ONCE:
            self._parts.append(_columns_of(self._recent))
            self._recent.clear()

    def requests(self) -> Requests:
        """Return the records so far, in their order."""
        parts = [*self._parts, _columns_of(self._recent)]
        columns = (column.name for column in fields(Requests))
        return Requests(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def _columns_of(records: Sequence[RequestRecord]) -> Requests:
    columns: dict[str, Any] = {
        name: np.array([getattr(record, name) for record in records], dtype=np.float64) for name in _FLOATS
    }
    for name in ("stage", "number", "prompt"):
        columns[name] = np.array([getattr(record, name) for record in records], dtype=np.int64)
    return Requests(
        **columns,
        is_ok=np.array([record.status == "ok" for record in records], dtype=np.bool_),
        status=np.array([_status_of(record) for record in records], dtype=np.object_),
        finish_reason=np.array([record.finish_reason for record in records], dtype=np.object_),
        gaps_us=np.array([gap for record in records for gap in record.gaps_us], dtype=np.int32),
        num_gaps=np.array([len(record.gaps_us) for record in records], dtype=np.int64),
    )


def _status_of(record: RequestRecord) -> str:
    has_code = record.status == "http_error" and record.http_status is not None
    return f"{record.status} {record.http_status}" if has_code else record.status


def read_comparisons(node_dir: Path | None) -> tuple[list[Answer], list[BenchmarkScore], int]:
    """Return the compared answers and scores of a run, which may be missing, and the number of malformed lines."""
    if node_dir is None:
        return [], [], 0
    report = LinesReport()
    answers = list(_lines(node_dir / ANSWERS_FILE, Answer, report))
    return answers, list(_lines(node_dir / SCORES_FILE, BenchmarkScore, report)), report.malformed


def _lines(path: Path, model: type[S], report: LinesReport) -> Iterator[S]:
    unreadable = raising(RunError, f"{path}: cannot be read", OSError)
    with unreadable, suppress(FileNotFoundError), path.open("rb", buffering=2**18) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield model.model_validate_json(line)
            except ValidationError as error:
                report.malformed += 1
                report.first_problem = report.first_problem or f"line {number}: {first_error(error)}"
