"""Messages between the process that plans a load and the processes of the client: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from accelmark.spec.log.serving import RequestRecord
from accelmark.spec.model import Spec


class Open(Spec):
    """Begin to take the requests of a stage."""

    kind: Literal["open"] = "open"
    stage: int
    slots: int | None
    """Requests in progress in a closed loop; null: each is sent when it is due."""
    until_s: float
    """Time in which requests of a closed loop are started."""
    timeout_s: float
    reports_first: bool = False
    """Whether to report each request's first output when it arrives."""


class Request(Spec):
    """A request of the stage; its body follows the line."""

    kind: Literal["request"] = "request"
    number: int
    prompt: int
    requested_tokens: int
    due_s: float | None
    input_tokens: int | None
    num_bytes: int
    """Bytes of the body."""


class Ready(Spec):
    """Of the parent: answer when everything before this was read. Of the client: it was."""

    kind: Literal["ready"] = "ready"


class Begin(Spec):
    """The stage begins."""

    kind: Literal["begin"] = "begin"
    mono_ns: int
    """``time.monotonic_ns`` of the beginning, the same clock in all processes."""


class Close(Spec):
    """There are no more requests in the stage."""

    kind: Literal["close"] = "close"


class First(Spec):
    """The first output of a request arrived."""

    kind: Literal["first"] = "first"
    number: int


class Ended(Spec):
    """A request ended."""

    kind: Literal["ended"] = "ended"
    record: RequestRecord
    text: str


class Done(Spec):
    """The stage ended in this process."""

    kind: Literal["done"] = "done"
    end_s: float
    """End of the last request, from the beginning of the stage."""
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    cpu_s: float
    """CPU time of the process in the stage."""


ToClient = Annotated[Open | Request | Ready | Begin | Close, Field(discriminator="kind")]
FromClient = Annotated[Ready | First | Ended | Done, Field(discriminator="kind")]
TO_CLIENT: Final[TypeAdapter[ToClient]] = TypeAdapter(ToClient)
FROM_CLIENT: Final[TypeAdapter[FromClient]] = TypeAdapter(FromClient)


def line(message: Spec) -> bytes:
    """Return the message as a line."""
    return message.model_dump_json().encode() + b"\n"
