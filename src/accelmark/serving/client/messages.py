"""Messages between the process that plans a load and the processes of the client: one line of JSON each.

For each stage the parent sends a :class:`StageOrder` and its first requests, each a :class:`Request` and its body. The
client answers :class:`Ready`, gets the ``time.monotonic_ns`` at which the stage begins, and then further requests, up
to the line ``null``. It sends each request that ended, and :class:`Done` at the end.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Union

from pydantic import Field, TypeAdapter

from accelmark.serving.request import LoadGenRun
from accelmark.spec.log.serving import RequestRecord
from accelmark.spec.model import Spec


class StageOrder(Spec):
    """A stage, as a process of the client carries it out."""

    stage: int
    slots: int | None
    """Requests in progress in a closed loop; null: each is sent when it is due."""
    until_s: float
    """Time in which requests of a closed loop are started."""
    timeout_s: float
    num_first: int
    """Requests that are sent before the stage begins."""
    loadgen: LoadGenRun | None = None
    """LoadGen, which decides when requests are sent."""


class Request(Spec):
    """A request of the stage; its body follows the line."""

    number: int
    prompt: int
    requested_tokens: int
    due_s: float | None
    input_tokens: int | None
    num_bytes: int
    """Bytes of the body."""


class Ready(Spec):
    """The first requests of the stage were read."""

    kind: Literal["ready"] = "ready"


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


FromClient = Annotated[Union[Ready, Ended, Done], Field(discriminator="kind")]
FROM_CLIENT: Final[TypeAdapter[FromClient]] = TypeAdapter(FromClient)


def line(message: Spec) -> bytes:
    """Return the message as a line."""
    return message.model_dump_json().encode() + b"\n"
