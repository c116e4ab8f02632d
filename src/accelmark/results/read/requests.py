"""Read the records of served requests and the comparison of their answers (``requests.jsonl``, ``answers.jsonl``)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import Answer, BenchmarkScore, RequestRecord
from accelmark.spec.model import Spec, first_error

S = TypeVar("S", bound=Spec)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]
Booleans = npt.NDArray[np.bool_]

_MAX_LISTED_LINES: Final = 5
_FIELDS: Final = (
    "stage", "number", "prompt", "due_s", "sent_s", "first_s", "end_s", "status", "http_status", "finish_reason",
    "input_tokens", "output_tokens", "requested_tokens", "usage_input", "usage_output", "queue_s",
)  # fmt: skip
_fields_of: Final[Callable[[RequestRecord], tuple[Any, ...]]] = operator.attrgetter(*_FIELDS)


@final
@dataclass(slots=True)
class LinesReport:
    """Lines of a file of records that could not be read."""

    malformed: int = 0
    first_problems: list[str] = field(default_factory=list)
    """Line number and cause of the first few."""

    def take(self, number: int, error: ValidationError) -> None:
        """Count a malformed line."""
        self.malformed += 1
        if len(self.first_problems) < _MAX_LISTED_LINES:
            self.first_problems.append(f"line {number}: {first_error(error)}")


@final
@dataclass(frozen=True, slots=True)
class Requests:
    """Requests as columns, in the order of ``requests.jsonl``; NaN where a record has null.

    Times are seconds since the request's stage began.
    """

    stage: Integers
    number: Integers
    prompt: Integers
    due_s: Floats
    sent_s: Floats
    first_s: Floats
    end_s: Floats
    status: Sequence[str]
    """Status, with the HTTP status where that is the error (``http_error 503``)."""
    is_ok: Booleans
    finish_reason: Sequence[str | None]
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
        indices = np.flatnonzero(chosen).tolist()
        return Requests(
            stage=self.stage[chosen],
            number=self.number[chosen],
            prompt=self.prompt[chosen],
            due_s=self.due_s[chosen],
            sent_s=self.sent_s[chosen],
            first_s=self.first_s[chosen],
            end_s=self.end_s[chosen],
            status=[self.status[index] for index in indices],
            is_ok=self.is_ok[chosen],
            finish_reason=[self.finish_reason[index] for index in indices],
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            requested_tokens=self.requested_tokens[chosen],
            usage_input=self.usage_input[chosen],
            usage_output=self.usage_output[chosen],
            queue_s=self.queue_s[chosen],
            gaps_us=self.gaps_us[np.repeat(chosen, self.num_gaps)],
            num_gaps=self.num_gaps[chosen],
        )


def read_requests(path: Path) -> tuple[Requests, LinesReport]:
    """Read ``requests.jsonl``; a missing file has no requests. Raises RunError when it cannot be read."""
    report = LinesReport()
    return requests_of(_lines(path, RequestRecord, report)), report


def requests_of(records: Iterable[RequestRecord]) -> Requests:
    """Return records as columns."""
    rows: list[tuple[Any, ...]] = []
    gaps: list[Integers] = []
    for record in records:
        rows.append(_fields_of(record))
        gaps.append(np.array(record.gaps_us, dtype=np.int32))
    columns = dict(zip(_FIELDS, zip(*rows, strict=True) if rows else ((),) * len(_FIELDS), strict=True))
    status = columns["status"]

    def floats(name: str) -> Floats:
        return np.array(columns[name], dtype=np.float64)

    return Requests(
        stage=np.array(columns["stage"], dtype=np.int64),
        number=np.array(columns["number"], dtype=np.int64),
        prompt=np.array(columns["prompt"], dtype=np.int64),
        due_s=floats("due_s"),
        sent_s=floats("sent_s"),
        first_s=floats("first_s"),
        end_s=floats("end_s"),
        status=[_status(name, http) for name, http in zip(status, columns["http_status"], strict=True)],
        is_ok=np.array([name == "ok" for name in status], dtype=np.bool_),
        finish_reason=columns["finish_reason"],
        input_tokens=floats("input_tokens"),
        output_tokens=floats("output_tokens"),
        requested_tokens=floats("requested_tokens"),
        usage_input=floats("usage_input"),
        usage_output=floats("usage_output"),
        queue_s=floats("queue_s"),
        gaps_us=np.concatenate(gaps) if gaps else np.zeros(0, dtype=np.int32),
        num_gaps=np.array([len(each) for each in gaps], dtype=np.int64),
    )


def _status(name: str, http_status: int | None) -> str:
    return f"{name} {http_status}" if name == "http_error" and http_status is not None else name


def read_answers(path: Path) -> tuple[list[Answer], LinesReport]:
    """Read ``answers.jsonl``; a missing file has no answers. Raises RunError when it cannot be read."""
    report = LinesReport()
    return list(_lines(path, Answer, report)), report


def read_scores(path: Path) -> tuple[list[BenchmarkScore], LinesReport]:
    """Read ``scores.jsonl``; a missing file has no scores. Raises RunError when it cannot be read."""
    report = LinesReport()
    return list(_lines(path, BenchmarkScore, report)), report


def _lines(path: Path, model: type[S], report: LinesReport) -> Iterator[S]:
    try:
        with path.open("rb", buffering=2**18) as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield model.model_validate_json(line)
                except ValidationError as error:
                    report.take(number, error)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
